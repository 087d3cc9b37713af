"""Model and cluster in, plan out: what strategies exist, how a model is captured and cut, and the search over it all."""
