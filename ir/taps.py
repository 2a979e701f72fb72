"""Names of what a step gives beside its logits for methods that read the residual stream."""

from __future__ import annotations

EMBEDS = "stream.embeds"  # before the first layer
FINAL = "final"  # before the output head, behind the last norm


def stream(layer: int) -> str:
    """Behind a layer, before the next one's norm."""
    return f"stream.{layer}"
