"""Models, images and weights by name."""
