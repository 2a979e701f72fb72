"""Training of the coprocessor of `cache-augment`, beside a model that stays as it is (arXiv:2412.17747).

At several random places of a row latents are inserted, and the loss is that of the next `AHEAD` tokens, of those from
the method's `behind` on.
All insertions run at once: a mask lets the latents of one see the row before it alone, and the tokens behind them that
and these latents, at the positions that they have in a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from accel.compiler.over_state import shared
from accel.compiler.pipeline import pipeline
from accel.compiler.train.run import Run
from accel.ir.entries.augment import LATENTS
from accel.ir.entries.step import LOGITS
from accel.ir.ops.attention import Operands, attention, weights
from accel.ir.ops.op import REFERENCES
from accel.ir.program import Program, evaluate, operand
from accel.ir.region import Entry, Region
from accel.ir.state import state_of, writes_state
from accel.passes import run
from accel.passes.prefill.prune.cache_augment import (
    BASE,
    GAIN,
    NAME,
    SOFT,
    CacheAugment,
    check,
    coprocessor,
    named,
    shapes,
    width_of,
)
from accel.passes.state.embedded import embedded, embedding_of
from accel.passes.trained import ALL, Parts, first_product

AHEAD = 16  # tokens behind an insertion that count
SPACING = 16  # tokens of a row for each insertion
HIDDEN = -1e9  # added to a score
_ADDED = 0.02


class Augmented:
    """A program as the method finds it, its coprocessor, and the step over embeddings."""

    def __init__(self, program: Program, method: CacheAugment):
        """`program`: over state."""
        self.program, self.method = program.copy(), method
        check(self.program)
        steps = pipeline()
        run(self.program, steps[shared(steps) :], done=steps[: shared(steps)])
        self.fixed = {name: self.program.params[name] for name in self.program.params}
        self.embedded, self.plain = embedded(self.program, NAME), coprocessor(self.program)
        self.second: Entry | None = None

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return first_product(self.program, self.plain)

    def start(self, inner: int, seed: int) -> Parts:
        """Soft embeddings that are those of random tokens, products of rank `inner` that are 0, a gain that makes what
        the coprocessor adds a small part of an embedding; and what it adds to, the embedding of the token that ends a
        text, which disturbs what follows least of those that were tried.
        """
        generator, size = torch.Generator().manual_seed(seed), self.program.facts.vocab_size
        tokens = torch.randint(0, size, (1, self.method.latents), generator=generator)
        soft = self.embeddings(tokens)[0]
        last = self._run(self.plain, self.inputs(tokens))[LATENTS]
        large = soft.square().mean().sqrt() / last.square().mean().sqrt()
        gain = torch.full((width_of(self.plain),), _ADDED * float(large))
        ends = torch.full_like(tokens, (self.program.facts.eos or [0])[0])
        parts = {SOFT: soft.clone(), BASE: self.embeddings(ends)[0].clone(), GAIN: gain}
        for name, (out, into) in shapes(self.program, self.plain).items():
            a = torch.randn(into, inner, generator=generator) * into**-0.5
            parts |= {f"{name}.a": a, f"{name}.b": torch.zeros(inner, out)}
        return {ALL: parts}

    def inputs(self, tokens: Tensor, more: int = 0) -> dict[str, Tensor]:
        """Of a step over tokens [B,T] from an empty cache on, which has `more` slots behind them."""
        batch, length = tokens.shape
        state = {s.name: s.allocate(B=batch, C=length + more) for s in self.program.state}
        places = torch.arange(length).repeat(batch, 1)
        slots = torch.zeros(batch, dtype=torch.int64)
        return {"tokens": tokens, "positions": places, "slots": slots, "rows": places, **state}

    def embeddings(self, tokens: Tensor) -> Tensor:
        """What the model reads of tokens [B,T]: [B,T,E]."""
        node = embedding_of(self.program.step, NAME)
        found: Tensor = evaluate([node], self.fixed, {"tokens": tokens})[0]
        return found

    def losses(self, parts: Parts, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of AHEAD tokens, the first `behind` tokens after each of `places` [I] of rows [B,T+1], with
        latents that are inserted at the place, and without them: [B,I,AHEAD].
        """
        latents, (batch, length) = self.method.latents, (len(ids), ids.shape[1] - 1)
        behind = self.method.behind
        count, width = len(places), latents + behind + AHEAD - 1
        steps = behind + torch.arange(AHEAD)
        target = ids[:, places[:, None] + steps]  # [B,I,A]
        with torch.no_grad():
            given = self.inputs(ids[:, :-1], count * width)
            given["rows"] = (places[:, None] - 1 + steps).flatten().repeat(batch, 1)
            out = self._run(self.program.step, given)
            before = {state_of(n): value for n, value in out.items() if writes_state(n)}
        if self.second is None:
            self.second = coprocessor(self.program, parts[ALL])
        own = {named(name): tensor for name, tensor in parts[ALL].items()}
        numbers = torch.arange(latents).repeat(batch, count)
        call = self._call(places, latents, batch, length)
        seen = visible(places, latents, length, length + count * width)
        made = self._run(self.second, {**before, **call, "tokens": numbers}, seen, own)[LATENTS]
        read = ids[
            :, places[:, None] + torch.arange(behind + AHEAD - 1)
        ]  # the last one is only predicted
        read = self.embeddings(read.flatten(1)).unflatten(1, (count, behind + AHEAD - 1))
        stream = torch.cat((made.unflatten(1, (count, latents)), read), 2).flatten(1, 2)
        call = self._call(places, width, batch, length)
        asked = torch.arange(count)[:, None] * width + latents - 1 + steps
        call["rows"] = asked.flatten().repeat(batch, 1)
        seen = visible(places, width, length, length + count * width)
        logits = self._run(self.embedded, {**before, **call, "stream": stream}, seen)[LOGITS]
        return tuple(  # type: ignore[return-value]
            F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
            for x in (logits, out[LOGITS])
        )

    def _call(self, places: Tensor, width: int, batch: int, length: int) -> dict[str, Tensor]:
        """Inputs of a call of so many columns of each insertion, behind a row of `length` tokens."""
        positions = (places[:, None] + torch.arange(width)).flatten().repeat(batch, 1)
        columns = torch.arange(positions.shape[1]).repeat(batch, 1)
        return {"positions": positions, "slots": torch.full((batch,), length), "rows": columns}

    def _run(
        self,
        entry: Entry,
        inputs: Mapping[str, Any],
        seen: Tensor | None = None,
        trained: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """What an entry gives; of the slots that positions let columns see, those that are `seen` [T,C]."""
        params = {**self.fixed, **(trained or {})}
        return dict(zip(entry.outputs, _values(entry.graph, params, inputs, seen), strict=True))


def visible(places: Tensor, width: int, length: int, slots: int) -> Tensor:
    """Which slots the columns of a call may see, bool [T,C]: `width` columns of each insertion at `places` [I], behind
    `length` tokens; each sees the tokens before its place, and its insertion's own columns.
    """
    of = torch.arange(len(places)).repeat_interleave(width)[:, None]  # [T,1]
    slot = torch.arange(slots)
    own = (slot - length).div(width, rounding_mode="floor")
    return torch.where(slot < length, slot < places[of], own == of)


def _values(
    graph: fx.Graph, params: Mapping[str, Tensor], inputs: Mapping[str, Any], seen: Tensor | None
) -> Any:
    """What a graph returns, with gradients."""
    values: dict[fx.Node, Any] = {}

    def of(args: Any) -> Any:
        return fx.node.map_arg(args, lambda n: operand(n, params, values))

    for node in graph.nodes:
        if node.op == "output":
            return of(node.args[0])
        if node.op == "placeholder":
            values[node] = inputs[str(node.target)]
        elif isinstance(node.target, Region):
            names = [str(p.target) for p in node.target.graph.find_nodes(op="placeholder")]
            given = dict(zip(names, of(node.args), strict=True))
            values[node] = _values(node.target.graph, params, given, seen)
        elif node.target is attention.default and seen is not None:
            x = Operands[Tensor](*of(node.args), **of(node.kwargs))
            probs, mixed = weights(x, torch.zeros(()).masked_fill(~seen, HIDDEN))
            values[node] = probs @ mixed
        elif node.op != "get_attr":
            function: Any = REFERENCES.get(node.target, node.target)
            values[node] = function(*of(node.args), **of(node.kwargs))
    raise ValueError("the graph returns nothing")


class AugmentRun(Run):
    """Beside an `Augmented`."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, CacheAugment)

    @classmethod
    def over(cls, program: Program, method: Any) -> Augmented:
        """See Run."""
        return Augmented(program, method)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], at random places."""
        generator = torch.Generator().manual_seed(self.options.seed + self.step)
        behind = self.soft.method.behind
        last = ids.shape[1] - AHEAD - behind
        some = max(1, ids.shape[1] // SPACING)
        places = 1 + torch.randperm(last, generator=generator)[:some].sort().values
        found, without = self.soft.losses(self.parts, ids, places)
        weight = known[:, places[:, None] - 1 + behind + torch.arange(AHEAD)]
        total = weight.sum().clamp(min=1)
        loss = (found * weight).sum() / total
        self.descend(loss)
        return {"loss": loss.item(), "without": float((without * weight).sum() / total)}
