"""The ONNX target's lowering rules, a file per family of operators."""
