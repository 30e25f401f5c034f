"""Choose masks in one shot, from scores."""
