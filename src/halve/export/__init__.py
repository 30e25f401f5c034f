"""ONNX files: write them from a masked network, and check on their bytes what TensorRT can use."""
