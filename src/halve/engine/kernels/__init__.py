"""Kernel families, one per folder."""
