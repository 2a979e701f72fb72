"""NAME (paper, arXiv): what it does, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from accel.passes.weights._blocks import Blocks, Site


@dataclass(frozen=True)
class Template(Blocks):
    """How weights are rounded: here, to the nearest of 8 bits."""

    error = 0.5  # of random weights, where errors grow from layer to layer

    def bits(self, site: Site, layers: int) -> int:
        return 8
