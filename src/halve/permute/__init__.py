"""Channel orders that keep a network's function."""
