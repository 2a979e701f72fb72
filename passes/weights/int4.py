"""4-bit weights, rounded to nearest in blocks: an eighth of the bytes and of the time to read them."""

from __future__ import annotations

from dataclasses import dataclass

from accel.passes.weights._blocks import Blocks, Site


@dataclass(frozen=True)
class Int4(Blocks):
    """All products and embeddings in 4 bits (4.25 to 6 with scales, by `block`)."""

    block: int = 64  # 4.5 bits, as others' 4-bit forms have

    error = 1.2  # of random weights, where errors grow from layer to layer

    def bits(self, site: Site, layers: int) -> int:
        return 4
