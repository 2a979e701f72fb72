"""Masks that a draft reads behind its newest token, and what stands for the layers that it leaves out (S3D,
arXiv:2405.20314).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from accel.ir.depth import NESTED, Depth
from accel.ir.errors import PassError
from accel.ir.parts import how, part
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, layer_calls, sizes
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.state.embedded import embedding_of
from accel.passes.state.extra_ids import ROWS, check, lay
from accel.passes.state.layers import Layers
from accel.passes.trained import ALL, first_product, read

DOWN, UP, LAYERS = "down", "up", "layers"  # of the trained part: [E,R], [R,E], [L]
NAMES = {name: f"shortcut.{name}" for name in (DOWN, UP)}  # of the program's parameters


@dataclass(frozen=True)
class MaskRows(Pass):
    """The step reads ids behind those that it has, one for each mask, whose embeddings are rows [N,E] of the trained
    part; see `lay`.

    of: the method, with `full_name`, `masks`, `of_layers`, and `key` and `trained` as of `Trained`. shortcut: the part,
    for `Shortcut`; parameters that nothing reads yet do not outlast a pass.
    """

    of: Any
    shortcut: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    after = (Layers,)  # else what a first layer makes of tokens alone reads them, too
    must_change = True
    stage = -1  # before weights are stored otherwise, by which the part's model is known

    @property
    def method(self) -> Any:
        return self.of

    def run(self, program: Program) -> Report:
        name = self.of.full_name
        check(program, name)
        width, count = int(sizes(embedding_of(program.step, name))[2]), len(program.facts.layers)
        numbers = first_product(program, program.step)
        want = {ROWS: (-1, width), DOWN: (width, -1), UP: (-1, width), LAYERS: (count,)}
        tensors = read(self.of, program.facts.name, numbers, {ALL: want})[ALL]
        again = how(part(self.of.key, False)).replace(self.of.key, "RECIPE.toml")
        if len(tensors[ROWS]) < self.of.masks:
            raise PassError(
                f"{name}: masks = {self.of.masks}, but the part has {len(tensors[ROWS])}; give no more, or {again}"
            )
        runs, trained = self.of.of_layers(count), tensors[LAYERS].numpy() > 0
        if not np.array_equal(runs, trained):
            raise PassError(
                f"{name}: drafts run layers {_listed(runs)}, but the part was trained for layers {_listed(trained)}; "
                f"set first and last so, or {again}"
            )
        lay(program, tensors[ROWS][: self.of.masks], name)
        self.shortcut.update(tensors)
        return Report(changed=1)


@dataclass(frozen=True)
class Shortcut(Pass):
    """Where the first of the layers that drafts leave out is left out, the stream x [B,T,E] gets a product of low rank
    of itself, which stands for all of them; calls of all layers compute nothing more:

        x  ->  x + x / rms(x) @ down @ up

    of, shortcut: as of `MaskRows`, which is to run before.
    """

    of: Any
    shortcut: Mapping[str, Tensor] = field(compare=False, repr=False)

    after = (MaskRows,)
    stage = 2  # after layers are conditional

    @property
    def method(self) -> Any:
        return self.of

    def run(self, program: Program) -> Report:
        name, count = self.of.full_name, len(program.facts.layers)
        if program.facts.depth != Depth((True,) * count, NESTED):
            raise PassError(
                f"{name}: what stands for layers that drafts leave out would also change calls that leave out layers "
                "by another rule; build with depth = by-call"
            )
        gone = np.flatnonzero(~self.of.of_layers(count))
        if not gone.size:
            return Report(refused=["drafts leave out no layer"])
        bridge(program, int(gone[0]), self.shortcut)
        return Report(changed=1)


def bridge(program: Program, layer: int, part: Mapping[str, Tensor]) -> None:
    """Let a conditional layer that is left out add a part's product to the stream, of the parameters `NAMES`."""
    region = layer_calls(program.step.graph)[layer].target
    assert isinstance(region, Conditional)
    graph = region.otherwise
    (out,) = graph.find_nodes(op="output")
    stream, *others = out.args[0]
    assert isinstance(stream, fx.Node)
    with graph.inserting_before(out):
        editor = Editor(program, graph)
        down, up = (editor.param(NAMES[name], part[name]) for name in (DOWN, UP))
        changed = trace(editor, "shortcut", _added, stream, down, up, key="shortcut")
    out.args = ((changed, *others),)


def _added(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return x + (unit @ down.to(x.dtype)) @ up.to(x.dtype)


def _listed(flags: Any) -> str:
    """The numbers of some layers."""
    return ", ".join(map(str, np.flatnonzero(flags)))
