"""Attention that is written out, softmax(f(q kᵀ)) v, read by trying f on numbers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.program import Program
from accel.ir.region import sizes
from accel.passes.recognise.heads import concrete, count_heads
from accel.passes.recognise.mask import HIDDEN
from accel.passes.recognise.products import is_product
from accel.passes.recognise.region import Kinds, close, try_out
from accel.passes.recognise.sink import Sink, sink_behind, without_sink

_LIMIT = 64  # operators between q·kᵀ and the product with v


@dataclass
class Written:
    """Where the parts of one written-out attention lie."""

    product: fx.Node  # q kᵀ: [B,H,T,S], or heads and batch in front in another way
    scores: fx.Node  # what the softmax is taken of, the sink aside
    sink: Sink | None
    mixed: fx.Node  # the product with v
    result: fx.Node  # of the attention: that product, or what a sink makes of it

    @property
    def q(self) -> fx.Node:
        return self.product.args[0]  # type: ignore[return-value]

    @property
    def keys(self) -> fx.Node:  # [.., D, S]: already transposed
        return self.product.args[1]  # type: ignore[return-value]

    @property
    def v(self) -> fx.Node:
        return self.mixed.args[1]  # type: ignore[return-value]


def find_written(softmax: fx.Node, kinds: Kinds, order: dict[fx.Node, int]) -> list[Written] | str:
    """The attentions that a softmax over tokens belongs to, or why it belongs to none."""
    shape = sizes(softmax)
    if softmax.args[1] not in (-1, len(shape) - 1):
        return f"a softmax over axis {softmax.args[1]}"
    scores, sink = without_sink(softmax.args[0], kinds)
    product = _product(scores, kinds, order)
    if isinstance(product, str):
        return product
    results = _results(softmax, kinds)
    if isinstance(results, str):
        return results
    found = []
    for mixed in results:
        behind = None if sink else sink_behind(mixed, scores, kinds)
        end = (behind and behind.end) or mixed
        found.append(Written(product, scores, sink or behind, mixed, end))
    return found


def read_sink(program: Program, written: Written) -> Tensor | None | str:
    """[H]: the score that stands beside those of the keys."""
    if written.sink is None:
        return None
    heads = count_heads(program, written.product)
    if isinstance(written.sink.score, float):
        return torch.full((heads,), written.sink.score)
    value = try_out(program, written.sink.score, {}, torch.arange(3)[None])
    value = value if written.sink.keeps_axis else value.unsqueeze(-1)
    value = value.transpose(1, 2) if _tokens_first(written.scores) else value
    value = value.expand(
        torch.broadcast_shapes(value.shape, concrete(program, written.product, 1, 3)[:-1] + [1])
    )
    value = value.reshape(heads, 3)
    if not torch.equal(value, value[:, :1].expand(-1, 3)):
        return f"its sink {written.sink.score.name} differs from token to token"
    return value[:, 0].float().contiguous()


def _product(scores: fx.Node, kinds: Kinds, order: dict[fx.Node, int]) -> fx.Node | str:
    """The one product that the scores are a function of, positions and parameters aside."""
    heap, queued = [(-order[scores], scores)], {scores}
    for _ in range(_LIMIT):
        if not heap:
            break
        _, latest = heapq.heappop(heap)
        if is_product(latest, kinds):
            if heap:
                return f"its scores depend on {heap[0][1].name} beside {latest.name}"
            return latest
        for parent in latest.all_input_nodes:
            if kinds[parent] == "data" and parent not in queued:
                queued.add(parent)
                heapq.heappush(heap, (-order[parent], parent))
    return f"no q·kᵀ found that {scores.name} is computed from"


def _results(softmax: fx.Node, kinds: Kinds) -> list[fx.Node] | str:
    """The products with v of the probabilities."""
    found: list[fx.Node] = []
    todo, seen = [softmax], {softmax}
    while todo:
        node = todo.pop()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            if is_product(user, kinds) and user.args[0] is node and user.args[1] is not node:
                found.append(user)
            elif user.op == "output" or len(seen) > _LIMIT:
                return f"the probabilities {softmax.name} are used outside of a product with v"
            else:
                todo.append(user)
    return found or f"{softmax.name} is not multiplied with v"


def scores_at(program: Program, written: Written, fill: float, positions: Tensor) -> Tensor:
    """f(q kᵀ) as [h,T,T], h = 1 or H, for one sequence whose every q·k is `fill`."""
    shape = concrete(program, written.product, 1, positions.shape[1])
    narrow = [*[1] * (len(shape) - 2), *shape[-2:]]
    for size in (narrow, shape):  # one head tells of all where nothing on the way differs by head
        try:
            given = {written.product: torch.full(size, fill)}
            return _by_head(
                program, written.scores, try_out(program, written.scores, given, positions)
            )
        except RuntimeError:
            if size is shape:
                raise
    raise AssertionError("unreachable")


def _by_head(program: Program, node: fx.Node, value: Tensor) -> Tensor:
    """[h,T,S] of a value of one row whose axes are a node's, where those of heads may be 1."""
    if _tokens_first(node):
        value = value.transpose(1, 2)
    if math.prod(value.shape[:-2]) == 1:
        return value.reshape(1, *value.shape[-2:])
    front = concrete(program, node, 1, value.shape[-1])[:-2]
    if not _tokens_first(node):
        value = value.expand(*front, *value.shape[-2:])
    return value.reshape(-1, *value.shape[-2:])


def _tokens_first(node: fx.Node) -> bool:
    """Whether the axes are [B,T,H,S]."""
    shape = sizes(node)
    return len(shape) == 4 and not shape[1].isdigit() and shape[2].isdigit()


def read_scale(program: Program, written: Written) -> tuple[float, float] | str:
    """(scale, soft cap) of f, read off at the scores that it leaves visible."""
    positions = torch.arange(min(5, program.facts.max_context))[None]
    start = scores_at(program, written, 0.0, positions)
    seen = start > HIDDEN

    def gain(fill: float) -> float:
        """f(fill) - f(0), or NaN where it differs from score to score."""
        change = (scores_at(program, written, fill, positions) - start)[seen].double()
        if not change.numel() or not close(change, change[:1].expand_as(change), 1e-5):
            return math.nan
        return float(change[0])

    near, far = gain(2.0**26), gain(2.0**30)
    if abs(far - 16 * near) <= 1e-5 * abs(far) and far:
        return gain(2.0**20) / 2.0**20, 0.0
    if not abs(far - near) <= 1e-5 * abs(far) or not far > 0:
        return "an operation on its scores is not a scale, soft cap, mask or bias"
    fill = 1.0
    for _ in range(_LIMIT):  # to where the tangent is bent, but not flat
        part = gain(fill) / far
        if not 0.1 < abs(part) < 0.6:
            fill *= 2.0 if abs(part) <= 0.1 else 0.5
    return far * math.atanh(part) / fill, far


def region_key(written: Written, kinds: Kinds, order: dict[fx.Node, int]) -> Hashable:
    """Equal for attentions that do the same to their scores: the mask is evaluated once for all."""
    inside = {written.product: 0}
    todo, members = [written.scores], set()
    while todo:
        node = todo.pop()
        if node not in inside and node not in members and kinds[node] == "data":
            members.add(node)
            todo.extend(node.all_input_nodes)
    lines = []

    def show(value: object) -> Hashable:
        if isinstance(value, fx.Node):
            return inside.get(value, value)
        if isinstance(value, (list, tuple)):
            return tuple(map(show, value))
        return repr(value)

    for node in sorted(members, key=order.__getitem__):
        lines.append((node.target, show(node.args), show(tuple(node.kwargs.items()))))
        inside[node] = len(inside)
    return (tuple(sizes(written.product)), tuple(lines))
