"""MCTP modules (VITA-Audio, arXiv:2505.03739): a cascade of decoder layers, each of which says one token more."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from accel.ir.capture.arch.features import StandIns
from accel.ir.draft_head import DraftHead
from accel.ir.ops.rows import given_rows
from accel.ir.taps import FINAL


class Mctp(nn.Module):
    """tokens [B,T], positions [B,T] -> logits [B,T,V]: `count` modules, each over the embedding of a token and the
    state of the module before, of which the first has what the target's output head read. Slot t of module m is of
    token t + m + 1, whose place turns it; a call runs one of the modules (`DraftHead.cascade`), and so they are given
    one token here, whichever runs.

    layer: the configuration of a module's decoder layer, of transformers. The norm behind them is one for all, that of
    the target.
    """

    def __init__(self, layer: Any, count: int):
        super().__init__()
        from transformers import AutoModel

        width = layer.hidden_size
        self.draft_head = DraftHead(
            "mctp", (FINAL,), width, width, width, fused=False, cascade=count
        )
        inner = AutoModel.from_config(layer)
        self.layers = nn.ModuleList(deepcopy(inner.layers[0]) for _ in range(count))
        self.norm, self.rotary = inner.norm, inner.rotary_emb
        self.embed_norms = nn.ModuleList(deepcopy(inner.norm) for _ in range(count))
        self.hidden_norms = nn.ModuleList(deepcopy(inner.norm) for _ in range(count))
        self.projs = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(count))
        self.stand_ins = StandIns(self.draft_head, width)
        self.lm_head = nn.Linear(width, layer.vocab_size, bias=False, device="meta")

    def stated(self, m: int, e: Tensor, h: Tensor, positions: Tensor) -> Tensor:
        """The states of module m, of embeddings and the states before it [B,T,W]."""
        x = self.projs[m](torch.cat([self.embed_norms[m](e), self.hidden_norms[m](h)], dim=-1))
        turns = self.rotary(x, positions + (m + 1))
        y = self.layers[m](x, attention_mask=None, position_embeddings=turns)
        normed: Tensor = self.norm(y)
        return normed

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        e, h = self.stand_ins(tokens)
        h = self._between(h)
        for m in range(len(self.layers)):
            h = self._between(self.stated(m, e, h, positions))
        logits: Tensor = self.lm_head(h)
        return logits

    def _between(self, h: Tensor) -> Tensor:
        """The same, where one module ends (`accel.passes.state.layers`)."""
        found: Tensor = given_rows.default(h, h, self.stand_ins.no_mask)
        return found
