"""Permute channels without changing a network's function."""
