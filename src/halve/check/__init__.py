"""What is true of a masked model."""
