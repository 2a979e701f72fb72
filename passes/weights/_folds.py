"""Where channels of a product's input may be scaled at no cost: a parameter upstream takes the scale.

Found by trying it on numbers: a norm's weight, or the rows of an earlier product, are multiplied by
random factors, and each channel of the input must follow one of them exactly: through gates,
through attention and its cache, whatever stands between.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.ops.kv import kv_append
from accel.ir.program import Editor, Program, compute
from accel.ir.region import Region
from accel.ir.weights import Change

aten = torch.ops.aten
_CLOSE = 1e-4  # of the largest value: what rounding may add
_VIEWS = {
    aten.reshape.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default,
    aten.chunk.default, aten.transpose.int, aten.permute.default, aten.select.int,
    aten.unsqueeze.default, aten.squeeze.dim, operator.getitem,
}  # fmt: skip


@dataclass(frozen=True)
class Fold:
    """Channel c of `value` [..., K] goes with entry `channels[c]` of `owner`'s parameters `places`
    along their first dimension [M]; nothing else depends on these entries.
    """

    value: fx.Node
    readers: tuple[fx.Node, ...]
    owner: fx.Node
    places: tuple[int, ...]
    channels: Tensor
    size: int  # M

    def apply(self, program: Program, scale: Tensor) -> None:
        """Divide the entries that the channels follow by theirs of scale [M], and multiply the columns
        that read the channels by it.
        """
        taken = torch.ones(self.size)
        taken[self.channels] = scale[self.channels]
        for place in self.places:
            _change(program, self.owner, place, _along(1 / taken, rows=True))
        for reader in self.readers:
            _change(program, reader, 1, _along(scale[self.channels], rows=False))


def folds(
    program: Program,
    graph: fx.Graph,
    values: Mapping[fx.Node, Any],
    readers: Collection[fx.Node],
) -> list[Fold]:
    """One for every value of a graph that only the products `readers` read and that can be scaled.

    values: of all nodes of the graph, for a few tokens. No parameter takes part in two as an owner.
    """
    found: dict[fx.Node, Fold] = {}
    inputs = {n.args[0]: None for n in graph.nodes if n in readers}
    kept = _own_state(program, graph)
    for value in inputs:
        assert isinstance(value, fx.Node)
        if value in values and all(u in readers and _alone(u, value) for u in value.users):
            fold = _fold(program, value, values, kept)
            if fold is not None:
                found[value] = fold
    return list(found.values())


def _alone(reader: fx.Node, value: fx.Node) -> bool:
    """Whether a product takes the value as its input only, and shares its weight with no other."""
    weight = reader.args[1]
    assert isinstance(weight, fx.Node)
    return reader.all_input_nodes.count(value) == 1 and len(weight.users) == 1


def _own_state(program: Program, graph: fx.Graph) -> set[fx.Node]:
    """What a graph writes into slots that no other part of the program reads."""
    mine = {n for n in graph.nodes if n.target is kv_append.default and _slots(n) is not None}
    calls = [n for n in program.nodes() if n.target in _regions(program, graph)]
    if not any(entry.graph is graph for entry in program.entries.values()):
        if len(calls) != 1:
            return set()
        (out,) = graph.find_nodes(op="output")
        passed = {n.args[1]: n for n in calls[0].users}
        return {n for n in mine if _ends(n, out, passed) and _only(calls[0], graph, n)}
    return mine


def _regions(program: Program, graph: fx.Graph) -> set[Region]:
    called = {n.target for n in program.nodes() if isinstance(n.target, Region)}
    return {region for region in called if region.graph is graph}


def _slots(node: fx.Node) -> fx.Node | None:
    """The placeholder of the slots that a kv_append writes, where nothing else reads it."""
    slots = node.args[0]
    assert isinstance(slots, fx.Node)
    return slots if slots.op == "placeholder" and len(slots.users) == 1 else None


def _ends(node: fx.Node, out: fx.Node, passed: Mapping[Any, fx.Node]) -> bool:
    """Whether what a region returns of a node only leaves the program."""
    returned = out.args[0]
    assert isinstance(returned, (tuple, list))
    places = [i for i, value in enumerate(returned) if value is node]
    return all(u.op == "output" for i in places for u in passed[i].users)


def _only(call: fx.Node, graph: fx.Graph, node: fx.Node) -> bool:
    """Whether a region alone reads the slots that it is given."""
    holders = list(graph.find_nodes(op="placeholder"))
    given = call.args[holders.index(node.args[0])]
    assert isinstance(given, fx.Node)
    return given.op == "placeholder" and len(given.users) == 1


def _fold(
    program: Program, value: fx.Node, values: Mapping[fx.Node, Any], outputs: set[fx.Node]
) -> Fold | None:
    for owner, places in _owners(value):
        for chosen in _parts(owner, places, values):
            trial = _Trial(program, value, owner, places, values, outputs)
            channels = trial.channels(chosen)
            if channels is not None:
                return Fold(value, tuple(value.users), owner, places, channels, len(chosen))
    return None


def _owners(value: fx.Node) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """Nodes before a value with parameters by channel, and where these stand; nearest first, and
    not past a product.
    """
    todo, seen = [value], {value}
    while todo:
        node = todo.pop(0)
        if node.op != "call_function" or isinstance(node.target, Region):
            continue
        product = node.target is aten.linear.default
        places = tuple(
            i
            for i, arg in enumerate(node.args)
            if isinstance(arg, fx.Node) and arg.op == "get_attr"
            and arg.meta["val"].dim() == (2 if product and i == 1 else 1)
        )  # fmt: skip
        if places and (not product or 1 in places):
            yield node, places
        if not product:
            new = [n for n in node.all_input_nodes if n not in seen]
            seen.update(new)
            todo += new


def _parts(
    owner: fx.Node, places: tuple[int, ...], values: Mapping[fx.Node, Any]
) -> Iterator[Tensor]:
    """Entries of an owner's parameters to try, bool [M]: all, then those that each slice of it takes."""
    parameter = owner.args[places[0]]
    assert isinstance(parameter, fx.Node)
    size = parameter.meta["val"].shape[0]
    yield torch.ones(size, dtype=torch.bool)
    if owner.target is not aten.linear.default:
        return
    todo: list[tuple[fx.Node, Any]] = [(owner, torch.arange(size).expand(values[owner].shape))]
    while todo:
        node, numbers = todo.pop(0)
        for user in node.users:
            if user.target not in _VIEWS or user not in values:
                continue
            part = compute(user, {}, {}, {**values, node: numbers})
            todo.append((user, part))
            if isinstance(part, Tensor) and isinstance(numbers, (tuple, list, Tensor)):
                taken = torch.isin(torch.arange(size), part)
                if not bool(taken.all()):
                    yield taken


@dataclass(frozen=True)
class _Trial:
    """What becomes of a value when an owner's parameters are scaled."""

    program: Program
    value: fx.Node
    owner: fx.Node
    places: tuple[int, ...]
    values: Mapping[fx.Node, Any]
    outputs: set[fx.Node]

    def channels(self, chosen: Tensor) -> Tensor | None:
        """Which entry [M] each channel [K] follows, where every one follows one that was chosen."""
        before = self.values[self.value]
        found = None
        for seed in (0, 1):
            factors = _factors(chosen, seed)
            after = self._after(factors)
            if after is None:
                return None
            if found is None:
                found = _matched(before, after, factors, chosen)
            if found is None or not _close(after, before * factors[found]):
                return None
        return found

    def _after(self, factors: Tensor) -> Tensor | None:
        """The value, with the owner's parameters scaled; none where something else changes too."""
        changed: dict[fx.Node, Any] = {}
        node = self.owner
        while True:
            if node is self.owner or any(n in changed for n in node.all_input_nodes):
                if node.op == "output" or isinstance(node.target, Region):
                    return None
                given = {**self.values, **changed}
                if node is self.owner:
                    given |= self._scaled(factors)
                new = compute(node, self.program.params, {}, given)
                if not _same(new, self.values[node]):
                    changed[node] = new
            if node is self.value:
                break
            node = node.next
        if any(self._leaks(n, changed) for n in changed if n is not self.value):
            return None
        after = changed.get(self.value)
        return after if isinstance(after, Tensor) else None

    def _scaled(self, factors: Tensor) -> dict[fx.Node, Tensor]:
        """The owner's parameters."""
        nodes = [self.owner.args[place] for place in self.places]
        change = _along(factors, rows=True)
        return {n: change(self.program.params[str(n.target)]) for n in nodes}  # type: ignore[union-attr,misc]

    def _leaks(self, node: fx.Node, changed: Mapping[fx.Node, Any]) -> bool:
        """Whether something that was not recomputed on the way to the value reads a changed node."""
        for user in node.users:
            if user.op == "output":
                if node not in self.outputs:
                    return True
            elif user not in changed and self.value < user:
                index = user.args[1] if user.target is operator.getitem else None
                if index is None or not _same(changed[node][index], self.values[node][index]):
                    return True
        return False


def _factors(chosen: Tensor, seed: int) -> Tensor:
    """Evenly spaced ratios from 1/e to e in random order for the chosen entries, 1 for the others."""
    generator = torch.Generator().manual_seed(seed)
    count = int(chosen.sum())
    spaced = torch.linspace(-1, 1, count + 2)[1:-1].exp()
    factors = torch.ones(len(chosen))
    factors[chosen] = spaced[torch.randperm(count, generator=generator)]
    return factors


def _matched(before: Tensor, after: Tensor, factors: Tensor, chosen: Tensor) -> Tensor | None:
    """For each channel the entry whose factor it was multiplied by; none where one was by no such."""
    flat, new = before.flatten(0, -2).double(), after.flatten(0, -2).double()
    if before.shape != after.shape or not bool(flat.abs().amax(0).gt(0).all()) or chosen.sum() < 2:
        return None
    ratio = (flat * new).sum(0) / flat.square().sum(0)
    entries = chosen.nonzero().flatten()
    order = factors[entries].argsort()
    ranked = factors[entries][order].double()
    above = torch.searchsorted(ranked, ratio.contiguous()).clamp(1, len(ranked) - 1)
    nearer = (ratio - ranked[above - 1]) < (ranked[above] - ratio)
    return entries[order[torch.where(nearer, above - 1, above)]]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.shape == b.shape and _close(a, b, 1e-6)
    if isinstance(a, (tuple, list)):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _close(a: Tensor, b: Tensor, tolerance: float = _CLOSE) -> bool:
    """Equal up to a share of the largest value."""
    if not a.numel():
        return True
    a, b = a.double(), b.double()
    return bool((a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-30))


def _along(scale: Tensor, rows: bool) -> Change:
    """weight [M, …] or [N, M] times a scale of its rows or columns, also on the meta device."""

    def change(weight: Tensor) -> Tensor:
        by = scale.to(weight)
        return weight * (by.view(-1, *[1] * (weight.dim() - 1)) if rows else by)

    return change


def _change(program: Program, node: fx.Node, place: int, change: Change) -> None:
    """Let one node read a changed parameter; other readers of it keep the old one."""
    old = node.args[place]
    assert isinstance(old, fx.Node)
    name = f"{old.target}.scaled"
    while name in program.params:
        name += "+"
    editor = Editor(program, node.graph)
    with node.graph.inserting_before(node):
        new = editor.derived(name, str(old.target), change)
    node.update_arg(place, new)
    if not old.users:
        node.graph.erase_node(old)
