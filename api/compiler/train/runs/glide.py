"""Training of GliDe's head (arXiv:2402.02082): under a block mask, by which a token sees the target's keys and values
of earlier blocks alone, as a drafted one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.compiler.train.heads import Beside, HeadsRun
from accel.ir.capture.arch.glide import Glide, GlideConfig
from accel.ir.errors import InputError
from accel.ir.facts import LayerFacts
from accel.ir.ops.rope import rope
from accel.ir.region import Region, layer_calls
from accel.runtime.draft._published import TARGET, glide_taps
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
class BesideGlide(Beside):
    """One layer of the model's own sizes."""

    @classmethod
    def taps(cls, layers: int) -> tuple[str, ...]:
        return glide_taps({}, layers)

    @property
    def attends(self) -> LayerFacts:
        """The model's last layer."""
        return self.program.facts.layers[-1]

    def made(self) -> Glide:
        from transformers import LlamaConfig

        facts, last = self.program.facts, self.attends
        config = facts.config.get("text_config") or facts.config
        width = int(self.embedded(torch.zeros(1, 1, dtype=torch.int64)).shape[2])
        sizes = {
            "num_attention_heads": last.num_heads,
            "num_key_value_heads": last.num_kv_heads,
            "head_dim": last.head_dim,
            "max_position_embeddings": facts.max_context + 1,
        }
        turned = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
        self.heads = LlamaConfig(
            **sizes, hidden_size=width, num_hidden_layers=facts.num_layers, rope_parameters=turned
        )
        self.layers = LlamaConfig(
            **sizes,
            vocab_size=facts.vocab_size,
            hidden_size=width,
            intermediate_size=config.get("intermediate_size") or 2 * width,
            num_hidden_layers=1,
            rms_norm_eps=1e-5,
        )
        some = None if self.ids is None else len(self.ids)
        head = Glide(GlideConfig(self.layers, self.heads, self.taps(facts.num_layers), some))
        self._check_turns(head)
        with torch.no_grad():
            words = self.output_head  # of which logits are of size 1 behind a norm
            head.lm_head.weight.copy_(words / words.std() / width**0.5)
        return head

    def _check_turns(self, head: Glide) -> None:
        """Raise InputError where the model's last layer does not turn its keys as the head turns its queries."""
        region = layer_calls(self.program.step.graph)[-1].target
        assert isinstance(region, Region)
        sites = region.graph.find_nodes(op="call_function", target=rope.default)
        places = torch.arange(min(64, self.program.facts.max_context))[None]
        cos, sin = head.target_rotary(torch.zeros(1), places)
        mine = [t[0, :, : t.shape[2] // 2] for t in (cos, sin)]
        if sites and all(self._turns(node, mine) for node in sites):
            return
        raise InputError(
            f"{self.method.key}: the last layer of this model does not turn its keys as Llama does, and the head reads "
            "them as they are; train another head, such as eagle3"
        )

    def _turns(self, node: fx.Node, mine: list[Tensor]) -> bool:
        """Whether a turn is by these tables [P,D/2], each half of the channels with the other."""
        *tables, interleaved = node.args[2:]
        theirs = [self.program.params[str(t.target)][: len(mine[0])] for t in tables]  # type: ignore[union-attr]
        return not interleaved and all(
            a.shape == b.shape and torch.allclose(a, b.float(), atol=1e-4)
            for a, b in zip(mine, theirs, strict=True)
        )

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

    def drafts(self, ids: Tensor) -> list[tuple[Tensor, float]]:
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
