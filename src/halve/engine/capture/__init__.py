"""What a captured graph holds for."""
