"""Max pooling without indices."""
