"""Selection by units: groups of tokens with a representative each, which the entry `group` makes of cached keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.entries.group import GROUP
from accel.ir.errors import PassError, RecipeError
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import Form, attention, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.ops.units import best_tokens, units_seen
from accel.ir.program import Editor, Program, State
from accel.ir.region import Entry, sizes
from accel.ir.sizes import FEW
from accel.ir.state import Part, name_of, output_of
from accel.ir.tables import Tables
from accel.ir.trace import trace
from accel.ir.units import Units as Plan
from accel.passes import Report
from accel.passes.kv._shared.slots import written
from accel.passes.kv.inputs import call as named_call
from accel.passes.kv.inputs import parameters
from accel.passes.kv.select import Sizes
from accel.passes.kv.select._build import Build
from accel.passes.kv.select._tokens import Tokens, constant
from accel.passes.state.recurrent import buffer

ORIGIN = name_of(
    Part.UNITS, detail="origin"
)  # [B]: segments of generated tokens are counted from there
_UNITS, _TOKENS, _NEW = 29, 53, 19  # example sizes while shapes are worked out


class _Grouped:
    """A class with a `group` of whatever parameters, which is no field of a dataclass."""

    group: Callable[..., tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Units(_Grouped, Tokens):
    """Sparse attention over tokens, chosen unit by unit. A method says how keys become units (`group`), and what a
    unit is worth to queries (`score`).

    `group` gives the unit of each token [B,G,N], and the parts of units [B,G,U,…]. It names its inputs:

    | parameter | |
    |---|---|
    | `keys` [B,G,N,D] | as attention reads them |
    | `real` bool [B,N] | which of them are there |
    | `units` bool [B,U] | which units a row may have, the first ones |
    | `generated` bool [B,1] | tokens behind the row's last prompt, not of one |
    | a constant of a method that is a `Tables` | of the layer |
    | a `lasting` number [B,N] | of each token, as its choice said; -1: it read everything |
    | `marks` [B,N] | which tokens the session says lie together: equal numbers, from 0 on |

    tokens_read: tokens that are read of units and sinks. size: tokens of a unit, on average. every: generated
    tokens that are grouped at once. sinks: first tokens, in no unit and always read.

    The session's observer (`runtime/session/state/units.py`) runs the entry `group` when a prompt is whole and
    for every `every` generated tokens. A token reads the sinks, the best units until `tokens_read - sinks` tokens are
    listed (the last unit is cut) and all tokens that are in no unit yet. It reads a segment of generated tokens by
    units from FEW - 1 tokens behind it on: then a call of up to FEW tokens gives the logits of single-token calls, and
    what a rewind forgets can be grouped again. Longer calls read everything.

    State: `units.<layer>.label [B,G,C]`, the unit of each slot's token; `units.<layer>.<part> [B,G,C/size,…]`, what
    is known of each unit; `units.origin [B]`. The step only reads them.
    """

    size: int = option(80, least=1)
    every: int = option(320, least=1)
    sinks: int = option(16, least=0)

    relies = Tokens.relies | {Invariant.TOKENS_CONTIGUOUS, Invariant.UNIFORM_SLOTS}
    breaks = Tokens.breaks | {Invariant.PLAIN_KEYS}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every % self.size:
            raise RecipeError(
                f"{self.full_name}: every is {self.every}; give a multiple of size = {self.size}"
            )
        if self.sinks >= self.tokens_read:
            raise RecipeError(
                f"{self.full_name}: sinks is {self.sinks}; give fewer than tokens_read = {self.tokens_read}"
            )

    @property
    def plan(self) -> Plan:
        """When tokens are grouped."""
        marks = "marks" in parameters(self.group)
        return Plan(self.size, self.every, self.sinks, marks, self.end_tokens if marks else ())

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens with which what lies together ends; for a method whose `group` names `marks`."""
        return ()

    @property
    def count(self) -> int:
        """Tokens that a token reads at most."""
        return self.tokens_read + self.plan.tail

    def parts(self, width: int) -> dict[str, tuple[str, Sizes]]:
        """What is kept of a unit: name -> (dtype, sizes after [B,G,M])."""
        return {"mean": ("float32", (width,))}

    def summary(self, keys: Tensor) -> dict[str, Tensor]:
        """Of a unit of consecutive tokens [B,G,N,page,D]: what `group` says of it."""
        return {"mean": keys.float().mean(3)}

    def score(self, queries: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """queries [B,G,M,D], the parts [B,G,U,…] -> what each unit is worth to them [B,G,M,U]."""
        return queries.float() @ parts["mean"].transpose(-1, -2)

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Scores of a group's heads [B,G,R,T,U] -> what units are worth to the group [B,G,T,U]: their mean."""
        return scores.mean(2)

    def run(self, program: Program) -> Report:
        if program.facts.kv is not None:
            raise PassError(
                "kv.select groups tokens by the slots that they lie in, and kv.codec moves blocks of them to "
                "others; leave one of the two out, or use a codec that encodes single tokens (kv-int8)"
            )
        report = super().run(program)
        if report.changed:
            program.facts.units = self.plan
            program.entries[GROUP.name] = self._entry(program)
        return report

    def operands(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """The origin, a layer's labels and parts."""
        program, letters, keys = build.program, build.letters, operands_of(node).k
        editor = Editor(program, program.step.graph)
        layer, groups, width = node.meta["layer"], int(sizes(keys)[1]), int(sizes(keys)[3])
        units = f"C/{self.size}"
        if ORIGIN not in program.step.inputs:
            letters["C"] = keys.meta["val"].shape[2]
            if units not in letters:
                letters[units] = editor.symbol(units, _UNITS)
            origin = State(Part.UNITS, None, "int64", ("B",), self.sinks, detail="origin")
            buffer(program, editor, origin, letters)
        label = State(Part.UNITS, layer, "int64", ("B", groups, "C"), detail="label")
        found = {
            "origin": program.step.input(ORIGIN),
            "label": buffer(program, editor, label, letters),
        }
        for part, (dtype, tail) in self.parts(width).items():
            shape: tuple[int | str, ...] = ("B", groups, units, *tail)
            state = State(Part.UNITS, layer, dtype, shape, detail=part)
            found[part] = buffer(program, editor, state, letters)
        return found

    def search(
        self, x: Mapping[str, Tensor], before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """See `choose`. The queries [B,T,H,D] that choose for each token, the slots [B,T] of the tokens that they are
        of, and the memory of these tokens (with `whole`, where the method `sees_all`). By default each token's own,
        and none.
        """
        return x["queries"], _own(x), {}

    def choose(
        self, x: Mapping[str, Tensor], mask: Form, before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sinks, the newest tokens, and those of the best units that the token of the search had behind it."""
        label, k_pos = x["label"], x["k_pos"]
        (batch, tokens, heads, width), groups = x["queries"].shape, label.shape[1]
        queries, at, new = self.search(x, before, known)
        rows = queries.transpose(1, 2).reshape(batch, groups, heads // groups * tokens, width)
        known_of = {"queries": rows, "parts": {n: x[n] for n in self.parts(width)}, "form": mask}
        scores = named_call(self.score, known_of)
        places = torch.arange(k_pos.shape[1], device=at.device)
        seen = mask.visible(x["positions"][..., None], k_pos[:, None])  # [B,T,C]
        seen = seen & (places >= self.sinks) & (places < self.grouped(at, x["origin"])[..., None])
        seen = seen[:, None]
        some = units_seen(label, seen, scores.shape[3])
        worth = self.vote(scores.unflatten(2, (heads // groups, tokens)), some[:, :, None])
        chosen = best_tokens(worth, label, seen, self.tokens_read - self.sinks)
        own = _own(x)
        first = torch.arange(self.sinks, device=at.device).expand(batch, tokens, -1)
        end = self.grouped(own, x["origin"])[..., None]
        tail = end + torch.arange(self.plan.tail, device=at.device)
        always = torch.cat((first, tail), dim=2)
        always = torch.where(always <= own[..., None], always, -1)[:, None]
        return torch.cat((always.expand(-1, groups, -1, -1), chosen), dim=3), new

    def grouped(self, slots: Tensor, origin: Tensor) -> Tensor:
        """The slot behind the last unit that tokens in these slots [B,T] read; rows' origin [B]."""
        since = origin[:, None]
        whole = (slots - (FEW - 1) - since).clamp(min=0).div(self.every, rounding_mode="floor")
        return since + whole * self.every

    def _entry(self, program: Program) -> Entry:
        """`group`, over the caches of all layers that choose. Inputs, beside the state: the slots `start` to `stop`
        [B] whose tokens are grouped, the number of the `first` unit [B] and how many `units` [B] a row gets, its
        `origin` [B] from now on; `ranks` 0..N-1 and `numbers` 0..U-1, as many as any row has tokens and units.
        """
        graph, step = fx.Graph(), program.step
        source = Editor(program, step.graph)

        def holder(name: str, value: Any) -> fx.Node:
            node = graph.placeholder(name)
            node.meta["val"] = value
            return node

        def whole(size: Any) -> Tensor:
            with source.fake:
                return torch.empty((size,), dtype=torch.int64)

        batch = step.input("tokens").meta["val"].shape[0]
        given = [holder(n, whole(batch)) for n in ("start", "stop", "first", "units", "origin")]
        given.append(holder("ranks", whole(source.symbol("N", _TOKENS))))
        given.append(holder("numbers", whole(source.symbol("U", _NEW))))
        if self.plan.marks:
            with source.fake:
                marks = torch.empty((batch, given[5].meta["val"].shape[0]), dtype=torch.int64)
            given.append(holder("marks", marks))
        held = {ORIGIN: holder(ORIGIN, step.input(ORIGIN).meta["val"])}
        sites = [
            n for n in step.graph.find_nodes(op="call_function", target=attention.default)
            if n.kwargs.get("pages") is not None
        ]  # fmt: skip
        stored: dict[fx.Node, list[fx.Node]] = {}
        for node in sites:
            stored[node] = _between(operands_of(node).k)
            caches = [str(n.target) for n in stored[node] if n.op == "placeholder"]
            own = [
                s.name
                for s in program.state
                if s.part is Part.UNITS and s.layer == node.meta["layer"]
            ]
            layer = node.meta["layer"]
            own += [name_of(Part.PAGES, layer, detail=name) for name in self.lasting]
            for name in (*caches, *own):
                if name not in held:
                    held[name] = holder(name, step.input(name).meta["val"])
        editor, outputs = Editor(program, graph), {}
        after = trace(editor, ORIGIN, _moved, held[ORIGIN], given[1], given[4], key="origin")
        outputs[output_of(ORIGIN)] = after
        for node in sites:
            layer = node.meta["layer"]
            keys = _copied(graph, stored[node], held)
            declared = list(self.parts(int(sizes(keys)[3])))
            own = [name_of(Part.UNITS, layer, detail=part) for part in ("label", *declared)]
            table: list[str] = []
            if isinstance(self, Tables):
                table = list(self.sizes(int(sizes(keys)[3]), int(sizes(keys)[1])))
            numbers = [editor.param(constant(layer, name)) for name in table]
            numbers += [held[name_of(Part.PAGES, layer, detail=name)] for name in self.lasting]
            found = trace(
                editor, f"units.{layer}", partial(self._grouped, declared, table), keys, *given,
                *numbers, *(held[name] for name in own), key=("group", self),
            )  # fmt: skip
            outputs |= {output_of(n): new for n, new in zip(own, found, strict=True)}
        graph.output(tuple(outputs.values()))
        return Entry(graph, list(outputs))

    def _grouped(
        self,
        names: list[str],
        table: list[str],
        keys: Tensor,
        start: Tensor,
        stop: Tensor,
        first: Tensor,
        units: Tensor,
        origin: Tensor,
        ranks: Tensor,
        numbers: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        """Labels and parts as they are after the tokens in slots start..stop-1 [B] of keys [B,G,C,D] were grouped.
        `rest`: the marks, where there are any, constants, lasting numbers, labels and parts as they were.
        """
        *marks, label = rest[: len(rest) - len(names)]
        parts = rest[len(rest) - len(names) :]
        first_constant = len(marks) - len(table) - len(self.lasting)
        constants = dict(zip([*table, *self.lasting], marks[first_constant:], strict=True))
        marks = marks[:first_constant]
        start, stop, first, units = (x[:, None] for x in (start, stop, first, units))
        groups, width = keys.shape[1], keys.shape[3]
        slots = (start + ranks).clamp(min=0, max=keys.shape[2] - 1)  # [B,N]
        taken = keys.gather(2, slots[:, None, :, None].expand(-1, groups, -1, width))
        known = {"keys": taken.float(), "real": ranks < stop - start, "units": numbers < units}
        for name in self.lasting:
            constants[name] = constants[name][:, 0].gather(1, slots)
        known |= {"generated": start >= origin[:, None], **constants}
        known |= {"marks": marks[0]} if marks else {}
        labels, found = named_call(self.group, known)

        new = [written(label, labels + first[:, None], start, stop)]
        new += [
            written(old, found[n], first, first + units)
            for n, old in zip(names, parts, strict=True)
        ]
        return tuple(new)


def _own(x: Mapping[str, Tensor]) -> Tensor:
    """The slots [B,T] of a call's tokens."""
    slots = x["slots"]
    return slots[:, None] + torch.arange(x["queries"].shape[1], device=slots.device)


def _moved(origin: Tensor, stop: Tensor, now: Tensor) -> Tensor:
    """The origin of rows that the call is about, those with a `stop` of 0 or more."""
    return torch.where(stop >= 0, now, origin)


def _between(keys: fx.Node) -> list[fx.Node]:
    """The nodes from the caches, as they are after a call, to what attention reads of them: a codec's, in order."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node in found:
            return
        if node.target is kv_append.default:
            source = operand_of(node, "buffer")
            assert isinstance(source, fx.Node)
            found.setdefault(source)
        else:
            for parent in node.all_input_nodes:
                visit(parent)
        found[node] = None

    visit(keys)
    return list(found)


def _copied(graph: fx.Graph, nodes: list[fx.Node], held: dict[str, fx.Node]) -> fx.Node:
    """The last of these nodes in another graph, of caches `held` there by their names."""
    env: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.target is kv_append.default:
            source = operand_of(node, "buffer")
            assert isinstance(source, fx.Node)
            env[node] = env[source]
        elif node.op == "placeholder":
            env[node] = held[str(node.target)]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    return env[nodes[-1]]


def consecutive(real: Tensor, units: Tensor) -> Tensor:
    """Labels [B,N] of tokens of which some are `real` (bool [B,N]): `units` (bool [B,U]) of neighbours, as long as
    each other.
    """
    tokens, count = real.sum(1, keepdim=True), units.sum(1, keepdim=True)
    ranks = torch.arange(real.shape[1], device=real.device)
    label = (ranks * count).div(tokens.clamp(min=1), rounding_mode="floor")
    return torch.minimum(label, count - 1).clamp(min=0)


def marked(marks: Tensor, real: Tensor, units: Tensor) -> Tensor:
    """Labels [B,N] of tokens with marks [B,N] from 0 on, of which some are `real` (bool [B,N]): a unit (`units`: bool
    [B,U]) of each mark, or of neighbouring marks, as many as each other, where there are more of them.
    """
    most = units.sum(1, keepdim=True).clamp(min=1)
    there = marks.masked_fill(~real, 0)
    count = there.amax(1, keepdim=True) + 1
    shared = (there * most).div(count, rounding_mode="floor")
    return torch.where(count > most, shared, there)


def means_of(keys: Tensor, real: Tensor, labels: Tensor, units: Tensor) -> Tensor:
    """Means [B,G,U,D] of the real keys [B,G,N,D] with each label [B,G,N]; 0 of none."""
    blank = keys.new_zeros((1, 1, 1, 1)).expand(
        keys.shape[0], keys.shape[1], units.shape[1], keys.shape[3]
    )
    return _means(keys, real, labels, blank)


def spread(keys: Tensor, real: Tensor, units: Tensor) -> Tensor:
    """Where k-means starts: keys [B,G,U,D] at equal distances among those that are real."""
    tokens, count = real.sum(1, keepdim=True), units.sum(1, keepdim=True).clamp(min=1)
    numbers = torch.arange(units.shape[1], device=keys.device)
    index = (numbers * tokens).div(count, rounding_mode="floor")
    index = torch.minimum(index, tokens - 1).clamp(min=0)[:, None, :, None]
    return keys.gather(2, index.expand(-1, keys.shape[1], -1, keys.shape[3]))


def k_means(keys: Tensor, real: Tensor, units: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Labels [B,G,N] of keys [B,G,N,D] by the cosine with the means of units, and these [B,G,U,D]: members are not
    normalised, and an empty unit keeps its mean. A mean of what is no number is none.
    """
    clean = torch.nan_to_num(keys, posinf=0.0, neginf=0.0)
    near = _normal(clean)
    means = spread(clean, real, units)
    for _ in range(rounds):
        means = _means(clean, real, _nearest(near, means, units), means)
    labels = _nearest(near, means, units)
    return labels, torch.where(_means(keys, real, labels, means).isnan(), torch.nan, means)


def _normal(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)


def _nearest(near: Tensor, means: Tensor, units: Tensor) -> Tensor:
    like = near @ _normal(means).transpose(-1, -2)  # [B,G,N,U]
    return like.masked_fill(~units[:, None, None], -2.0).argmax(3)


def _means(keys: Tensor, real: Tensor, labels: Tensor, before: Tensor) -> Tensor:
    """Means [B,G,U,D] of the real keys [B,G,N,D] with each label; `before` where there are none."""
    there = real[:, None, :, None].to(keys.dtype)
    ones = there.expand(-1, keys.shape[1], -1, -1)
    index = labels[..., None]
    total = torch.zeros_like(before).scatter_add(
        2, index.expand(keys.shape), keys.masked_fill(there == 0, 0.0)
    )
    count = torch.zeros_like(before[..., :1]).scatter_add(2, index, ones)
    return torch.where(count > 0, total / count.clamp(min=1), before)
