"""What values depend on, and sub-graphs of one input that can be tried out on numbers."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.capture.encoder import FEATURES, INPUT_POSITIONS, INPUTS
from accel.ir.program import Program, evaluate

aten = torch.ops.aten
_SHAPE_ONLY = {
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.new_full.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.sym_size.int,
}
# Operators that move or scale the channels of a token and never mix tokens.
CHANNEL_OPS = {
    getattr(aten, name)
    for name in (
        "mul add sub neg div slice cat stack view reshape _unsafe_view unsqueeze squeeze select "
        "flatten unflatten transpose permute expand clone split split_with_sizes chunk unbind tanh pow "
        "view_as_complex view_as_real _to_copy to repeat_interleave reshape_as view_as expand_as type_as "
        "index_select index contiguous rsub"
    ).split()
}


def packet(node: fx.Node) -> Any:
    """The operator of a call, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


class Kinds(dict[fx.Node, str]):
    """Node -> 'const' (parameters), 'size', 'pos' (positions and sizes) or 'data' (tokens)."""

    def __init__(self, graph: fx.Graph):
        super().__init__()
        for node in graph.nodes:
            self[node] = self._kind(node)

    def _kind(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "pos" if node.target in ("positions", INPUT_POSITIONS) else "data"
        if node.op == "get_attr":
            return "const"
        if not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            return "size"
        if node.target in _SHAPE_ONLY:
            return "pos"
        kinds = {self[n] for n in node.all_input_nodes}
        if "data" in kinds:
            return "data"
        return "pos" if kinds & {"pos", "size"} else "const"


def try_out(
    program: Program,
    node: fx.Node,
    known_values: Mapping[fx.Node, Tensor],
    positions: Tensor,
) -> Tensor:
    """The value of `node` with some nodes given, for tokens of these positions [B,T], and for as many
    of the encoder's, which are all zeros.
    """
    nothing = torch.zeros_like(positions)
    inputs = {
        "tokens": nothing,
        "positions": positions,
        INPUTS: nothing,
        INPUT_POSITIONS: positions,
    }
    for holder in node.graph.find_nodes(op="placeholder"):
        if holder.target == FEATURES:
            inputs[FEATURES] = torch.zeros(positions.shape[0], *holder.meta["val"].shape[1:])
    with torch.no_grad():
        (value,) = evaluate([node], program.params, inputs, known_values)
    assert isinstance(value, Tensor)
    return value


def source(
    node: fx.Node,
    kinds: Kinds,
    order: Mapping[fx.Node, int],
    accept: Callable[[fx.Node], bool],
    limit: int = 64,
) -> fx.Node | None:
    """The nearest value that `node` is a function of (beside positions and parameters) and `accept` takes.

    Walks back through channel operators, latest node first; wherever one value is left, every path
    goes through it.
    """
    heap = [(-order[node], node)]
    queued = {node}
    for _ in range(limit):
        if not heap:
            return None
        _, latest = heapq.heappop(heap)
        if not heap and latest is not node and accept(latest):
            return latest
        if latest.op != "call_function" or (
            packet(latest) not in CHANNEL_OPS and not is_pick(latest)
        ):
            return None
        for parent in latest.all_input_nodes:
            if kinds[parent] == "data" and parent not in queued:
                queued.add(parent)
                heapq.heappush(heap, (-order[parent], parent))
    return None


def is_pick(node: fx.Node) -> bool:
    """Whether a node takes one of several results."""
    return node.target is operator.getitem


def numbering(graph: fx.Graph) -> dict[fx.Node, int]:
    """Node -> its place in the graph."""
    return {n: i for i, n in enumerate(graph.nodes)}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    """Equal shapes and values, up to rounding relative to the largest."""
    if a.shape != b.shape:
        return False
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    return (
        bool(torch.isfinite(a).all())
        and float((a - b).abs().max() if a.numel() else 0) <= tolerance * scale
    )
