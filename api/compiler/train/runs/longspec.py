"""Training of LongSpec's head (arXiv:2502.17421): some tokens' keys of the target are missing, as they are for drafted
tokens, and the places of short rows are moved, so that large ones are learnt too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.compiler.load.heads.longspec import WINDOW
from accel.compiler.train.reading import BesideReading
from accel.compiler.train.spoken import BesideSpoken, SpokenRun
from accel.ir.capture.arch.longspec import Longspec, LongspecConfig
from accel.runtime.draft.longspec import Longspec as LongspecDraft

STALE = 4  # tokens at most whose keys a token does not see, its own included
ANCHORS, SHORT = 4, 1200  # tokens at most that keep their places, of rows of so many tokens at most
FAR, LEFT = 30_000, 1000  # the furthest place, and what is left free of the context
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
)


@dataclass
class BesideLongspec(BesideReading, BesideSpoken):
    """A layer of the model's own sizes, which speaks by the model's output head."""

    whole = True

    def made(self) -> Longspec:
        from transformers import LlamaConfig

        facts = self.program.facts
        self.layer_sizes = LlamaConfig(
            **self.attention_sizes,
            vocab_size=facts.vocab_size,
            hidden_size=self.stream_width,
            intermediate_size=self.inner_width,
            num_hidden_layers=1,
            rms_norm_eps=1e-5,
            rope_parameters=self.turns,
        )
        head = Longspec(
            LongspecConfig(self.layer_sizes, WINDOW, self.taps(facts.num_layers), embed_norm=True)
        )
        self.check_turns(head.rotary)
        head.lm_head.weight = self.spoken()
        return head

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaGlideDecoderLayer"],
            "model_type": "llama",
            **{n: getattr(self.layer_sizes, n) for n in SIZES},
            "rms_norm_eps": self.layer_sizes.rms_norm_eps * self.size**2,
            "num_hidden_layers": self.program.facts.num_layers,
            "window": WINDOW,
        }


class LongspecRun(SpokenRun):
    """Beside a model."""

    drafter = LongspecDraft
    pair = BesideLongspec
    summands = ("embed_norm", "self_attn.o_proj", "cross_attn.o_proj", "mlp.down_proj")

    def drafts(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
        count = ids.shape[1]
        places = moved(count, self.soft.program.facts.max_context, generator)
        stale = int(torch.randint(1, STALE + 1, (), generator=generator))
        read, says = self.soft.read(ids, places)
        logits = self.soft.head.said(
            self.soft.embedded(ids[:, 1:]),
            read[:, :-1],
            places[None, 1:],
            stale_mask(count - 1, stale),
        )
        return [self.soft.taught(logits, says[:, 1:])]


def moved(count: int, context: int, generator: torch.Generator) -> Tensor:
    """Places [n] of a row of n tokens: those behind a few anchors are moved by a random distance."""
    places, room = torch.arange(count), min(FAR, context - LEFT) - count
    if count > SHORT or room <= 0:
        return places
    anchors = int(torch.randint(ANCHORS + 1, (), generator=generator))
    places[anchors:] += int(torch.randint(room + 1, (), generator=generator))
    return places


def stale_mask(slots: int, stale: int) -> Tensor:
    """Which keys the tokens of slots see [T,T]: slot t holds token t + 1, and key t is token t's; a token sees those
    that are `stale` tokens before it or more. The first ones see nothing.
    """
    token, key = 1 + torch.arange(slots)[:, None], torch.arange(slots)
    return key <= token - stale
