"""Runs a plan: a Plan in, running training out, on torch.distributed and nothing home-made underneath."""
