"""Which layers read keys of a prompt in fewer directions, as a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Fields


@dataclass(frozen=True)
class LowRank:
    """layers: those layers. widths: numbers of a token's keys in each, all heads together. ranks: in how many
    directions it has them.
    """

    layers: tuple[int, ...]
    widths: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def from_json(cls, f: Fields) -> LowRank:
        """Raises ArtifactError."""
        return cls(f.integers("layers"), f.integers("widths"), f.integers("ranks"))
