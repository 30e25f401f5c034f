"""Masks by gradient descent."""
