"""The first layer of many networks with its pooling, for Hopper GPUs."""
