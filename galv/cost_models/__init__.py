"""Prices: seconds and bytes of computation, communication, memory and pipelines. No search, no torch."""
