"""Kernel families: one folder each."""
