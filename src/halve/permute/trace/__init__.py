"""Trace channels through a network: which ones must be permuted together."""
