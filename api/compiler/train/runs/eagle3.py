"""Training of EAGLE-3's head (arXiv:2503.01840): at each place of a text a draft is made, in which the head reads its
own features, and each drafted token learns what the model says of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.compiler.train.heads import Beside, HeadsRun
from accel.ir.capture.arch.eagle3 import Eagle3, Eagle3Config
from accel.ir.errors import InputError
from accel.runtime.draft._published import eagle3_ids, eagle3_taps
from accel.runtime.draft.eagle3 import Eagle3 as Eagle3Draft

LEAST = 3  # layers of a model
UNROLLED = 4  # tokens of a draft that it learns


@dataclass
class BesideEagle3(Beside):
    """A layer of the model's own sizes."""

    @classmethod
    def taps(cls, layers: int) -> tuple[str, ...]:
        if layers < LEAST:
            raise InputError(
                f"eagle3: its head reads three depths of a model of {LEAST} layers or more, and this one has {layers}; "
                "train eagle1 or medusa for it, which read the last hidden state"
            )
        return eagle3_taps({}, layers)

    def made(self) -> Eagle3:
        taps, width, some = self.taps(self.program.facts.num_layers), self.width, self.own_words
        return Eagle3(Eagle3Config(self.layer, taps, width, some, False, width))

    def config(self) -> dict[str, Any]:
        layers = self.program.facts.num_layers
        return {
            **self.layer_config(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.words.count,
            "target_hidden_size": self.width,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": eagle3_ids({}, layers),
            },
        }


class Eagle3Run(HeadsRun):
    """Beside a model."""

    drafter = Eagle3Draft
    pair = BesideEagle3

    def drafts(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        taps, says = self.soft.read(ids)
        e = self.soft.embedded(ids)
        return unrolled(self.soft.head, taps, e[:, 1:], says[:, 1:], UNROLLED, self.soft.taught)


def unrolled(
    head: Eagle3,
    taps: Tensor,
    e: Tensor,
    says: Tensor,
    count: int,
    taught: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> list[tuple[Tensor, Tensor]]:
    """What `count` drafted tokens, one after the other, give to learn (`taught`, as of `Beside`). Of tokens 0 .. N-1
    the taps [B,N,F], of tokens 1 .. N-1 the embeddings e [B,N-1,E] and what the model says behind them [B,N-1,V].

    Place t of a draft's token n stands for slot t + n: it sees the slots up to t as the model has them, and of its own
    guesses those of place t, whose keys and values are `guessed`.
    """
    h = head.fuse(taps[:, :-1])
    found, guessed = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    for n in range(min(count, h.shape[1])):
        width = e.shape[1] - n
        h = h[:, :width]
        q, k, v = _heads(head, e[:, n:], h, n)
        guessed = [(keys[:, :, :width], values[:, :, :width]) for keys, values in guessed]
        guessed.append((k, v))
        mixed = head.midlayer.self_attn.o_proj(_mixed(q, guessed))
        logits, h = head.ending(h, mixed)
        found.append(taught(logits, says[:, n:]))
    return found


def _heads(head: Eagle3, e: Tensor, h: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B,H,T,D] of places that stand for slots `ahead` of them."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    attention = head.midlayer.self_attn
    x = head.beginning(e, h)
    q, k, v = (
        getattr(attention, f"{name}_proj")(x)
        .unflatten(-1, (-1, attention.head_dim))
        .transpose(1, 2)
        for name in "qkv"
    )
    places = torch.arange(ahead, ahead + x.shape[1])[None]
    q, k = apply_rotary_pos_emb(q, k, *head.rotary(h, places))
    groups = q.shape[1] // k.shape[1]
    return q, repeat_kv(k, groups), repeat_kv(v, groups)


def _mixed(q: Tensor, slots: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention [B,T,H D] of queries over the slots that the model has and the guesses of each place."""
    (keys, values), guesses = slots[0], slots[1:]
    count, scale = q.shape[2], q.shape[3] ** -0.5
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (q @ keys.transpose(2, 3)).masked_fill(later, float("-inf"))
    more = [(q * k).sum(-1, keepdim=True) for k, _ in guesses]
    weights = (torch.cat([scores, *more], -1) * scale).softmax(-1)
    out = weights[..., :count] @ values
    for n, (_, v) in enumerate(guesses):
        out = out + weights[..., count + n, None] * v
    flat: Tensor = out.transpose(1, 2).flatten(2)
    return flat
