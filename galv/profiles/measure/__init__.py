"""Times a machine and writes its profile: the only part of `profiles` that runs torch.

`grid` says what is timed, `work` does it, `sampling` and `session` decide how often and in which order, `ranks` joins
the processes, and `fit` makes a profile of the samples.
"""
