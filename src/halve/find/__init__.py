"""How a mask is found: which layers, by which score, from which data."""
