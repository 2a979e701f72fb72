"""What a recipe's program costs by formula: bytes of cache and of weights, and the tokens per second that follow."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from accel.compiler.explain.layer import LAYOUT
from accel.compiler.explain.rates import Rates
from accel.compiler.explain.subject import Sizes, Subject
from accel.compiler.facts_json import bounded
from accel.ir.depth import BRANCHES
from accel.ir.ops.attention import attention
from accel.ir.ops.experts import expert_linear
from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import PRODUCTS, quantized_expert_linear
from accel.ir.program import Program, State
from accel.ir.region import Conditional, Region, graphs_of, layer_calls
from accel.ir.sizes import grows, per_slot
from accel.ir.state import CacheRegion
from accel.runtime.backends.buffers import STEP, kept_heads
from accel.runtime.session.core import CHUNK
from accel.runtime.session.prompt.filter import unseen

aten = torch.ops.aten
_EXPERTS = {expert_linear.default, quantized_expert_linear.default}
_PRODUCTS = {
    aten.linear.default,
    *PRODUCTS,
    *_EXPERTS,
}  # they read all of a weight; what looks up, a row
OUTSIDE = (
    250e-6  # seconds of a token that pass outside the graph: the loop, the choice, what is copied
)
# kind of weights -> bytes read for each that is stored, and the rate: float16 is widened when it is opened
_RATES = {
    "float32": (1, "float32"),
    "float16": (2, "float32"),
    "int8": (1, "int8"),
    "int4": (1, "int4"),
}


@dataclass(frozen=True)
class Held:
    """Tokens after a prompt, mean over the layers. recent: since the last compression; low: demoted to each form of
    fewer bits. window: slots that layers with a window need, where they keep the newest tokens only.
    """

    kept_tokens: float
    recent: int
    low: tuple[float, ...] = ()
    window: int = 0


@dataclass(frozen=True)
class Cache:
    """Bytes of one row's state. slot: of a token since the last compression; kept_slot: of a token that was kept;
    low: of a token in each form of fewer bits, once: what such a form stores of an eviction; fixed: whatever the
    length. windowed: of a slot of layers that keep the newest tokens only. tokens: after a prompt of so many.
    """

    slot: float
    kept_slot: float
    fixed: float
    tokens: Mapping[int, Held] = field(default_factory=dict)
    dense: float = 0  # of a token with a plain cache of the same model
    low: tuple[float, ...] = ()
    once: tuple[float, ...] = ()
    windowed: float = 0

    def bytes(self, prompt: int) -> int:
        """After a prompt of so many tokens and the first one after it, slots by STEP."""
        held = self.tokens[prompt]
        slots, window = (-(-n // STEP) * STEP for n in (held.recent + 1, held.window))
        low = sum(n * size for n, size in zip(held.low, self.low, strict=True))
        once = sum(size for n, size in zip(held.low, self.once, strict=True) if n)
        recent = slots * self.slot + window * self.windowed
        return round(held.kept_tokens * self.kept_slot + low + once + recent + self.fixed)


@dataclass(frozen=True)
class Reading:
    """Bytes of weights that one token reads, by kind ("float32", "float16", "int8", "int4")."""

    inner: dict[str, float]
    outer: dict[str, float]

    @property
    def kinds(self) -> dict[str, float]:
        """Of both."""
        names = dict.fromkeys([*self.inner, *self.outer])
        return {n: self.inner.get(n, 0.0) + self.outer.get(n, 0.0) for n in names}

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


def cache(
    program: Program,
    sizes: Sizes | None,
    methods: Mapping[str, Any],
    prompts: Sequence[int],
    dense: float,
) -> Cache:
    """By formula, from the layout of the state and what the recipe keeps."""
    many = _layers_of(program, sizes)
    slot = kept_slot = fixed = windowed = 0.0
    heads, forms = _ragged(program), _forms(methods)
    low, once = [0.0] * forms, [0.0] * forms
    for state in program.state:
        size = _size(state, sizes, heads) * many.get(state.layer, 1)
        if state.region is CacheRegion.LOW:
            of = once if str(state.shape[2]).startswith("E") else low
            of[_form(state)] += size
        elif bounded(program.facts, state):
            windowed += size
        elif grows(state.shape):
            slot += size
        elif state.written_between_steps and not state.ragged:
            kept_slot += size
        elif not state.cross:
            fixed += size
    if program.facts.kv is not None and program.facts.kv.flush:
        kept_slot /= program.facts.kv.flush  # a slot is a block
    tokens = {n: _kept(program, sizes, methods, n) for n in prompts}
    if (window := program.facts.window) is not None:
        tokens = {
            n: replace(held, window=window.slots(_calls(program, n))) for n, held in tokens.items()
        }
    return Cache(slot, kept_slot, fixed, tokens, dense, tuple(low), tuple(once), windowed)


def _calls(program: Program, prompt: int) -> list[int]:
    """The tokens of each call of a prompt, and of the first one after it."""
    fill = None if program.facts.prefill is None else program.facts.prefill.fill
    first = prompt - 1 if fill is not None and prompt > fill.least else 0
    parts = [min(CHUNK, n - at) for n in (first, prompt - first) for at in range(0, n, CHUNK)]
    return [*parts, 1]


def _forms(methods: Mapping[str, Any]) -> int:
    """How many forms of fewer bits tokens may be in."""
    keep = methods.get("kv.keep")
    return len(keep.tiers) if keep is not None and keep.demotes else 0


def _form(state: State) -> int:
    """Which form a state of fewer bits is of, by the letter of its slots: Q0 or Q0_1."""
    return int(str(state.shape[2]).partition("_")[2] or 0)


def _layers_of(program: Program, sizes: Sizes | None) -> dict[int | None, int]:
    """How many layers of the model each layer of the program stands for."""
    if sizes is None:
        return {}
    found: dict[int | None, int] = {}
    count = len(program.facts.layers)
    for layer in range(sizes.layers):
        like = layer if layer < count else layer % min(sizes.period, count)
        found[like] = found.get(like, 0) + 1
    return found


def _ragged(program: Program) -> dict[int | None, int]:
    """The KV heads of each layer whose kept slots are one head's each."""
    return {s.layer: int(s.shape[1]) for s in program.state if s.ragged}


def _size(state: State, sizes: Sizes | None, ragged: Mapping[int | None, int]) -> float:
    """Bytes of one slot of all heads (or of all slots, where it has none) of a row."""
    size = per_slot(state.shape) * np.dtype(state.dtype).itemsize
    heads = state.shape[1] if len(state.shape) > 2 or state.ragged else None
    if state.region is CacheRegion.KEPT and state.layer in ragged and not state.ragged:
        heads = ragged[state.layer]
        size *= heads
    if sizes is not None and state.layer is not None and heads == sizes.heads:
        size *= float(sizes.kv)
    return size


def _kept(program: Program, sizes: Sizes | None, methods: Mapping[str, Any], prompt: int) -> Held:
    """Tokens after a prompt: as a session does it. Where what the keep demotes goes by the text, the most."""
    layers = len(program.facts.layers) if sizes is None else sizes.layers
    prompt -= unseen(program.facts.prefill, prompt)
    none = (0.0,) * _forms(methods)
    if program.facts.kv is None or not layers:
        return Held(0.0, prompt, none)
    if (
        block := program.facts.kv.flush
    ):  # all stays; sinks apart, blocks before the newest whole one are codes
        kept = max(0, (prompt - program.facts.kv.sinks) // block - 1) * block
        return Held(float(kept), prompt - kept, none)
    budget, when, keep = methods["kv.budget"], methods["kv.when"], methods["kv.keep"]
    heads = max(kept_heads(program.state).values(), default=1)
    tables = program.facts.kv.tables or ({},)
    told = [{n: np.array(v) for n, v in tables[i % len(tables)].items()} for i in range(layers)]
    seen = [budget.tokens(prompt, layer, layers, **told[layer]) for layer in range(layers)]
    due = when.due("prompt", prompt) or when.due("call", prompt)
    if not due or all(tokens >= prompt for tokens in seen):
        return Held(0.0, prompt, none)
    each = zip(seen, told, strict=True)
    if not _ragged(program):
        most = [budget.most(t, heads, **one) for t, one in each]
    elif budget.across is not None:
        most = seen
    else:
        most = [budget.room(t, heads, prompt, **one) / heads for t, one in each]
    stay = [min(prompt, tokens) for tokens in most]
    low = [keep.counts(round(prompt - n)) for n in stay] if none else [none]
    return Held(sum(stay) / layers, 0, tuple(sum(n) / layers for n in zip(*low, strict=True)))


def reading(subject: Subject, before: Program, after: Program) -> Reading:
    """What one token reads of the weights; of a sketch, its bytes per weight times the model's weights."""
    found = _read(after)
    sizes = subject.sizes
    if sizes is None:
        return found
    plain = _read(before)
    inner, outer = (sum(part.values()) / 4 for part in (plain.inner, plain.outer))
    return Reading(
        {k: v * sizes.inner * sizes.active / max(inner, 1) for k, v in found.inner.items()},
        {k: v * sizes.outer / max(outer, 1) for k, v in found.outer.items()},
    )


def _read(program: Program) -> Reading:
    """Bytes by kind; a layer that the recipe's plan leaves out reads nothing."""
    inner: dict[str, float] = {}
    outer: dict[str, float] = {}
    depth = program.facts.depth
    plans = {} if depth is None else depth.plans
    layers = {call: index for index, call in enumerate(layer_calls(program.step.graph))}
    for node in program.step.graph.nodes:
        if node not in layers:
            _add(outer, node, program)
            continue
        layer = layers[node]
        left = {BRANCHES[name] for name, plan in plans.items() if not plan[layer]}
        for inside in _running(node.target, left):
            _add(inner, inside, program)
    return Reading(inner, outer)


def _running(region: Region, left: Container[str]) -> Iterator[fx.Node]:
    """The nodes of a region, and of those within it, but for conditions of these kinds, which are left out."""
    off = region.name.split(".")[0] in left
    for node in graphs_of(region)[1 if off and isinstance(region, Conditional) else 0].nodes:
        yield node
        if isinstance(node.target, Region):
            yield from _running(node.target, left)


def _add(bytes_read: dict[str, float], node: fx.Node, program: Program) -> None:
    """What a node reads of its parameters, whole; of experts those that a token takes."""
    if node.target not in _PRODUCTS:
        return
    share = _share(node, program) if node.target in _EXPERTS else 1.0
    for source in node.all_input_nodes:
        while source.op == "call_function" and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]  # a cast of a parameter
        if source.op == "get_attr":
            stored = program.params.stored(str(source.target))
            few = f"int{operand_of(node, 'bits')}" if node.target in PRODUCTS else ""
            kind = few or ("float16" if stored.blank.dtype is torch.float16 else "float32")
            bytes_read[kind] = bytes_read.get(kind, 0.0) + stored.nbytes * share


def _share(node: fx.Node, program: Program) -> float:
    """The part of the experts that a token takes: as many as the router chooses of them."""
    weight = operand_of(node, "q" if node.target in PRODUCTS else "weight")
    assert isinstance(weight, fx.Node)
    experts = int(weight.meta["val"].shape[0])
    chosen = [n.args[1] for n in node.graph.nodes if n.target is aten.topk.default]
    return min(1.0, max((c for c in chosen if isinstance(c, int)), default=experts) / experts)


@dataclass(frozen=True)
class Prediction:
    """Seconds of one decoded token, by what they go into."""

    weights: float
    cache: float
    nodes: float
    outside: float = OUTSIDE

    @property
    def tokens_per_second(self) -> float:
        return 1 / (self.weights + self.cache + self.nodes + self.outside)


def nodes(program: Program) -> int:
    """How many a step runs, about: accel's operators take what stands around products of few bits, and
    attention, into two for each attention and one for each product.
    """
    products = len(program.nodes(*PRODUCTS, entry=program.step))
    attentions = len(program.nodes(attention.default, entry=program.step))
    every = sum(
        n.target not in LAYOUT and not isinstance(n.target, Region)
        for n in program.nodes(entry=program.step)
    )
    return products + 2 * attentions if products else every


def predict(
    program: Program,
    sizes: Sizes | None,
    read: Reading,
    tokens: Held,
    rates: Rates,
) -> Prediction | str:
    """What a token takes where attention reads `tokens`, by this machine's rates; or why it cannot be told."""
    held = _read_of_cache(program, sizes, tokens)
    if unknown := [kind for kind in (*read.kinds, *held) if kind not in _RATES]:
        return f"no rate was measured for {unknown[0]}"
    weights = sum(_RATES[k][0] * b for k, b in read.kinds.items())
    total = weights + sum(held.values())
    many = 1.0 if sizes is None else sizes.layers / max(1, len(program.facts.layers))
    return Prediction(
        sum(_RATES[k][0] * b / rates.weight(_RATES[k][1], total) for k, b in read.kinds.items()),
        sum(b / rates.cache(kind, total) for kind, b in held.items()),
        nodes(program) * many * rates.node,
    )


def _read_of_cache(program: Program, sizes: Sizes | None, tokens: Held) -> dict[str, float]:
    """Bytes of keys and values that attention reads for one token, by their form; a window reads no further,
    and a layer that is left out nothing.
    """
    facts, depth = program.facts, program.facts.depth
    many, bytes_read = _layers_of(program, sizes), dict[str, float]()
    heads = _ragged(program)
    forms = {s.name: s.dtype for s in program.state}
    for state in program.state:
        layer = state.layer
        if layer is None or state.cross or not (grows(state.shape) or state.written_between_steps):
            continue
        if depth is not None and not depth.plan[layer]:
            continue
        window = facts.layers[layer].window
        slots = tokens.kept_tokens if state.written_between_steps else tokens.recent + 1
        if state.region is CacheRegion.LOW:
            slots = 1 if str(state.shape[2]).startswith("E") else tokens.low[_form(state)]
        if window and not state.written_between_steps:
            slots = min(slots, window)
        if state.positions or state.kept_positions or state.ragged:
            continue
        codes = replace(state, detail="").name  # whose scales it may be
        form = forms.get(codes, state.dtype)
        bytes_read[form] = (
            bytes_read.get(form, 0.0) + _size(state, sizes, heads) * many.get(layer, 1) * slots
        )
    return bytes_read
