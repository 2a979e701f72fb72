"""Layers that compute some rows of a call, and take the others as they were last computed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention
from accel.ir.ops.kv import kv_append
from accel.ir.ops.pages import kv_pages
from accel.ir.ops.rows import take_rows
from accel.ir.picks import EVERY_ROW, NONE, PICKS
from accel.ir.program import Editor, Program, State, ancestors
from accel.ir.region import Conditional, Region, layer_calls, sizes
from accel.ir.state import Part, name_of, output_of
from accel.passes.clean.clean import remove_dead

aten = torch.ops.aten
_PICKED = 83  # an example size while shapes are worked out


@dataclass
class Layer:
    """One layer whose calls may leave rows out.

    `call`: of the step; `whole`: its graph; `part`: the graph that computes the rows `picks` [B,K] of a call, whose
    nodes are at the places of those of `whole`, in `copies`. `keys`, `values`: what `part` appends to the cache.
    """

    program: Program
    number: int
    call: fx.Node
    whole: fx.Graph
    part: fx.Graph
    copies: dict[fx.Node, fx.Node]

    @classmethod
    def of(cls, program: Program, number: int, call: fx.Node) -> Layer:
        """Raises PassError where rows of the layer cannot be computed apart."""
        region = call.target
        assert isinstance(region, Region)
        part = deepcopy(region.graph)
        copies = dict(zip(region.graph.nodes, part.nodes, strict=True))
        layer = cls(program, number, call, region.graph, part, copies)
        layer._check()
        return layer

    def _check(self) -> None:
        where = f"layer {self.number}"
        if isinstance(self.call.target, Conditional):
            raise PassError(
                f"{where} runs under a condition already; leave out the method of depth"
            )
        if len(self.appends) != 2 or len(self.sites) != 1:
            raise PassError(
                f"{where} has {len(self.sites)} attentions and writes {len(self.appends)} values, and not keys and "
                "values of one attention, so its rows cannot be computed apart; choose another method of canvas, such "
                "as dkv-cache"
            )
        width = sizes(self.stream)[1]
        for argument, holder in zip(self.call.args, self.holders, strict=True):
            alone = holder is self.stream or argument is self.program.step.input("positions")
            if not alone and isinstance(holder.meta["val"], Tensor) and width in sizes(holder):
                raise PassError(
                    f"{where} reads {argument} of every token of a call, so its rows cannot be computed apart; choose "
                    "another method of canvas, such as dkv-cache"
                )

    @property
    def holders(self) -> list[fx.Node]:
        """The inputs of `whole`."""
        return list(self.whole.find_nodes(op="placeholder"))

    @property
    def stream(self) -> fx.Node:
        """The residual stream before the layer, in `whole`."""
        return self.holders[0]

    @property
    def appends(self) -> list[fx.Node]:
        """What is appended to keys and to values, in `whole`."""
        found = self.whole.find_nodes(op="call_function", target=kv_append.default)
        return [n for part in (Part.KEYS, Part.VALUES) for n in found if self._buffer(n) is part]

    @property
    def sites(self) -> list[fx.Node]:
        """Attention, in `whole`."""
        return list(self.whole.find_nodes(op="call_function", target=attention.default))

    def _buffer(self, append: fx.Node) -> Part | None:
        names = {s.name: s.part for s in self.program.state if s.layer == self.number}
        return names.get(str(append.args[0].target))  # type: ignore[union-attr]

    def holder(self, value: fx.Node) -> fx.Node:
        """The input of `whole` that a value of the step is."""
        return self.holders[list(self.call.args).index(value)]

    def store(self, detail: str, heads: int = 1, width: int = 0) -> fx.Node:
        """A new state value [B,heads,C,width] of the layer, in the step; `width` 0: that of the stream."""
        program, step = self.program, self.program.step
        stream = self.stream.meta["val"]
        batch, width = stream.shape[0], width or int(stream.shape[2])
        slots = step.input(name_of(Part.KEYS, self.number)).meta["val"].shape[2]
        dtype = str(stream.dtype).removeprefix("torch.")
        shape = ("B", heads, "C", width)
        state = State(Part.OUTPUTS, self.number, dtype, shape, detail=detail)
        program.state.append(state)
        return Editor(program, step.graph).placeholder(
            state.name, (batch, heads, slots, width), stream.dtype
        )

    def added(self, values: Sequence[fx.Node]) -> list[fx.Node]:
        """New inputs of the layer, values of the step: those of `whole`."""
        found = []
        for value in values:
            pair = []
            for graph in (self.whole, self.part):
                with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
                    holder = graph.placeholder(_name(value))
                holder.meta["val"] = value.meta["val"]
                pair.append(holder)
            self.copies[pair[0]] = pair[1]
            found.append(pair[0])
        self.call.args = (*self.call.args, *values)
        return found

    def again(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """A value of `whole` computed of every row in `part`, before a node."""
        env = {h: self.copies[h] for h in self.holders}
        needed = ancestors([value], stop=set(env))
        with self.part.inserting_before(before):
            for node in self.whole.nodes:
                if node not in needed or node in env:
                    continue
                env[node] = copy = self.part.node_copy(node, env.__getitem__)
                copy.meta = dict(node.meta)
                if node.op == "call_function":
                    copy.meta["val"] = Editor(self.program, self.part).value(copy)
        return env[value]

    def rows(self, stream: fx.Node, positions: fx.Node, picks: fx.Node, start: fx.Node) -> None:
        """Let what follows `start` in `part` compute these rows: stream [B,K,E] at positions [B,K]."""
        editor, step = Editor(self.program, self.part), self.program.step
        place = {self.copies[self.stream]: stream}
        if (held := step.input("positions")) in self.call.args:
            place[self.copies[self.holder(held)]] = positions
        with self.part.inserting_after(stream):
            count = editor.call(aten.sym_size.int, picks, 1)
        width = sizes(self.stream)[1]
        for holder in self.holders:
            if holder.meta["val"] is not None and str(holder.meta["val"]) == width:
                place[self.copies[holder]] = count
        follows = False
        for node in self.part.nodes:
            if follows and node.op == "call_function":
                node.args = map_arg(node.args, lambda n: place.get(n, n))
                node.kwargs = map_arg(node.kwargs, lambda n: place.get(n, n))
            follows = follows or node is start

    def close(self, flag: fx.Node, states: Sequence[str]) -> list[fx.Node]:
        """Let the call run `whole` where the bool `flag` [] holds, else `part`; both give new state values behind what
        they gave before, and then values of the step, which are returned.
        """
        region, call, graph = self.call.target, self.call, self.call.graph
        assert isinstance(region, Region)
        for each in (self.whole, self.part):
            remove_dead(each)
            with each.inserting_before(next(iter(each.nodes))):
                each.placeholder(EVERY_ROW).meta["val"] = flag.meta["val"]
        call.target = Conditional(region.name, self.whole, self.part)
        call.args = (flag, *call.args)
        count = len(call.meta["val"])
        (out,) = self.whole.find_nodes(op="output")
        values = [n.meta["val"] for n in out.args[0][count:]]
        call.meta["val"] = (*call.meta["val"], *values)
        found, last = [], call
        for i, value in enumerate(values, count):
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (call, i))
            last.meta["val"] = value
            found.append(last)
        new = dict(zip(map(output_of, states), found, strict=False))
        self.program.step.set_outputs(self.program.step.output_nodes() | new)
        return found[len(states) :]

    def refresh(self, first: fx.Node) -> None:
        """Work out the shapes of `part` anew, from a node on."""
        editor, follows = Editor(self.program, self.part), False
        for node in self.part.nodes:
            follows = follows or node is first
            if follows and node.op == "call_function":
                node.meta["val"] = editor.value(node)


def _name(value: fx.Node) -> str:
    return str(value.target) if value.op == "placeholder" else value.name


def opened(program: Program, method: str) -> tuple[list[fx.Node], fx.Node, fx.Node]:
    """The calls of all layers, and the new inputs of the step: `every_row` bool [], by default true, and `picks`
    [B,K]. Raises PassError.
    """
    calls = layer_calls(program.step.graph)
    if not calls or len(calls) != len(program.facts.layers):
        raise PassError(
            f"{method}: {len(calls)} of {len(program.facts.layers)} layers were found in the graph, but only separate "
            "layers can leave out rows; choose another method of canvas, such as dkv-cache"
        )
    editor, step = Editor(program, program.step.graph), program.step
    batch = step.input("tokens").meta["val"].shape[0]
    flag = editor.placeholder(EVERY_ROW, (), torch.bool)
    picks = editor.placeholder(PICKS, (batch, editor.symbol("K", _PICKED)), torch.int64)
    step.defaults[EVERY_ROW] = torch.tensor(True)
    step.defaults[PICKS] = torch.full((1, 1), NONE)
    return calls, flag, picks


# What the layers compute of them, traced into their graphs


def stored_rows(buffer: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """What a cache [B,G,C,D] holds of a call's columns, [B,G,T,D]: a copy."""
    found: Tensor = kv_pages(buffer, slots, positions.shape[1], 1)
    return found.squeeze(3)


def inverse(columns: Tensor, picks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Of each column of a call which of the picked rows [B,K] it is [B,T], and whether it is one, bool [B,T]."""
    every = torch.arange(positions.shape[1], device=picks.device)
    hit = (columns.unsqueeze(2) == every) & (picks > NONE).unsqueeze(2)
    order = torch.arange(picks.shape[1], device=picks.device).unsqueeze(1)
    return (hit.to(torch.int64) * order).sum(1), hit.any(1)


def mixed(new: Tensor, place: Tensor, taken: Tensor, old: Tensor) -> Tensor:
    """Rows [B,K,E] in their columns, and what was stored [B,1,T,E] in the others: [B,T,E]."""
    return torch.where(taken.unsqueeze(2), take_rows(new, place), old.squeeze(1))


def mixed_heads(new: Tensor, place: Tensor, taken: Tensor, old: Tensor) -> Tensor:
    """The same of heads: [B,G,K,D] and [B,G,T,D] -> [B,G,T,D]."""
    heads = new.shape[1]
    index = place[:, None].expand(-1, heads, -1).flatten(0, 1)
    rows = take_rows(new.flatten(0, 1), index).unflatten(0, (-1, heads))
    return torch.where(taken[:, None, :, None], rows, old)
