"""A model whose layers may be left out, as a depth method says it and a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass

NESTED, PROPAGATE = CACHES = ("nested", "propagate")


@dataclass(frozen=True)
class Depth:
    """Which layers a call may leave out, and does where its caller says nothing.

    plan: the layers that decoding runs. cache: "nested", where a layer that was left out lacks those
    tokens, or "propagate", where it has keys and values of them all the same. threshold: the confidence
    from which decoding goes no deeper; none where the graph has no exits.
    """

    plan: tuple[bool, ...]
    cache: str
    threshold: float | None = None
