"""Measure a compiled network against its peers."""
