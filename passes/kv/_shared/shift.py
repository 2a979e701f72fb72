"""An entry that moves keys: what was rotated for one position is rotated on to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.entries.shift import SHIFT, keys_of, turned_of
from accel.ir.errors import PassError
from accel.ir.ops.attention import attention
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program, evaluate
from accel.ir.region import Entry
from accel.ir.state import Part
from accel.passes import Pass, Report
from accel.passes.entry_inputs import EntryInputs
from accel.passes.kv._shared.by_token import check_by_token
from accel.passes.kv._shared.cached import appends, cache_of
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head

_SUFFIX = 47  # example size while shapes are worked out
_CLOSE = 1e-3  # how exactly two rotations must make one


@dataclass(frozen=True)
class Shift(Pass):
    """-> the entry `shift(delta [B,S], keys.<layer> [B,G,S,D]) -> turned.<layer>`: keys of the cache as they
    are `delta` positions later, or earlier.

    It is made of the step's own `rope` with its tables, continued to negative positions. The
    factor that some models put on both of them (YaRN) is on the keys already, and is taken off.
    """

    what: str = "kv.reuse = pie"  # the method that asks, for errors

    after = (Cache, Head)
    must_change = True
    flat = True
    grade = "approximate"  # what follows an edit keeps values that were made before it

    def run(self, program: Program) -> Report:
        found = rotations(program, self.what)
        graph = fx.Graph()
        inputs = EntryInputs(program, graph)
        suffix = inputs.source.symbol("S", _SUFFIX)
        delta = inputs.new("delta", inputs.batch, suffix)
        keys = {}
        for layer, node in found.items():
            _, groups, _, width = node.meta["val"].shape
            shape = inputs.batch, groups, suffix, width
            keys[layer] = inputs.new(keys_of(layer), *shape, dtype=torch.float32)
        editor, outputs = Editor(program, graph), {}
        places: dict[Any, tuple[fx.Node, ...]] = {}
        for layer, node in found.items():
            cos, sin = operand_of(node, "cos"), operand_of(node, "sin")
            interleaved = operand_of(node, "interleaved")
            if (cos, sin) not in places:
                made = tables(program, layer, cos, sin, self.what)
                both = [
                    editor.param(f"shift.{len(places)}.{n}", t)
                    for n, t in zip("cs", made, strict=True)
                ]
                zero = made[0].shape[0] // 2
                places[cos, sin] = (editor.call(torch.ops.aten.add.Tensor, delta, zero), *both)
            at, *both = places[cos, sin]
            turned = editor.call(rope.default, keys[layer], at, *both, interleaved)
            outputs[turned_of(layer)] = turned
        graph.output(tuple(outputs.values()))
        program.entries[SHIFT.name] = Entry(graph, list(outputs))
        return Report(changed=len(outputs))


def rotations(program: Program, what: str) -> dict[int, fx.Node]:
    """Layer -> the rotation that gave the keys of its cache. Raises PassError, which says to leave `what` out."""
    found: dict[int, fx.Node] = {}
    sites = program.nodes(attention.default, entry=program.step)
    check_by_token(program, sites, "which cannot be rotated to another position", what)
    owners = {s.name: s.layer for s in program.state}
    for node in sites:
        layer = node.meta.get("layer")
        if not appends(node) or layer is None:
            raise PassError(
                f"{node.name} reads keys that are not in a per-token cache; leave {what} out for it"
            )
        new = operand_of(operand_of(node, Part.KEYS), "new")
        if not (isinstance(new, fx.Node) and new.target is rope.default):
            raise PassError(
                f"layer {layer}: its cached keys are not rotated by position (learned positions, "
                f"a latent, a layer without rope), so they cannot be moved; leave {what} out for this model"
            )
        owner = owners[str(cache_of(node, Part.KEYS).target)]
        assert owner is not None
        found[owner] = new
    return found


def tables(
    program: Program, layer: int, cos: Any, sin: Any, what: str = "kv.reuse = pie"
) -> tuple[Tensor, Tensor]:
    """cos and sin [2M-1,R/2] of positions -(M-1) .. M-1, without a common factor."""
    try:
        c, s = (t.double() for t in evaluate([cos, sin], program.params, {}))
    except KeyError:
        raise PassError(
            f"layer {layer}: its rotation depends on the call, not on positions alone; leave {what} out for this "
            "model"
        ) from None
    factor = c[:1]
    c, s = c / factor, s / factor
    half = torch.arange(0, max(1, c.shape[0] // 2), max(1, c.shape[0] // 64))
    a, b = half[:, None], half[None]
    off = (c[a] * c[b] - s[a] * s[b] - c[a + b]).abs().max()
    if not float(off) < _CLOSE:
        raise PassError(
            f"layer {layer}: two of its rotations do not compose to one (error {float(off):.1g}), for example "
            f"because rope is scaled by length, so keys cannot be moved; leave {what} out for this model"
        )
    back = torch.arange(c.shape[0] - 1, 0, -1)
    both = torch.cat((c[back], c)), torch.cat((-s[back], s))
    return both[0].float().contiguous(), both[1].float().contiguous()
