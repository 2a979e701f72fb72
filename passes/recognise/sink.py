"""An attention's sink: a score beside those of the keys, that takes a share of the softmax and gives nothing."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.region import sizes
from accel.passes.recognise.region import Kinds, packet

aten = torch.ops.aten
_CASTS = (aten._to_copy, aten.to, aten.clone, aten.dropout, aten.contiguous)
_LIMIT = 64  # operators between the scores and their softmax


@dataclass(frozen=True)
class Sink:
    """`score`: a value, or where it is computed. `keeps_axis`: it has an axis of keys, of length 1. `end`: where it
    comes into play, if that is behind the product with v.
    """

    score: fx.Node | float
    keeps_axis: bool = True
    end: fx.Node | None = None


def without_sink(softmaxed: object, kinds: Kinds) -> tuple[fx.Node, Sink | None]:
    """The scores, and the one beside them that no key has; less a maximum they lose nothing."""
    assert isinstance(softmaxed, fx.Node)
    node, sink = softmaxed, None
    for _ in range(_LIMIT):
        op = packet(node)
        if op in _CASTS or (op is aten.sub and _is_maximum(node.args[1], _arg(node, 0))):
            node = _arg(node, 0)
        elif op is aten.cat and sink is None and (parts := _beside(node, kinds)):
            node, sink = parts
        elif op in (aten.pad, aten.constant_pad_nd) and sink is None and node.args[1] == [0, 1]:
            value: Any = node.args[3] if len(node.args) > 3 else 0
            node, sink = _arg(node, 0), Sink(float(value or 0))
        else:
            break
    return node, sink


def sink_behind(mixed: fx.Node, scores: fx.Node, kinds: Kinds) -> Sink | None:
    """The sink of softmax(s)·v · sigmoid(logsumexp(s) - sink), which is the attention with a sink: the sigmoid is the
    part of the softmax that the keys have.
    """
    end = next(iter(_plain_users(mixed)), None)
    if end is None or packet(end) is not aten.mul:
        return None
    first, second = (_uncast(n) if isinstance(n, fx.Node) else None for n in end.args[:2])
    share = second if first is _uncast(mixed) else first
    if share is not None and packet(share) is aten.unsqueeze:
        share = _uncast(_arg(share, 0))
    if share is None or packet(share) is not aten.sigmoid:
        return None
    less = _uncast(_arg(share, 0))
    if packet(less) is not aten.sub or not all(isinstance(n, fx.Node) for n in less.args[:2]):
        return None
    total, score = _uncast(_arg(less, 0)), _arg(less, 1)
    if packet(total) is not aten.logsumexp or kinds[score] == "data":
        return None
    if _uncast(_arg(total, 0)) is not scores:
        return None
    return Sink(score, len(sizes(total)) == len(sizes(scores)), end)


def _plain_users(node: fx.Node) -> list[fx.Node]:
    """What uses a value, casts aside; nothing where several do."""
    users = [u for u in node.users if u.users]
    while len(users) == 1 and packet(users[0]) in _CASTS:
        users = [u for u in users[0].users if u.users]
    return users if len(users) == 1 else []


def _uncast(node: fx.Node) -> fx.Node:
    while packet(node) in _CASTS:
        node = _arg(node, 0)
    return node


def _arg(node: fx.Node, index: int) -> fx.Node:
    value = node.args[index]
    assert isinstance(value, fx.Node), node.format_node()
    return value


def _is_maximum(value: object, of: fx.Node) -> bool:
    """Whether a value is the largest of each row of `of`."""
    if not isinstance(value, fx.Node):
        return False
    if value.target is operator.getitem and value.args[1] == 0:
        value = _arg(value, 0)
    last = len(sizes(of)) - 1
    if packet(value) not in (aten.amax, aten.max) or value.args[0] is not of:
        return False
    return value.args[1:] in ((-1, True), (last, True), ([-1], True), ([last], True))


def _beside(node: fx.Node, kinds: Kinds) -> tuple[fx.Node, Sink] | None:
    """(scores, sink) of cat([scores, sink], -1): the sink does not depend on the tokens."""
    parts: Any = node.args[0]
    axis = node.args[1] if len(node.args) > 1 else 0
    if axis not in (-1, len(sizes(node)) - 1) or len(parts) != 2:
        return None
    scores, score = sorted(parts, key=lambda n: kinds[n] != "data")
    if kinds[score] == "data" or sizes(score)[-1] != "1":
        return None
    return scores, Sink(score)
