"""PyTorch's own kernels, cuDNN and cuBLAS."""
