"""2:4 convolutions with `mma.sp`."""
