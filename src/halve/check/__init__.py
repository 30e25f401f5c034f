"""Check masked models: legality, hardware support, accuracy."""
