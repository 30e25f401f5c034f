"""Compile masked networks for fast inference."""
