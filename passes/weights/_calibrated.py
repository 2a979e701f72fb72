"""Rounding weights by what they are multiplied with: the inputs that a text gives them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.calibration import Calibration
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.calibrate import calibrate
from accel.passes.clean.clean import forget_unused
from accel.passes.weights._blocks import (
    Blocks,
    Packed,
    Site,
    insert,
    round_to_nearest,
    sites,
    stacked,
)


@dataclass(frozen=True)
class Calibrated(Blocks):
    """Weights are rounded in the order in which `tokens` of text reach them, so that later ones see
    what rounded ones make of it. Embeddings, and a head that shares their table, go to the nearest;
    so does an expert that no token chose. The others are rounded by the tokens that chose them.
    """

    tokens: int = option(8192, least=1)
    small: ClassVar[Mapping[str, Any]] = {"block": 16, "smallest": 256, "tokens": 5}

    @abstractmethod
    def rounded(self, weight: Tensor, inputs: Tensor, bits: int) -> Packed:
        """A weight [N,K] in few bits, for inputs [tokens,K]."""

    def prepare(self, program: Program, tokens: Tensor) -> float:
        """Change the program, going by tokens [n,T], before any weight is rounded; returns the share
        of the work that is then done.
        """
        return 0.0

    def choose(self, program: Program, tokens: Tensor) -> dict[str, int]:
        """The bits of each weight, by name; it may divide weights whose parts get different ones."""
        layers = len(program.facts.layers)
        return {site.name: self.bits(site, layers) for site in sites(program, self.smallest)[0]}

    def run(self, program: Program) -> Report:
        report = Report()
        text = calibration_of(program)
        tokens = text.tokens[: max(1, self.tokens // text.tokens.shape[1])]
        start = self.prepare(program, tokens)
        bits = self.choose(program, tokens)
        found, refused = sites(program, self.smallest)
        report.refused += refused
        todo = {site.name: site for site in found}

        def put(site: Site, packed: Packed) -> None:
            insert(program, site, packed)
            del todo[site.name]
            report.changed += 1

        def nearest(site: Site) -> None:
            put(site, self.nearest(program, site, bits[site.name]))

        def visit(node: fx.Node, inputs: Tensor, *ids: Tensor) -> None:
            site = wanted[node]
            share = start + (1 - start) * report.changed / len(found)
            text.progress(f"rounding weights: {report.changed + 1} of {len(found)}", share)
            with torch.no_grad():
                flat = inputs.flatten(0, -2).float()
                few, weight = bits[site.name], program.params[site.name]
                if site.experts:
                    packed = self._experts(site.matrices(weight), flat, ids[0], few)
                else:
                    packed = self.rounded(weight, flat, few)
            put(site, packed)

        for site in found:
            if site.embeddings:
                nearest(site)
        wanted = {node: site for site in todo.values() for node in [*site.linears, *site.experts]}
        calibrate(program, tokens, wanted, visit)
        for site in list(todo.values()):  # which no text reaches
            nearest(site)
        forget_unused(program)
        return report

    def _experts(self, weights: Sequence[Tensor], inputs: Tensor, ids: Tensor, bits: int) -> Packed:
        """Experts [N,K], for rows [n,K] of which ids [n] say whose they are."""
        parts = []
        for expert, weight in enumerate(weights):
            own = inputs[ids == expert]
            if len(own):
                parts.append(self.rounded(weight, own, bits))
            else:
                parts.append(round_to_nearest(weight, bits, self.block, self.symmetric))
        return stacked(parts)


def calibration_of(program: Program) -> Calibration:
    """What the program was given to calibrate on; random tokens where that is nothing."""
    longest = min(256, program.facts.max_context)
    return program.calibration or Calibration.random(program.facts.vocab_size, longest)
