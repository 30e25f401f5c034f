"""Select the layers to mask."""
