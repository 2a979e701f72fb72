"""What kvpress' presses keep of a prompt, beside what eviction methods keep of the same tensors.

A method's parity is a file `kvpress/test_NAME.py`:

    from accel.passes.kv.score.knorm import KNorm
    from ..presses import agree, kvpress

    def test_the_same_tokens_stay():
        agree(KNorm(), kvpress.KnormPress)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import Tensor

from accel.ir.ops.attention import Form
from accel.passes.kv.inputs import call

from ..kv_case import evicting, kept
from ..kv_slots import choose, sets
from ..session_ways import singles

if os.environ.get("KVPRESS") == "required":  # `make parity`
    import kvpress
else:
    kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed: make parity")

__all__ = ["Prompt", "agree", "agree_whole", "kvpress", "llama"]

Kept = list[list[set[int]]]  # row -> KV head -> positions
LENGTHS, RATIOS = (40, 97), (0.25, 0.5, 0.7)
LAYERS = 2


@cache
def llama() -> Any:
    """A random Llama of two layers, 4 heads, 2 KV heads."""
    return models.make("llama", LAYERS)


@dataclass(frozen=True)
class Prompt:
    """What a layer of the Llama computes for a prompt of random tokens.

    module: the layer's attention (`q_proj`, `o_proj`, `rotary_emb`, `config`, …). hidden [B,S,E]: its input.
    keys, values [B,G,S,D], queries [B,H,S,D], all after RoPE. probs [B,H,S,S]. kwargs: of its forward.
    """

    module: Any
    hidden: Tensor
    keys: Tensor
    values: Tensor
    queries: Tensor
    probs: Tensor
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, length: int, batch: int = 2, layer: int = 1, seed: int = 0) -> Prompt:
        """Tokens that differ, by `seed`."""
        from transformers import DynamicCache
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        model, module, calls = llama(), llama().model.layers[layer].self_attn, []
        module.rotary_emb = model.model.rotary_emb
        past = DynamicCache()
        hook = module.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True
        )
        with torch.no_grad():
            model(tokens(batch, length, seed), past_key_values=past)
            hook.remove()
            (kwargs,) = calls
            keys, values = past.layers[layer].keys, past.layers[layer].values
            hidden = kwargs["hidden_states"]
            queries = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
            queries, _ = apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])
            repeated = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
            weights = queries @ repeated.transpose(2, 3) * module.scaling
            later = torch.ones(length, length).triu(1).bool()
            probs = weights.masked_fill(later, -torch.inf).softmax(-1)
        return cls(module, hidden, keys, values, queries, probs, kwargs)

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def slots(self, method: Any) -> dict[str, Tensor]:
        """What `choose` takes, where nothing was compressed yet: the queries that the method observes."""
        rows, groups, length = self.keys.shape[:3]
        last = max(1, min(length, int(getattr(method, "observe", 0))))
        notes = torch.zeros(rows, groups, length)
        if hasattr(method, "note") and "notes" in method.reads:
            places = torch.arange(length).expand(rows, -1)
            values = {"hidden": self.hidden, "queries": self.queries, "positions": places}
            values |= {"keys": self.keys, "values": self.values}
            notes = call(method.note, values).transpose(1, 2)
        return {
            "seen": torch.full((rows,), length),
            "recent_pos": torch.arange(length).repeat(rows, 1),
            "recent_k": self.keys,
            "recent_v": self.values,
            "kept_k": self.keys[:, :, :0],
            "kept_v": self.values[:, :, :0],
            "kept_pos": torch.zeros(rows, groups, 0).long(),
            "kept_mass": torch.zeros(rows, groups, 0),
            "kept_mass.recent": self.probs.sum(2).unflatten(1, (groups, -1)).sum(2),
            "kept_notes": notes[:, :, :0],
            "kept_notes.recent": notes,
            "queries": self.queries.transpose(1, 2)[:, -last:],
            "query_positions": torch.arange(length - last, length).repeat(rows, 1),
            "output": self.module.o_proj.weight.detach(),
        }

    def scores(self, press: Any, attentions: bool = False) -> Tensor:
        """A ScorerPress' scores [B,G,S]."""
        with torch.no_grad():
            found: Tensor = press.score(*self._operands(attentions))
        return found

    def compressed(self, press: Any, attentions: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values that a press leaves."""
        self.module.masked_key_indices = None
        with torch.no_grad():
            keys, values = press.compress(*self._operands(attentions))
        return keys, values

    def left(self, press: Any, attentions: bool = False) -> Kept:
        """Positions that a press leaves."""
        keys, values = self.compressed(press, attentions)
        return places(self.keys, self.values, keys, values, self.module)

    def _operands(self, attentions: bool) -> tuple[Any, ...]:
        probs = self.probs if attentions else None
        return self.module, self.hidden, self.keys, self.values, probs, self.kwargs


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """No row has a token twice, where there are so many."""
    rng, most = np.random.default_rng(seed), llama().config.vocab_size
    if length > most - 3:
        return torch.from_numpy(rng.integers(3, most, (batch, length)))
    rows = [3 + rng.permutation(most - 3)[:length] for _ in range(batch)]
    return torch.from_numpy(np.stack(rows))


def places(
    keys: Tensor, values: Tensor, some_keys: Tensor, some_values: Tensor, module: Any
) -> Kept:
    """The positions of some slots among all, by their keys or values, without those that the module masks."""

    def same(some: Tensor, every: Tensor) -> Tensor:
        return (some[:, :, :, None] == every[:, :, None]).all(-1)  # [B,G,N,S]

    hits = same(some_keys, keys) | same(some_values, values)
    assert (hits.sum(-1) == 1).all(), "a slot is no token's, or several tokens'"
    found = sets({"pos": hits.long().argmax(-1)})
    if (masked := getattr(module, "masked_key_indices", None)) is not None:
        for row, head, slot in zip(*(m.tolist() for m in masked), strict=True):
            found[row][head].discard(slot)
    return found


def agree(
    method: Any,
    press: Callable[[float], Any],
    *,
    budget: Any = None,
    keep: Any = None,
    refine: Any = None,
    operands: Callable[[Prompt], dict[str, Tensor]] | None = None,
    attentions: bool = False,
    batch: int = 2,
    lengths: Sequence[int] = LENGTHS,
    ratios: Sequence[float] = RATIOS,
) -> None:
    """A method keeps what a press does, ties aside, of the same tensors.

    press: the press of a compression ratio. operands: what the method reads beyond `Prompt.slots`, by the names that
    `Input.read` knows; a constant NAME of a table as `table.NAME`. attentions: whether the press takes the attention of
    all queries (some must, some must not). A press that ranks by `score` may differ in tokens of equal scores.
    """
    for length in lengths:
        prompt = Prompt.of(length, batch, seed=length)
        x = prompt.slots(method) | (operands(prompt) if operands else {})
        for ratio in ratios:
            other, count = press(ratio), max(1, int(length * (1 - ratio)))
            theirs = prompt.left(other, attentions)
            most = budget.most(count, prompt.keys.shape[1]) if budget else count
            scale = prompt.module.scaling
            mine = sets(
                choose(
                    x,
                    count,
                    method,
                    budget,
                    keep,
                    most,
                    form=Form("causal", scale=scale),
                    refine=refine,
                )
            )
            assert any(len(head) < length for row in theirs for head in row), "nothing went"
            if mine != theirs:
                where = f"length {length}, ratio {ratio}"
                assert isinstance(other, kvpress.ScorerPress), f"{where}: {mine} != {theirs}"
                ties(prompt.scores(other, attentions), mine, theirs, where)


def ties(scores: Tensor, mine: Kept, theirs: Kept, where: str, near: float = 1e-6) -> None:
    """Two choices of the highest scores differ in tokens of equal scores only."""
    for row, head in np.ndindex(scores.shape[:2]):
        a, b = mine[row][head], theirs[row][head]
        assert len(a) == len(b), f"{where}, row {row}, head {head}: {len(a)} tokens, not {len(b)}"
        if a != b:
            ours, lost = (scores[row, head, sorted(s)] for s in (a - b, b - a))
            apart = float((lost.max() - ours.min()).abs())
            assert apart <= near * float(scores[row, head].abs().max()), (
                f"{where}, row {row}, head {head}: {sorted(a - b)} instead of {sorted(b - a)}"
            )


def agree_whole(
    stateful: Any,
    tables: dict[str, Any],
    press: Any,
    *,
    length: int = 40,
    batch: int = 2,
    more: int = 5,
) -> None:
    """A session keeps what a press leaves in every layer and head, and gives the logits of `more` tokens after.

    stateful: the fixture. tables: of the recipe; its budget says what the press' compression ratio does.
    """
    from transformers import DynamicCache

    model = llama()
    ids = tokens(batch, length + more)
    past, plain = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(ids[:, :length], past_key_values=plain)
        with press(model):
            model(ids[:, :length], past_key_values=past)
    case = evicting(stateful("llama"), tables)
    with case.session(batch) as session:
        session.run(ids[:, :length].numpy())
        session.end_prompt()
        for layer, where in kept(session).items():
            every, some = plain.layers[layer], past.layers[layer]
            module = model.model.layers[layer].self_attn
            want = places(every.keys, every.values, some.keys, some.values, module)
            found = sets({"pos": torch.from_numpy(where)})
            assert found == want, f"layer {layer}: {found} != {want}"
        got = singles(session, ids[:, length:].numpy()) if more else None
    for i in range(more):
        with torch.no_grad():
            where = torch.full((batch, 1), length + i)
            logits = model(
                ids[:, [length + i]], position_ids=where, past_key_values=past
            ).logits.numpy()
        np.testing.assert_allclose(got[:, [i]], logits, atol=2e-4)
