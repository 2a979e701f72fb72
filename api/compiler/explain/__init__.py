"""What a recipe does to a model, told before it is built: in words, pictures, bytes and predicted speed."""

from accel.compiler.explain.explain import Explanation, Method, Rewrite, explain

__all__ = ["Explanation", "Method", "Rewrite", "explain"]
