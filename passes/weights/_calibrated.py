"""Rounding weights by what they are multiplied with: the inputs that a text gives them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.calibration import Calibration
from accel.ir.errors import RecipeError
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.calibrate import calibrate
from accel.passes.clean.clean import forget_unused
from accel.passes.weights._blocks import Blocks, Packed, Site, insert, round_to_nearest, sites


@dataclass(frozen=True)
class Calibrated(Blocks):
    """Weights are rounded in the order in which `tokens` of text reach them, so that later ones see
    what rounded ones make of it. Embeddings, and a head that shares their table, go to the nearest.
    """

    tokens: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1:
            raise RecipeError(f"tokens = {self.tokens}; give how many to calibrate on, 1 or more")

    @abstractmethod
    def rounded(self, weight: Tensor, inputs: Tensor, bits: int) -> Packed:
        """A weight [N,K] in few bits, for inputs [tokens,K]."""

    def prepare(self, program: Program, tokens: Tensor) -> float:
        """Change the program, going by tokens [n,T], before any weight is rounded; returns the share
        of the work that is then done.
        """
        return 0.0

    def run(self, program: Program) -> Report:
        report = Report()
        text = calibration_of(program)
        tokens = text.tokens[: max(1, self.tokens // text.tokens.shape[1])]
        start = self.prepare(program, tokens)
        found, refused = sites(program, self.smallest)
        report.refused += refused
        layers = len(program.facts.layers)
        todo = {site.name: site for site in found}

        def put(site: Site, packed: Packed) -> None:
            insert(program, site, packed)
            del todo[site.name]
            report.changed += 1

        def nearest(site: Site) -> None:
            weight, bits = program.params[site.name], self.bits(site, layers)
            put(site, round_to_nearest(weight, bits, self.block, self.symmetric))

        def visit(node: fx.Node, inputs: Tensor) -> None:
            site = wanted[node]
            share = start + (1 - start) * report.changed / len(found)
            text.progress(f"rounding weights: {report.changed + 1} of {len(found)}", share)
            with torch.no_grad():
                flat = inputs.flatten(0, -2).float()
                bits = self.bits(site, layers)
                packed = self.rounded(program.params[site.name], flat, bits)
            put(site, packed)

        for site in found:
            if site.embeddings:
                nearest(site)
        wanted = {node: site for site in todo.values() for node in site.linears}
        calibrate(program, tokens, wanted, visit)
        for site in list(todo.values()):  # which no text reaches
            nearest(site)
        forget_unused(program)
        return report


def calibration_of(program: Program) -> Calibration:
    """What the program was given to calibrate on; random tokens where that is nothing."""
    longest = min(256, program.facts.max_context)
    return program.calibration or Calibration.random(program.facts.vocab_size, longest)
