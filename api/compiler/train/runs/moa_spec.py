"""Training of Mixture of Attentions (arXiv:2410.03804): a token sees the summaries of tokens before a random place not
far before it, as a drafted one does; it learns what the model's output head reads, and what the model says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.train.spoken import BesideSpoken, SpokenRun
from accel.ir.capture.arch.moa_spec import MoaSpec, MoaSpecConfig
from accel.ir.errors import InputError
from accel.ir.taps import FINAL
from accel.runtime.draft._published import TARGET, moa_taps
from accel.runtime.draft.moa_spec import MoaSpec as MoaSpecDraft

SHORTEST, LONGEST = 6, 14  # tokens that see the same summaries
SAID = 0.1  # what the loss of the tokens weighs beside that of the states
STAIRS = 0.5  # the share of the time in which tokens may not see others of the text but those of their draft
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)


@dataclass
class BesideMoaSpec(BesideSpoken):
    """Layers of the model's own heads, with MLPs of one and a half times their width."""

    @classmethod
    def taps(cls, layers: int) -> tuple[str, ...]:
        return (*moa_taps(layers), FINAL)

    def made(self) -> MoaSpec:
        from transformers import LlamaConfig

        facts, width = self.program.facts, self.stream_width
        kinds = {(one.num_heads, one.num_kv_heads, one.head_dim) for one in facts.layers}
        if len(kinds) != 1:
            raise InputError(
                f"{self.method.key}: layers of this model have keys and values of several sizes, and the head reads "
                "those of all; train another head, such as glide"
            )
        ((heads, self.groups, size),) = kinds
        inner, shared = 2 * self.groups * size, {"rms_norm_eps": 1e-5, "num_hidden_layers": 1}
        self.sizes = LlamaConfig(
            **shared,
            vocab_size=facts.vocab_size,
            hidden_size=width,
            intermediate_size=3 * width // 2,
            num_attention_heads=heads,
            num_key_value_heads=self.groups,
            head_dim=size,
            max_position_embeddings=facts.max_context + 1,
        )
        self.summary = LlamaConfig(
            **shared,
            hidden_size=inner,
            intermediate_size=inner,
            num_attention_heads=2 * self.groups,
            num_key_value_heads=self.groups,
            head_dim=size,
            max_position_embeddings=facts.num_layers,
        )
        taps = moa_taps(facts.num_layers)
        head = MoaSpec(MoaSpecConfig(self.sizes, self.summary, self.groups, taps, self.own_words))
        head.lm_head.weight = self.spoken()
        return head

    def config(self) -> dict[str, Any]:
        facts, size = self.program.facts, self.size
        return {
            "architectures": ["MoaSpecDraft"],
            "model_type": "llama",
            "vocab_size": facts.vocab_size,
            **{n: getattr(self.sizes, n) for n in SIZES},
            "rms_norm_eps": self.sizes.rms_norm_eps * size**2,
            "summary_config": {n: getattr(self.summary, n) for n in SIZES},
            TARGET: {
                "num_hidden_layers": facts.num_layers,
                "num_key_value_heads": self.groups,
                "head_dim": self.sizes.head_dim,
            },
        }


class MoaSpecRun(SpokenRun):
    """Beside a model."""

    drafter = MoaSpecDraft
    pair = BesideMoaSpec
    summands = (
        "embed_norm",
        *(
            f"{layer}.{part}"
            for layer in ("tokens", "summaries")
            for part in ("o_proj", "mlp.down_proj")
        ),
    )

    def drafts(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
        found, says = self.soft.read(ids)
        width = self.soft.stream_width
        read, final = found[..., :-width], found[..., -width:]
        slots = torch.arange(ids.shape[1] - 1)
        begin = begins(len(slots), generator)
        stairs = float(torch.rand((), generator=generator)) < 1 - self.progress / STAIRS
        head = self.soft.head
        features = head.features(
            self.soft.embedded(ids[:, 1:]),
            head.fuse(read[:, :-1]),
            1 + slots[None],
            near_mask(begin, stairs),
            slots < begin[:, None],
        )
        said, right = self.soft.taught(head.lm_head(features), says[:, 1:])
        apart = F.smooth_l1_loss(features * self.soft.size, final[:, 1:])
        return [(apart + SAID * said, right)]


def begins(slots: int, generator: torch.Generator) -> Tensor:
    """Of the tokens 1 .. of slots [T] the first of the draft that each is in: the first token that the model did not
    run.
    """
    found, first = list[int](), 1
    while len(found) < slots:
        size = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        found += [first] * size
        first += size
    return torch.tensor(found[:slots])


def near_mask(begin: Tensor, stairs: bool) -> Tensor:
    """Which tokens of slots see which [T,T]: themselves and those before; with `stairs`, of their own draft alone."""
    token = 1 + torch.arange(len(begin))
    seen = token <= token[:, None]
    return seen & (token >= begin[:, None]) if stairs else seen
