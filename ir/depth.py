"""A model whose layers may be left out, as a depth method says it and a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Fields

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

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The step's inputs by which a call chooses, with their shapes."""
        threshold = {} if self.threshold is None else {"threshold": ()}
        return {"run_layers": (len(self.plan),), **threshold}

    def check(self, f: Fields) -> None:
        """See `fields.read`."""
        if not any(self.plan):
            raise f.wrong("plan", list(self.plan), "bools, some of them true")
        if self.cache not in CACHES:
            raise f.wrong("cache", self.cache, f"one of {', '.join(CACHES)}")
