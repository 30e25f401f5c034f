"""2:4 convolutions and Linear layers on CPUs, as machine code with the pattern baked in."""
