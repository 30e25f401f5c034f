"""What a mask is: patterns, layouts, masks, their files, and putting them on a model."""
