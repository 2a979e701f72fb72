"""Backends: what runs a model's graphs. ONNX Runtime, Triton, or every operator by its reference."""
