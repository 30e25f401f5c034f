"""When a captured graph may replace the model's code."""
