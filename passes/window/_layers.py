"""Which layers see a window."""

from __future__ import annotations

from torch import fx

from accel.ir.ops.attention import attention, operands_of
from accel.ir.program import Program
from accel.ir.state import Part
from accel.passes.kv._shared.cached import appends, cache_of

_SEES = ("window", "chunk")  # masks that show no more than so many of the newest tokens


def readers(program: Program) -> dict[int, list[fx.Node]]:
    """The attention nodes that read the cache of each layer."""
    found: dict[int, list[fx.Node]] = {}
    layers = {s.name: s.layer for s in program.state}
    for node in program.nodes(attention.default, entry=program.step):
        if appends(node):
            layer = layers[str(cache_of(node, Part.KEYS).target)]
            assert layer is not None
            found.setdefault(layer, []).append(node)
    return found


def window_of(nodes: list[fx.Node]) -> int:
    """The most tokens that any of these attention nodes sees; 0: all."""
    sees = [operands_of(node) for node in nodes]
    return 0 if any(x.mask not in _SEES for x in sees) else max(x.window for x in sees)
