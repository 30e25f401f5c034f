"""Masks: patterns, layouts, files, and applying masks to a model."""
