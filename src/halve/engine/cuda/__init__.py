"""Kernels for NVIDIA GPUs, compiled on first use."""
