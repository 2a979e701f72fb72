"""`mass` [B,G,S]: the attention that each slot drew so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from accel.ir.ops.attention import operands_of
from accel.ir.ops.mass import attention_mass
from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import CacheRegion, Part
from accel.ir.trace import trace
from accel.passes.kv._shared.cached import cache_of
from accel.passes.kv.inputs import Input, Site
from accel.passes.state.recurrent import buffer


class Mass(Input):
    """State `mass.<layer>`, to which each call adds what its queries gave."""

    names = ("mass",)

    def prepare(self, program: Program, sites: Sequence[Site], methods: Sequence[Any]) -> None:
        """See Input."""
        editor, outputs = Editor(program, program.step.graph), program.step.output_nodes()
        for site in sites:
            _accumulate(program, editor, site, outputs)
        program.step.set_outputs(outputs)


def _accumulate(program: Program, editor: Editor, site: Site, outputs: dict[str, fx.Node]) -> None:
    keys = cache_of(site.node, Part.KEYS)
    groups, letter = int(sizes(keys)[1]), f"P{site.layer}"
    recent = State(Part.MASS, site.layer, "float32", ("B", groups, "C"))
    kept = replace(recent, shape=("B", groups, letter), region=CacheRegion.KEPT)
    wide = site.kept["pos"].meta["val"]
    old = [
        buffer(program, editor, kept, {"B": wide.shape[0], letter: wide.shape[2]}),
        buffer(program, editor, recent, {"B": wide.shape[0], "C": keys.meta["val"].shape[2]}),
    ]
    site.kept["mass"], site.kept["mass.recent"] = old
    form = vars(operands_of(site.node))
    read = {name: n for name, n in form.items() if isinstance(n, fx.Node)}
    rest = {name: value for name, value in form.items() if name not in read}

    def add(before: Tensor, since: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        drawn = attention_mass(**rest, **dict(zip(read, values, strict=True)))
        # tokens that were demoted come before
        first = drawn.shape[2] - before.shape[2] - since.shape[2]
        last = first + before.shape[2]
        return before + drawn[..., first:last], since + drawn[..., last:]

    with editor.graph.inserting_before(
        editor.graph.find_nodes(op="output")[0]
    ):  # outside of any layer
        key = "mass", *rest.items(), *read
        outputs[kept.output], outputs[recent.output] = trace(
            editor, kept.name, add, *old, *read.values(), like=site.node, key=key
        )
