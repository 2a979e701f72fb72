"""From a program to an ONNX graph."""
