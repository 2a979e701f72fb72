"""Differentiable cache augmentation (arXiv:2412.17747): a second model reads the cache of a prompt, and embeddings that
it gives extend the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.entries.augment import COPROCESS, EMBEDDED, LATENTS
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.prefill import Prefill
from accel.ir.program import Editor, Program
from accel.ir.region import Entry, sizes
from accel.ir.state import writes_state
from accel.ir.tables import Sizes
from accel.passes import Report
from accel.passes.prefill.prune import Base
from accel.passes.state.embedded import embedded, embedding_of, tidy
from accel.passes.trained import ALL, Trained, first_product, last_hidden, read

aten = torch.ops.aten
SOFT, GAIN, BASE = "soft", "gain", "base"  # of the trained part, and of each product two more
NAME = "cache-augment"
_LEAVE = "leave prefill.prune out for it"


@dataclass(frozen=True)
class CacheAugment(Trained, Base):
    """At the end of a prompt the coprocessor reads the cache as its past and `latents` trained embeddings as its input.
    The model then takes the coprocessor's last hidden states as embeddings of as many tokens, before the last `behind`
    tokens of the prompt, which it reads again behind them, so that what comes next has these beside it. Keys and values
    of all stay in the cache, and generation goes on behind them. The paper inserts at random places of a text, and so
    before tokens that are known; with `behind = 0` the latents are the last that the model reads.

    The coprocessor is the model itself with a low-rank product added to each of its products (LoRA), a gain on what
    it gives, and trained embeddings that are added to that; the paper trains a whole copy. The model's weights stay as
    they are. 0 latents: nothing is added. Prompts of an empty session are extended, later ones of a conversation are
    not.
    """

    latents: int = option(4, least=0, most=512)
    behind: int = option(8, least=0, most=512)
    lacks = "a whole copy of the model as the coprocessor"
    key: ClassVar[str] = "cache-augment"

    stage = -1  # products have their own weights yet
    must_change = False
    by_position = True  # no token is chosen
    relies = Base.relies | {
        Invariant.ALL_LAYERS_RUN,
        Invariant.CALL_INDEPENDENT,
        Invariant.CHAINS,
        Invariant.FIXED_LAYERS,
        Invariant.FULL_ATTENTION,
        Invariant.ROW_PRIVATE,
        Invariant.TOKENS_CONTIGUOUS,
        Invariant.UNIFORM_SLOTS,
    }

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        """A layer has none of its own: the products of all are told by the names of their weights."""
        return {}

    def parts(self, program: Program) -> dict[str, Tensor]:
        """What was trained for this model. Raises PassError, as `Trained.tensors`."""
        entry = coprocessor(program)
        want: dict[str, tuple[int, ...]] = {
            SOFT: (-1, width_of(entry)),
            BASE: (-1, width_of(entry)),
            GAIN: (width_of(entry),),
        }
        for name, (out, into) in shapes(program, entry).items():
            want |= {f"{name}.a": (into, -1), f"{name}.b": (-1, out)}
        wanted: dict[int, Sizes] = {ALL: want}
        parts = read(self, program.facts.name, first_product(program, entry), wanted)[ALL]
        ranks = {n.removesuffix(".a"): t.shape[1] for n, t in parts.items() if n.endswith(".a")}
        if wrong := [n for n, rank in ranks.items() if parts[f"{n}.b"].shape[0] != rank]:
            raise PassError(
                f"cache-augment: {wrong[0]}.a and .b of its file are of two ranks; train it again for this model"
            )
        if len(parts[BASE]) != len(parts[SOFT]):
            raise PassError(
                f"cache-augment: its file has {len(parts[SOFT])} embeddings and {len(parts[BASE])} behind them; train "
                "it again for this model"
            )
        if (there := len(parts[SOFT])) != self.latents:
            raise PassError(
                f"cache-augment: latents is {self.latents}, but it was trained with {there}; set latents = {there}, or "
                f"train it again by a recipe with latents = {self.latents}"
            )
        return parts

    def run(self, program: Program) -> Report:
        if not self.latents:
            return Report()
        check(program)
        parts = self.parts(program)
        program.entries[COPROCESS] = coprocessor(program, parts)
        program.entries[EMBEDDED] = embedded(program, NAME)
        program.facts.prefill = replace(
            program.facts.prefill or Prefill(), latents=self.latents, behind=self.behind
        )
        more = sum(tensor.numel() for tensor in parts.values())
        program.facts.notes.append(
            f"cache-augment adds {self.latents} embeddings behind a prompt; its coprocessor has {more:,} parameters of "
            "its own"
        )
        return Report(changed=2)


def check(program: Program) -> None:
    """Raise PassError where no second model can extend the cache."""
    facts = program.facts
    if facts.encoder is not None:
        reason = f"the prompt of an encoder-decoder is a few tokens; {_LEAVE}"
    elif facts.diffusion is not None:
        reason = f"tokens of this model see later ones, so nothing is behind a prompt; {_LEAVE}"
    elif any(layer.attention == "recurrent" for layer in facts.layers):
        reason = (
            "recurrent state is replaced by each call, so the model's own would be lost to the second model; "
            f"{_LEAVE}"
        )
    elif facts.adapters is not None:
        reason = "the second model was trained beside the model without adapters; merge one (merge_adapter=DIR)"
    else:
        return
    raise PassError(f"cache-augment: {reason}")


def coprocessor(program: Program, parts: Mapping[str, Tensor] | None = None) -> Entry:
    """The step over the same state, that takes numbers of soft embeddings as tokens [B,T] and gives `latents` [B,T,E]:
    the last hidden states. parts: what was trained; none: the model's own embeddings and weights. Raises PassError.
    """
    entry = program.copy().step
    editor, found = Editor(program, entry.graph), embedding_of(entry, NAME)
    hidden = hidden_of(entry, int(sizes(found)[2]))
    state = {n: node for n, node in entry.output_nodes().items() if writes_state(n)}
    given = hidden
    if parts is not None:
        with entry.graph.inserting_before(found):
            soft = editor.param(named(SOFT), parts[SOFT])
            taken = editor.call(aten.index.Tensor, soft, [entry.input("tokens")])
        found.replace_all_uses_with(taken)
        with entry.graph.inserting_before(hidden.next):
            large = editor.call(aten.mul.Tensor, hidden, editor.param(named(GAIN), parts[GAIN]))
            base = editor.param(named(BASE), parts[BASE])
            asked = editor.call(aten.gather.default, entry.input("tokens"), 1, entry.input("rows"))
            given = editor.call(
                aten.add.Tensor, large, editor.call(aten.index.Tensor, base, [asked])
            )
    entry.set_outputs({LATENTS: given, **state})
    tidy(entry)
    if parts is not None:
        for name, nodes in products(program, entry).items():
            for node in nodes:
                _adapt(program, node, name, parts)
    return entry


def named(name: str) -> str:
    """What the program calls a tensor of the trained part."""
    return f"augment.{name}"


def width_of(entry: Entry) -> int:
    """The width E of what the coprocessor gives."""
    return int(sizes(entry.output_nodes()[LATENTS])[2])


def hidden_of(entry: Entry, width: int) -> fx.Node:
    """The last hidden state [B,N,E], which the output head reads. Raises PassError."""
    hidden = last_hidden(entry)
    if hidden is None:
        raise PassError(f"cache-augment: no linear output head was found; {_LEAVE}")
    if sizes(hidden)[2] != str(width):
        raise PassError(
            f"cache-augment: the last hidden state is {sizes(hidden)[2]} wide, and an embedding {width}, so one cannot "
            f"stand for the other; {_LEAVE}"
        )
    return hidden


def products(program: Program, entry: Entry) -> dict[str, list[fx.Node]]:
    """The products of an entry, by the names of their weights."""
    found: dict[str, list[fx.Node]] = {}
    for node in program.nodes(aten.linear.default, entry=entry):
        weight = node.args[1]
        assert isinstance(weight, fx.Node)
        if weight.op == "get_attr":
            found.setdefault(str(weight.target), []).append(node)
    return found


def shapes(program: Program, entry: Entry) -> dict[str, tuple[int, int]]:
    """The sizes (outputs, inputs) of these weights."""
    found = {}
    for name in products(program, entry):
        out, into = program.params.blank(name).shape
        found[name] = int(out), int(into)
    return found


def _adapt(program: Program, node: fx.Node, name: str, parts: Mapping[str, Tensor]) -> None:
    """linear(x, weight)  ->  linear(x, weight) + (x a) b"""
    editor, x = Editor(program, node.graph), node.args[0]
    with node.graph.inserting_before(node.next):
        total = node.graph.call_function(aten.add.Tensor, (node, node))
    with node.graph.inserting_before(total):
        a, b = (editor.param(named(f"{name}.{n}"), parts[f"{name}.{n}"]) for n in "ab")
        low = editor.call(aten.matmul.default, x, a, like=node)
        more = editor.call(aten.matmul.default, low, b, like=node)
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    total.args = (node, more)
    total.meta = {**node.meta, "val": editor.value(total)}
