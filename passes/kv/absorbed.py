"""What evicted tokens leave in a state of fixed size: how attention reads it, how it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import operands_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.ir.trace import trace
from accel.passes.kv._shared.more_keys import take_in
from accel.passes.kv.inputs import Site, call, every_input
from accel.passes.kv.keep import Base as Keep
from accel.passes.state.recurrent import buffer

PREFIX = "absorbed."  # of the state's names among what a site holds
_CONSTANT = "absorb"  # of the tensors that a method reads


def lasts(node: fx.Node) -> bool:
    """Whether an attention sees a token as long as it stays."""
    return operands_of(node).mask in ("causal", "full")


def read(
    program: Program, editor: Editor, keep: Keep, site: Site, tensors: Mapping[str, Tensor]
) -> None:
    """State `absorbed.<layer>.…` [B,G,…], which a layer's attention reads beside its keys. `tensors`: the method's own,
    of this layer.
    """
    layer, x = site.layer, operands_of(site.node)
    batch, groups = site.kept_values["pos"].meta["val"].shape[0], int(sizes(x.k)[1])
    wide = [int(sizes(site.kept_values.get(part, site.kept_values["k"]))[3]) for part in ("k", "v")]
    buffers: dict[str, fx.Node] = {}
    known = {name for one in every_input() for name in one.names}
    for name, size in keep.absorbed(*wide).items():
        if name in known:
            raise PassError(
                f"{type(keep).__name__} absorbs into `{name}`, which is an input of scores; give it another name"
            )
        state = State(Part.ABSORBED, layer, "float32", ("B", groups, *size), detail=name)
        buffers[name] = site.kept_values[PREFIX + name] = buffer(
            program, editor, state, {"B": batch}
        )
    with editor.graph.inserting_before(site.node):
        own = {n: editor.param(parameter(layer, n), t) for n, t in tensors.items()}
        names, form = ("queries", *buffers, *own), {"scale": x.scale, "softcap": x.softcap}

        def look(*values: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = call(
                keep.read, {**form, **dict(zip(names, values, strict=True))}
            )
            return found

        value, lse = trace(
            editor,
            f"absorbed.{layer}",
            look,
            *(x.q, *buffers.values(), *own.values()),
            like=site.node,
            key=("absorbed", keep, *form.values(), *names),
        )
    take_in(editor, site.node, value, lse)


def parameter(layer: int, name: str) -> str:
    """The name of a method's tensor among the program's parameters."""
    return f"{_CONSTANT}.{layer}.{name}"


def written(keep: Keep, named: Mapping[str, Any], x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state after an eviction, as what a site holds names it; none where a layer has none."""
    held = {
        name.removeprefix(f"kept_{PREFIX}"): value
        for name, value in x.items()
        if name.startswith(f"kept_{PREFIX}")
    }
    if not held:
        return {}
    where: Tensor = named["positions"]
    stays = where.new_zeros(where.shape).scatter(2, named["chosen"], named["real"].long())
    absorb: Callable[..., dict[str, Tensor]] = keep.absorb
    found = call(absorb, {**named, **held, "gone": (where >= 0) & (stays == 0)})
    return {PREFIX + name: value for name, value in found.items()}
