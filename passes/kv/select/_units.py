"""Selection by units: groups of tokens with a representative each, which the entry `group` makes of cached keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

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
from accel.ir.program import Editor, Program
from accel.ir.region import Entry, sizes
from accel.ir.sizes import FEW
from accel.ir.state import Part, name_of, output_of
from accel.ir.tables import Tables
from accel.ir.trace import trace
from accel.ir.units import Units as Plan
from accel.passes.kv._shared.slots import written
from accel.passes.kv.inputs import EntryInputs, parameters
from accel.passes.kv.inputs import call as named_call
from accel.passes.kv.select import SPARSE
from accel.passes.kv.select._build import Build, Named, Stored, traced
from accel.passes.kv.select._tokens import Tokens, constant

ORIGIN = name_of(
    Part.UNITS, detail="origin"
)  # [B]: segments of generated tokens are counted from there
MEAN = "mean"  # of a unit's keys, or what stands for them
_TOKENS, _NEW = 53, 19  # example sizes while shapes are worked out


class _Grouped:
    """A class with a `group` and a `score` of whatever parameters, which are no fields of a dataclass."""

    group: Callable[..., tuple[Tensor, Tensor]]
    score: Callable[..., Tensor]


@dataclass(frozen=True)
class Units(_Grouped, Tokens):
    """Sparse attention over tokens, chosen unit by unit. A method says how keys become units (`group`), and what a
    unit is worth to queries (`score`).

    `group` gives the unit of each token [B,G,N], and the mean of each unit [B,G,U,D], or what stands for it. It names
    its inputs:

    | parameter | |
    |---|---|
    | `keys` [B,G,N,D] | as attention reads them |
    | `real` bool [B,N] | which of them are there |
    | `units` bool [B,U] | which units a row may have, the first ones |
    | `generated` bool [B,1] | tokens behind the row's last prompt, not of one |
    | a constant of a method that is a `Tables` | of the layer |
    | a `lasting` number of the `memory` [B,N] | of each token, as its choice said; -1: it read everything |
    | `marks` [B,N] | which tokens the session says lie together: equal numbers, from 0 on |

    tokens_read: tokens that are read of units and sinks. size: tokens of a unit, on average. every: generated
    tokens that are grouped at once. sinks: first tokens, in no unit and always read.

    The session's observer (`runtime/session/state/units.py`) runs the entry `group` when a prompt is whole and
    for every `every` generated tokens. A token reads the sinks, the best units until `tokens_read - sinks` tokens are
    listed (the last unit is cut) and all tokens that are in no unit yet. It reads a segment of generated tokens by
    units from FEW - 1 tokens behind it on: then a call of up to FEW tokens gives the logits of single-token calls, and
    what a rewind forgets can be grouped again. Longer calls read everything.

    State: `units.<layer>.label [B,G,C]`, the unit of each slot's token; `units.<layer>.mean [B,G,C/size,D]`,
    of each unit; `units.origin [B]`. The step only reads them.
    """

    size: int = option(80, least=1)
    every: int = option(320, least=1, multiple_of="size")
    sinks: int = option(16, least=0)

    relies = Tokens.relies | {Invariant.TOKENS_CONTIGUOUS, Invariant.UNIFORM_SLOTS}
    breaks = SPARSE | {Invariant.PLAIN_KEYS}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks >= self.tokens_read:
            raise RecipeError(
                f"{self.full_name}: sinks is {self.sinks}; give fewer than tokens_read = {self.tokens_read}"
            )

    @property
    def plan(self) -> Plan:
        """When tokens are grouped, and whether by marks."""
        return Plan(self.size, self.every, self.sinks, "marks" in parameters(self.group))

    @property
    def count(self) -> int:
        return self.tokens_read + self.plan.tail

    def score(self, queries: Tensor, means: Tensor) -> Tensor:
        """queries [B,G,M,D], the means [B,G,U,D] -> what each unit is worth to them [B,G,M,U]."""
        return queries.float() @ means.transpose(-1, -2)

    def vote(self, scores: Tensor, seen: Tensor) -> Tensor:
        """Scores of a group's heads [B,G,R,T,U] -> what units are worth to the group [B,G,T,U]: their mean."""
        return scores.mean(2)

    def begun(self, program: Program) -> Self:
        if program.facts.kv is not None:
            raise PassError(
                "kv.select groups tokens by the slots that they lie in, and kv.codec moves blocks of them to "
                "others; leave one of the two out, or use a codec that encodes single tokens (kv-int8)"
            )
        return self

    def finish(self, program: Program) -> None:
        program.facts.units = self.plan
        program.entries[GROUP.name] = self._entry(program)

    def operands(self, build: Build, node: fx.Node) -> dict[str, fx.Node]:
        """The origin, a layer's labels and the means of its units."""
        program, keys = build.program, operands_of(node).k
        layer, groups, width = node.meta["layer"], int(sizes(keys)[1]), int(sizes(keys)[3])
        units = build.every(self.size)
        if ORIGIN not in program.step.inputs:
            build.letters["C"] = keys.meta["val"].shape[2]
            build.declare(Part.UNITS, None, {"origin": ("int64", ("B",))}, self.sinks)
        values: dict[str, Stored] = {
            "label": ("int64", ("B", groups, "C")),
            MEAN: ("float32", ("B", groups, units, width)),
        }
        held = build.declare(Part.UNITS, layer, values)
        return {"origin": program.step.input(ORIGIN), **held}

    def search(
        self, x: Mapping[str, Tensor], before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, Tensor, Named]:
        """See `choose`. The queries [B,T,H,D] that choose for each token, the slots [B,T] of the tokens that they are
        of, and the memory of these tokens. By default each token's own, and none.
        """
        return x["queries"], own_slots(x), {}

    def choose(
        self, x: Mapping[str, Tensor], mask: Form, before: Mapping[str, Tensor], known: Tensor
    ) -> tuple[Tensor, Named]:
        """The sinks, the newest tokens, and those of the best units that the token of the search had behind it."""
        label, k_pos = x["label"], x["k_pos"]
        (batch, tokens, heads, width), groups = x["queries"].shape, label.shape[1]
        queries, at, new = self.search(x, before, known)
        rows = queries.transpose(1, 2).reshape(batch, groups, heads // groups * tokens, width)
        known_of = {"queries": rows, "means": x[MEAN], "form": mask}
        scores = named_call(self.score, known_of)
        places = torch.arange(k_pos.shape[1], device=at.device)
        seen = mask.visible(x["positions"][..., None], k_pos[:, None])  # [B,T,C]
        seen = seen & (places >= self.sinks) & (places < self.grouped(at, x["origin"])[..., None])
        seen = seen[:, None]
        some = units_seen(label, seen, scores.shape[3])
        worth = self.vote(scores.unflatten(2, (heads // groups, tokens)), some[:, :, None])
        chosen = best_tokens(worth, label, seen, self.tokens_read - self.sinks)
        own = own_slots(x)
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
        graph = fx.Graph()
        inputs = EntryInputs(program, graph)
        batch, ranks = inputs.batch, inputs.source.symbol("N", _TOKENS)
        asked = {n: inputs.new(n, batch) for n in ("start", "stop", "first", "units", "origin")}
        asked["ranks"] = inputs.new("ranks", ranks)
        asked["numbers"] = inputs.new("numbers", inputs.source.symbol("U", _NEW))
        if self.plan.marks:
            asked["marks"] = inputs.new("marks", batch, ranks)
        origin = inputs.shared(ORIGIN)
        sites = [
            n for n in program.step.graph.find_nodes(op="call_function", target=attention.default)
            if n.kwargs.get("pages") is not None
        ]  # fmt: skip
        given: dict[fx.Node, dict[str, fx.Node]] = {}
        for node in sites:
            x, layer = operands_of(node), node.meta["layer"]
            caches = [str(n.target) for n in _between(x.k) if n.op == "placeholder"]
            names = {n: name_of(Part.UNITS, layer, detail=n) for n in ("label", MEAN)}
            names |= {n: name_of(Part.PAGES, layer, detail=n) for n in self._lasting(node)}
            held = {n: inputs.shared(n) for n in (*caches, *names.values())}
            given[node] = {n: held[name] for n, name in names.items()}
        editor = Editor(program, graph)
        moved = trace(editor, ORIGIN, _moved, origin, asked["stop"], asked["origin"], key="origin")
        outputs = {output_of(ORIGIN): moved}
        for node in sites:
            layer, lasting = node.meta["layer"], self._lasting(node)
            keys = _copied(graph, _between(operands_of(node).k), inputs.placeholders)
            known = {"keys": keys, **asked}
            if isinstance(self, Tables):
                table = self.sizes(int(sizes(keys)[3]), int(sizes(keys)[1]))
                known |= {n: editor.param(constant(layer, n)) for n in table}
            known |= {n: given[node][n] for n in (*lasting, "label", MEAN)}
            new = traced(
                editor, f"units.{layer}", partial(self._grouped, lasting), known, ("group", self)
            )
            names = {n: output_of(name_of(Part.UNITS, layer, detail=n)) for n in new}
            outputs |= {names[n]: one for n, one in new.items()}
        graph.output(tuple(outputs.values()))
        return Entry(graph, list(outputs))

    def _lasting(self, node: fx.Node) -> tuple[str, ...]:
        """The numbers that the choices of an attention leave for good."""
        x = operands_of(node)
        return self.memory(int(sizes(x.q)[1]), int(sizes(x.q)[3]), int(sizes(x.k)[1])).lasting

    def _grouped(self, lasting: tuple[str, ...], x: Named) -> Named:
        """Labels and means as they are after the tokens in slots start..stop-1 [B] of keys [B,G,C,D] were grouped."""
        keys, ranks = x["keys"], x["ranks"]
        start, stop, first, units = (x[n][:, None] for n in ("start", "stop", "first", "units"))
        slots = (start + ranks).clamp(min=0, max=keys.shape[2] - 1)  # [B,N]
        index = slots[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        known = {**x, "keys": keys.gather(2, index).float()}
        known |= {"real": ranks < stop - start, "units": x["numbers"] < units}
        known |= {name: x[name][:, 0].gather(1, slots) for name in lasting}
        known["generated"] = start >= x["origin"][:, None]
        labels, means = named_call(self.group, known)
        label = written(x["label"], labels + first[:, None], start, stop)
        return {"label": label, MEAN: written(x[MEAN], means, first, first + units)}


def own_slots(x: Mapping[str, Tensor]) -> Tensor:
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


def _copied(graph: fx.Graph, nodes: list[fx.Node], caches: dict[str, fx.Node]) -> fx.Node:
    """The last of these nodes in another graph, of caches `caches` there by their names."""
    env: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.target is kv_append.default:
            source = operand_of(node, "buffer")
            assert isinstance(source, fx.Node)
            env[node] = env[source]
        elif node.op == "placeholder":
            env[node] = caches[str(node.target)]
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
