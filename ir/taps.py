"""Names of what a step gives beside its logits for methods that read the residual stream, or keys and values."""

from __future__ import annotations

EMBEDS = "stream.embeds"  # before the first layer
FINAL = "final"  # before the output head, behind the last norm


def stream(layer: int) -> str:
    """Behind a layer, before the next one's norm."""
    return f"stream.{layer}"


def keys(layer: int) -> str:
    """The keys of a layer's attention, all KV heads side by side, as its cache has them."""
    return f"keys.{layer}"


def values(layer: int) -> str:
    """The values, likewise."""
    return f"values.{layer}"
