"""Tokens that a score did not choose, in a form of fewer bits: what attention reads of them, how they get there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import CacheRegion, Part
from accel.ir.trace import trace
from accel.passes.kv.keep import Base as Keep
from accel.passes.state.recurrent import buffer

_FAR = 1 << 40  # after every position
_LOW = 67  # example size while shapes are worked out


def read(
    program: Program,
    editor: Editor,
    keep: Keep,
    node: fx.Node,
    kept: dict[str, fx.Node],
    held: dict[str, fx.Node],
) -> dict[str, fx.Node]:
    """State `low.<layer>.…` [B,G,Q,…] of a layer's attention, each head its own tokens, noted in `held`; and
    what attention is to read as kept: these, decoded, before what was.
    """
    layer, batch = int(node.meta["layer"]), kept["kept_pos"].meta["val"].shape[0]
    letters = {"B": batch, f"Q{layer}": editor.symbol(f"Q{layer}", _LOW + layer)}
    heads = int(sizes(kept["kept_pos"])[1])

    def declare(part: Part, detail: str, dtype: str, tail: tuple[int, ...], fill: int) -> fx.Node:
        shape: tuple[int | str, ...] = ("B", heads, f"Q{layer}", *tail)
        state = State(part, layer, dtype, shape, fill, CacheRegion.LOW, detail)
        name = f"low.{part}.{detail}" if detail else f"low.{part}"
        held[name] = buffer(program, editor, state, letters)
        return held[name]

    found: dict[str, Any] = {}
    shared = kept["kept_k"] is kept["kept_v"]
    for role in (Part.KEYS,) if shared else (Part.KEYS, Part.VALUES):
        width = int(sizes(kept[f"kept_{role}"])[3])
        names = keep.parts(width)
        parts = [declare(role, part, dtype, (count,), 0) for part, (dtype, count) in names.items()]

        def joined(high: Tensor, *low: Tensor, names: Any = names, width: int = width) -> Tensor:
            return torch.cat((keep.decode(dict(zip(names, low, strict=True)), width), high), dim=2)

        with editor.graph.inserting_before(node):
            found[f"kept_{role}"] = trace(
                editor,
                f"low.{layer}",
                joined,
                kept[f"kept_{role}"],
                *parts,
                like=node,
                key=("low", keep, width),
            )
    where = declare(Part.POSITIONS, "", "int64", (), -1)
    with editor.graph.inserting_before(node):
        found["kept_pos"] = editor.call(
            torch.ops.aten.cat.default, [where, kept["kept_pos"]], 2, like=node
        )
    return {"kept_v": found["kept_k"], **found}


def demoted(
    keep: Keep, named: dict[str, Any], x: dict[str, Tensor], lost: Tensor
) -> dict[str, Tensor]:
    """What is held in fewer bits from now on: that of before, but what is `lost` to later queries, and the real
    slots that were not chosen; in the order of their positions, -1 behind the last.
    """
    where: Tensor = named["positions"]
    stays = torch.zeros_like(where).scatter(2, named["chosen"], named["real"].long())
    gone = torch.where((where >= 0) & (stays == 0), where, -1)
    before = x["kept_low.pos"].masked_fill(lost, -1)
    places = torch.cat((before, gone), dim=2)
    order = places.masked_fill(places < 0, _FAR).sort(dim=2, stable=True).indices
    out = {"low.pos": places.gather(2, order)}
    for role, name in (("k", "keys"), ("v", "values")):
        if f"kept_low.{role}" in x:
            for part, new in keep.encode(named[name]).items():
                part = f"low.{role}.{part}" if part else f"low.{role}"
                both = torch.cat((x[f"kept_{part}"], new), dim=2)
                out[part] = both.gather(2, order[..., None].expand(-1, -1, -1, both.shape[3]))
    return out
