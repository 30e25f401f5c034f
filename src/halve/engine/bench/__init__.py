"""Measure a compiled network against its peers: the same masked model in other systems, in turns in one run."""
