"""Names of what a step gives beside its logits for methods that read the residual stream, or keys and values."""

from __future__ import annotations

from collections.abc import Sequence

EMBEDS = "stream.embeds"  # before the first layer
FINAL = "final"  # before the output head, behind the last norm


def is_tap(name: str) -> bool:
    """Whether an output is one of these: numbers of each token [B,T,E]."""
    return name == FINAL or name.startswith(("stream.", "keys.", "values."))


def stream(layer: int) -> str:
    """Behind a layer, before the next one's norm."""
    return f"stream.{layer}"


def keys(layer: int) -> str:
    """The keys of a layer's attention, all KV heads side by side, as its cache has them."""
    return f"keys.{layer}"


def values(layer: int) -> str:
    """The values, likewise."""
    return f"values.{layer}"


def last_keys(window: bool) -> str:
    """The keys of the last layer that has some of its own, of those with or without a window."""
    return f"keys.last.{'sliding' if window else 'full'}"


def last_values(window: bool) -> str:
    """The values, likewise."""
    return f"values.last.{'sliding' if window else 'full'}"


def last_own(windows: Sequence[int], shares: Sequence[int | None], window: bool) -> int | None:
    """Which layer that is, by the window of each (0: none) and the layer whose keys each reads; None: there is none."""
    found = [i for i, one in enumerate(windows) if bool(one) == window and shares[i] is None]
    return found[-1] if found else None
