"""Which layers are masked, and why not the others."""
