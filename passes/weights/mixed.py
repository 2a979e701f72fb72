"""Mixed precision: 4-bit weights; 8 bits in the first and last layers, the LM head and the embedding."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.errors import RecipeError
from accel.passes.weights._blocks import Blocks, Site


@dataclass(frozen=True)
class Mixed(Blocks):
    """`body`: bits of the inner layers; `ends`: bits of the first and last `edge` layers; `head`: bits
    outside the layers.
    """

    body: int = 4
    ends: int = 8
    edge: int = 1
    head: int = 8

    error = 1.2  # of random weights, where errors grow from layer to layer

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("body", "ends", "head"):
            if getattr(self, name) not in (4, 8):
                raise RecipeError(f"{name} = {getattr(self, name)}; give 4 or 8 bits")
        if self.edge < 0:
            raise RecipeError(f"edge = {self.edge}; give a number of layers, 0 or more")

    def bits(self, site: Site, layers: int) -> int:
        if site.layer is None:
            return self.head
        return self.ends if min(site.layer, layers - 1 - site.layer) < self.edge else self.body
