"""Training of GliDe's head (arXiv:2402.02082): under a block mask, by which a token sees the target's keys and values
of earlier blocks alone, as a drafted one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accel.compiler.train.heads import HeadsRun
from accel.compiler.train.reading import BesideReading
from accel.ir.capture.arch.glide import Glide, GlideConfig
from accel.runtime.draft._published import TARGET
from accel.runtime.draft.glide import Glide as GlideDraft

BLOCK = 5  # tokens that see the keys of the same tokens
SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
)
OWN = ("vocab_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")


@dataclass
class BesideGlide(BesideReading):
    """One layer of the model's own sizes."""

    def made(self) -> Glide:
        from transformers import LlamaConfig

        facts, width, sizes = self.program.facts, self.stream_width, self.attention_sizes
        self.heads = LlamaConfig(
            **sizes,
            hidden_size=width,
            num_hidden_layers=facts.num_layers,
            rope_parameters=self.turns,
        )
        self.layers = LlamaConfig(
            **sizes,
            vocab_size=facts.vocab_size,
            hidden_size=width,
            intermediate_size=self.inner_width,
            num_hidden_layers=1,
            rms_norm_eps=1e-5,
        )
        some = None if self.ids is None else len(self.ids)
        head = Glide(GlideConfig(self.layers, self.heads, self.taps(facts.num_layers), some))
        self.check_turns(head.target_rotary)
        with torch.no_grad():
            words = self.output_head  # of which logits are of size 1 behind a norm
            head.lm_head.weight.copy_(words / words.std() / width**0.5)
        return head

    def config(self) -> dict[str, Any]:
        named = {n: getattr(self.heads, n) for n in (*SIZES, "num_hidden_layers")}
        return {
            "architectures": ["GlideDraft"],
            "model_type": "llama",
            **{n: getattr(self.layers, n) for n in (*SIZES, *OWN)},
            TARGET: named,
        }


class GlideRun(HeadsRun):
    """Beside a model."""

    drafter = GlideDraft
    pair = BesideGlide

    def drafts(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        read, says = self.soft.read(ids)
        slots = torch.arange(ids.shape[1] - 1)
        logits = self.soft.head.said(
            self.soft.embedded(ids[:, 1:]), read[:, :-1], slots[None], block_mask(len(slots), BLOCK)
        )
        return [
            self.soft.taught(logits[:, n::BLOCK], says[:, 1 + n :: BLOCK])
            for n in range(min(BLOCK, len(slots)))
        ]


def block_mask(slots: int, block: int) -> Tensor:
    """Which keys the tokens of slots see [T,T]: slot t holds token t + 1, and key t is token t's. Tokens 1 .. `block`
    see the first alone, the next ones all of these, and so on, as if a draft began at the first of each block.
    """
    token, key = 1 + torch.arange(slots)[:, None], torch.arange(slots)
    return key < token - (token - 1) % block
