"""Reading attention that is written out: softmax(scale · q kᵀ + masks) v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from accel.passes.recognise.region import Kinds, packet

aten = torch.ops.aten
_CASTS = (aten._to_copy, aten.to, aten.clone, aten.dropout, aten.contiguous)


@dataclass
class Found:
    """The parts of one attention. `hide` holds (mask node, value that hides), `add` (node, factor)."""

    q: fx.Node
    keys: fx.Node  # [.., D, S]: already transposed
    scale: float = 1.0
    softcap: float = 0.0
    hide: list[tuple[fx.Node, bool]] = field(default_factory=list)
    add: list[tuple[fx.Node, float]] = field(default_factory=list)


def read_scores(softmax: fx.Node, kinds: Kinds, number: Mapping[str, Tensor]) -> Found | str:
    """Walk back from a softmax to q kᵀ, collecting what is done to the scores; or the reason why not.

    `number` gives the parameters, for scales that are stored as tensors of one element.
    """
    node, factor = _arg(softmax, 0), 1.0
    softcap = 0.0
    hide: list[tuple[fx.Node, bool]] = []
    add: list[tuple[fx.Node, float]] = []
    outside = (0, 0)  # masks met before the soft cap, walking back: they are applied after it
    for _ in range(32):
        op = packet(node)
        if op in _CASTS:
            node = _arg(node, 0)
        elif op in (aten.mul, aten.div) and (found := _scalar(node, number)):
            inner, value = found
            factor = factor * value if op is aten.mul else factor / value
            node = inner
        elif op in (aten.add, aten.sub) and (parts := _split(node, kinds)):
            sign = -1.0 if op is aten.sub else 1.0
            add.append((parts[1], sign * factor))
            node = parts[0]
        elif op is aten.masked_fill:
            hide.append((_arg(node, 1), True))
            node = _arg(node, 0)
        elif op is aten.where and (side := _where(node, kinds)):
            hide.append((_arg(node, 0), side[1]))
            node = side[0]
        elif op is aten.tanh and not softcap:
            softcap, factor, outside = factor, 1.0, (len(add), len(hide))
            node = _arg(node, 0)
        elif op in (aten.matmul, aten.bmm):
            if softcap and (len(add), len(hide)) != outside:
                return "a mask is applied before the soft cap"
            scale = factor * softcap if softcap else factor
            return Found(_arg(node, 0), _arg(node, 1), scale, softcap, hide, add)
        else:
            return f"{node.name} ({op}) stands between q·kᵀ and the softmax"
    return "no q·kᵀ found within 32 operators"


def _arg(node: fx.Node, index: int) -> fx.Node:
    value = node.args[index]
    assert isinstance(value, fx.Node), node.format_node()
    return value


def _scalar(node: fx.Node, number: Mapping[str, Tensor]) -> tuple[fx.Node, float] | None:
    """(scores, number) of scores * number or scores / number."""
    a, b = node.args[:2]
    for x, y in ((a, b), (b, a)):
        if not isinstance(x, fx.Node) or (packet(node) is aten.div and x is not a):
            continue
        if isinstance(y, (int, float)):
            return x, float(y)
        if isinstance(y, fx.Node) and y.op == "get_attr" and number[str(y.target)].numel() == 1:
            return x, float(number[str(y.target)])
    return None


def _split(node: fx.Node, kinds: Kinds) -> tuple[fx.Node, fx.Node] | None:
    """(scores, mask) of scores + mask: the mask does not depend on tokens."""
    a, b = node.args[:2]
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or node.kwargs.get("alpha", 1) != 1:
        return None
    if kinds[a] == "data" and kinds[b] != "data":
        return a, b
    if kinds[b] == "data" and kinds[a] != "data" and packet(node) is aten.add:
        return b, a
    return None


def _where(node: fx.Node, kinds: Kinds) -> tuple[fx.Node, bool] | None:
    """(scores, the mask value that hides them)."""
    _, yes, no = node.args
    if isinstance(yes, fx.Node) and kinds[yes] == "data":
        return yes, False
    if isinstance(no, fx.Node) and kinds[no] == "data":
        return no, True
    return None
