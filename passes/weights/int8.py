"""8-bit weights, rounded to nearest in blocks: a quarter of the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from accel.passes.weights._blocks import Blocks, Site


@dataclass(frozen=True)
class Int8(Blocks):
    """All products and embeddings in 8 bits (8.5 with scales).

    Before and after: `tests/passes/texts/int8.before.txt`, `int8.after.txt`.
    """

    error = 0.3  # of random weights, where errors grow from layer to layer

    def bits(self, site: Site, layers: int) -> int:
        return 8
