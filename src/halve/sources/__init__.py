"""Where models and images come from."""
