"""AWQ (arXiv:2306.00978): 4-bit weights with channel scales from activation magnitudes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.program import Program
from accel.passes.calibrate import all_values, calibrate
from accel.passes.weights._blocks import Packed, Site, round_to_nearest, sites
from accel.passes.weights._calibrated import Calibrated, calibration_of
from accel.passes.weights._folds import Fold, folds
from accel.passes.weights._scaling import channel_scales, round_clipped

_TRIED = (2, 24)  # rows and tokens on which it is tried where scales may go
_SEEN = 512  # inputs of a product that its scales are chosen by


@dataclass(frozen=True)
class Int4Awq(Calibrated):
    """As int4, with scales by channel, which a norm or an earlier product takes, so that they cost
    nothing at run time, and with blocks cut off where their products gain by it.
    """

    error = 1.2  # of random weights, where errors grow from layer to layer

    def bits(self, site: Site, layers: int) -> int:
        return 4

    def prepare(self, program: Program, tokens: Tensor) -> float:
        layers = len(program.facts.layers)
        found, _ = sites(program, self.smallest)
        readers = {n: site for site in found if not site.embeddings for n in site.linears}
        places = find_folds(program, tokens, set(readers))
        first = {fold.readers[0]: fold for fold in places}
        scales: list[tuple[Fold, Tensor]] = []

        def visit(node: fx.Node, inputs: Tensor, *rest: Tensor) -> None:
            fold = first[node]
            what = f"choosing scales: {len(scales) + 1} of {len(first)}"
            calibration_of(program).progress(what, 0.5 * len(scales) / len(first))
            flat = inputs.flatten(0, -2).float()
            flat = flat[:: max(1, len(flat) // _SEEN)]
            bits = self.bits(readers[node], layers)
            weights = [program.params[str(n.args[1].target)] for n in fold.readers]  # type: ignore[union-attr]
            scale = channel_scales(
                flat, weights, fold.channels, fold.size,
                lambda weight: round_to_nearest(weight, bits, self.block, self.symmetric),
            )  # fmt: skip
            scales.append((fold, torch.ones(fold.size) if scale is None else scale))

        calibrate(program, tokens, set(first), visit)
        for fold, scale in scales:
            fold.apply(program, scale)
        return 0.5

    def rounded(self, weight: Tensor, inputs: Tensor, bits: int) -> Packed:
        return round_clipped(weight, inputs, bits, self.block, self.symmetric)


def find_folds(program: Program, tokens: Tensor, readers: set[fx.Node]) -> list[Fold]:
    """Where inputs of the products `readers` can be scaled, tried on a few of the tokens [n,T]."""
    rows, length = _TRIED
    found = []
    for graph, values in all_values(program, tokens[:rows, :length]):
        found += folds(program, graph, values, readers)
    return found
