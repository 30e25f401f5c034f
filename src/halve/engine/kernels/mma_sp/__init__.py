"""2:4 convolutions and Linear layers with `mma.sp`."""
