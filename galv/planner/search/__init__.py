"""Exact search over tables of numbers: which strategy each unit gets, and where the chain is cut into stages."""
