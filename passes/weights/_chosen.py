"""Weights in few bits, of which those that cost most for their size get more: measured, not by their place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program
from accel.ir.weights import Stacked
from accel.passes.clean.clean import forget_unused, replace
from accel.passes.weights._blocks import Packed, Site, round_to_nearest, sites
from accel.passes.weights._calibrated import Calibrated, calibration_of
from accel.passes.weights._search import round_by_inputs
from accel.passes.weights._sensitivity import rounding_losses

aten = torch.ops.aten
_TOKENS = 512  # that losses are measured on
_DAMPING = 0.01  # as in int4-gptq


@dataclass
class _Candidate:
    """Rows of a site's weight that may have other bits than the rest. loss: of few bits, KL per token."""

    site: Site
    part: int
    size: int
    loss: float = 0.0


@dataclass(frozen=True)
class Chosen(Calibrated):
    """Embedding, head and a `share` of the layers' weights get `many` bits: those that `few` would harm most for their
    bytes. The others get `few`, rounded by the calibration text: steps that err least, errors fed back.
    """

    tokens: int = 4096

    few: ClassVar[int] = 4
    many: ClassVar[int] = 8

    @property
    @abstractmethod
    def share(self) -> float:
        """From 0 to 1."""

    def bits(self, site: Site, layers: int) -> int:
        if site.layer is None:
            return self.many
        return max(4, self.few) if site.experts else self.few

    def choose(self, program: Program, tokens: Tensor) -> dict[str, int]:
        found, _ = sites(program, self.smallest)
        layers = len(program.facts.layers)
        bits = {site.name: self.bits(site, layers) for site in found}
        parts = {
            s.name: _parts(program, s, self.smallest)
            for s in found
            if s.layer is not None and s.linears
        }
        own = [s for s in found if s.name in parts]
        chosen = self._chosen(program, tokens, own, parts) if own and self.share else set()
        for site in own:
            more = [(site.name, i) in chosen for i in range(len(parts[site.name]))]
            each = [self.many if one else self.few for one in more]
            if all(more):
                bits[site.name] = self.many
            elif any(more):
                bits |= _divide(program, site, parts[site.name], each)
        forget_unused(program)
        return bits

    def _chosen(
        self, program: Program, tokens: Tensor, sites: Sequence[Site], parts: dict[str, list[int]]
    ) -> set[tuple[str, int]]:
        """The parts of weights that get more bits."""
        calibration_of(program).progress("measuring what rounding costs", 0.0)
        steps = set(_nodes(program))
        products = {n: s.name for s in sites for n in s.linears if n in steps}
        rows = tokens[: max(1, _TOKENS // tokens.shape[1]), : program.facts.max_context]
        losses = rounding_losses(program, rows, products, self._in_few, parts)
        width = {s.name: int(program.params.blank(s.name).shape[1]) for s in sites}
        all_of = [
            _Candidate(s, i, rows * width[s.name], losses[s.name][i])
            for s in sites
            for i, rows in enumerate(parts[s.name])
        ]
        room = self.share * sum(c.size for c in all_of)
        chosen = set()
        for one in sorted(all_of, key=lambda c: c.loss / c.size, reverse=True):
            if one.size <= room:
                room -= one.size
                chosen.add((one.site.name, one.part))
        return chosen

    def _in_few(self, weight: Tensor) -> Tensor:
        packed = round_to_nearest(weight, self.few, self.block, self.symmetric)
        return packed.weight()[:, : weight.shape[1]]

    def rounded(self, weight: Tensor, inputs: Tensor, bits: int) -> Packed:
        return round_by_inputs(weight, inputs, bits, self.block, self.symmetric, _DAMPING)


def _nodes(program: Program) -> list[fx.Node]:
    return [n for graph in program.graphs(program.step) for n in graph.nodes]


def _parts(program: Program, site: Site, smallest: int) -> list[int]:
    """How many rows each part has of a weight that is a stack. Two are a gate and what it multiplies, which kernels
    take together, and are one part; so is what else is read as one.
    """
    stored = program.params.stored(site.name)
    biases = [operand_of(n, "bias") for n in site.linears]
    fixed = all(b is None or b.op == "get_attr" for b in biases)
    if isinstance(stored, Stacked) and not stored.changes and len(stored.parts) > 2 and fixed:
        if min(part.blank.numel() for part in stored.parts) >= smallest:
            return [int(part.blank.shape[0]) for part in stored.parts]
    return [int(program.params.blank(site.name).shape[0])]


def _divide(
    program: Program, site: Site, parts: Sequence[int], each: Sequence[int]
) -> dict[str, int]:
    """A product for each run of parts of the same bits, in place of one; the bits of their weights by name. each: of a
    part.
    """
    stored = program.params.stored(site.name)
    assert isinstance(stored, Stacked)
    runs: list[list[int]] = []  # numbers of parts
    for i in range(len(parts)):
        if runs and each[runs[-1][0]] == each[i]:
            runs[-1].append(i)
        else:
            runs.append([i])
    bits = {}
    for run in runs:
        name = f"{site.name}[{run[0]}:{run[-1] + 1}]"
        program.params[name] = Stacked.rows([stored.parts[i] for i in run])
        bits[name] = each[run[0]]
    for node in site.linears:
        editor = Editor(program, node.graph)
        bias, start, made = operand_of(node, "bias"), 0, []
        with node.graph.inserting_before(node):
            for name in bits:
                end = start + int(program.params.blank(name).shape[0])
                own = None
                if bias is not None:
                    value = program.params[str(bias.target)][start:end].clone()
                    own = editor.param(f"{bias.target}[{start}:{end}]", value)
                weight = editor.param(name)
                given = operand_of(node, "input")
                made.append(editor.call(aten.linear.default, given, weight, own, like=node))
                start = end
            whole = editor.call(aten.cat.default, made, -1, like=node)
        replace(node, whole)
    return bits
