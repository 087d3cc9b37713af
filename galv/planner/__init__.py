"""Model and cluster in, plan out: which strategies exist, how a model is captured and cut, and the search over it."""
