"""Masks in one shot, from scores."""
