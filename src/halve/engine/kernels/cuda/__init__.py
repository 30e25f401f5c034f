"""Compile and launch CUDA kernels."""
