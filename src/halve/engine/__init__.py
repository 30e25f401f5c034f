"""Run masked networks fast."""
