"""Drives a lowered model: sessions over its state, loops that decode, samplers, text, artifacts.

Modules that drive an ONNX artifact import neither torch nor transformers; `eager` may.
"""
