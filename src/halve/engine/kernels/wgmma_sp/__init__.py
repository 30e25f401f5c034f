"""2:4 convolutions and Linear layers with `wgmma.sp`, for Hopper GPUs."""
