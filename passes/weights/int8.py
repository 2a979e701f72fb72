"""8-bit weights, rounded to nearest in blocks: a quarter of the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from accel.passes.weights._blocks import Blocks, Site


@dataclass(frozen=True)
class Int8(Blocks):
    """All products and embeddings in 8 bits (8.25 to 10 with scales, by `block`)."""

    block: int = 128  # finer ones lose no less that can be seen, and read more

    error = 0.3  # of random weights, where errors grow from layer to layer

    def bits(self, site: Site, layers: int) -> int:
        return 8
