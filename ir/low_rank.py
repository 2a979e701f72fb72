"""Which layers read keys of a prompt in fewer directions, as a manifest keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LowRank:
    """layers: those layers. heads, widths: the KV heads of each, and the numbers of one's keys. ranks: in how many
    directions it has those of all heads together.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    widths: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def shapes(self) -> dict[int, tuple[int, int, int]]:
        """Of each layer the sizes of what the directions of a row are kept in, [G,R,D]."""
        sizes = zip(self.heads, self.ranks, self.widths, strict=True)
        return dict(zip(self.layers, sizes, strict=True))
