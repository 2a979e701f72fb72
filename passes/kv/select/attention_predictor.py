"""AttentionPredictor (arXiv:2502.04077): a convolution foretells the next attention from that of the last tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.ir.errors import PassError
from accel.ir.tables import Observed, Rows
from accel.passes.kv.select import LEAST
from accel.passes.kv.select._history import Histories
from accel.passes.trained import ALL, Parts

_CHANNELS = 16, 32
_STRIDE = 37  # tokens between those of neighbouring layers that a step of training is about


@dataclass(frozen=True)
class AttentionPredictor(Histories):
    """Attend to the blocks that a convolution over the history of attention foretells. One for all layers and heads:
    two of 3×3 over tokens and blocks (1 to 16 to 32 channels) with ReLU, a mean over the tokens, one number of each
    block's 32. It is trained to give the next token's attention (mean squared error) on what the model
    attends to in a text; the paper leaves its loss open, and foretells while the token before is computed.

    It takes H · 64 · N · 4752 products a token and layer for N blocks. Blocks that do not lie between `sinks` and
    `window` are padding of both convolutions.
    """

    lacks = "prediction while the token before is computed"
    key: ClassVar[str] = "attention-predictor"
    small: ClassVar[Mapping[str, Any]] = {
        "tokens_read": 12, "block": 2, "sinks": 2, "window": 3, "history": 8, "every": 3,
        "dense_layers": 0,
    }  # fmt: skip

    def shared(self, width: int) -> dict[str, tuple[int, ...]]:
        few, many = _CHANNELS
        return {
            "one": (few, 1, 3, 3), "one_bias": (few,), "two": (many, few, 3, 3), "two_bias": (many,),
            "out": (1, many), "out_bias": (1,),
        }  # fmt: skip

    def sizes(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {}

    def foretell(self, image: Tensor, inside: Tensor, shared: Mapping[str, Tensor]) -> Tensor:
        there = inside[
            :, None, None
        ]  # [M,1,1,N]: what lies elsewhere is padding, between the layers, too
        x = F.conv2d(image[:, None], shared["one"], shared["one_bias"], padding=1).relu()
        x = F.conv2d(x.masked_fill(~there, 0.0), shared["two"], shared["two_bias"], padding=1)
        mean = x.relu().mean(2).transpose(1, 2)  # [M,N,32]
        return F.linear(mean, shared["out"], shared["out_bias"]).squeeze(2)

    # Training (api/compiler/train)

    def start(self, rows: Rows, inner: int, generator: torch.Generator) -> Parts:
        """`inner` is not used: the paper says all widths."""
        made = {}
        for name, size in self.shared(0).items():
            fan = max(1, torch.Size(size[1:]).numel())
            bias = name.endswith("bias")
            made[name] = (
                torch.zeros(size)
                if bias
                else torch.randn(*size, generator=generator) * (2 / fan) ** 0.5
            )
        return {ALL: made}

    def loss(self, parts: Parts, rows: Rows, progress: float) -> Tensor:
        """The mean squared error for some tokens of each row, of blocks between their sinks and window."""
        wrong = []
        drawn = int(rows.tokens.sum())  # which token of a layer: others in each row of a text
        for layer, told in rows.layers.items():
            if layer >= self.dense_layers:
                image, inside, wanted = self.example(told, drawn + layer * _STRIDE)
                found = self.foretell(image, inside, parts[ALL])
                wrong.append((found - wanted)[inside].square().mean())
        return torch.stack(wrong).mean()

    def example(self, observed: Observed, drawn: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of one token of rows: the history [M,history,N], which blocks lie between (bool [M,N]), and what the token
        gives to these [M,N]; M = B H. `drawn` is which, modulo those that have a history. Raises PassError where rows
        are too short.
        """
        tokens = observed.keys.shape[2]
        first = max(self.history, self.sinks + self.window + LEAST * self.block)
        if tokens <= first:
            raise PassError(
                f"{self.key}: rows of {tokens} tokens have no history; give --length {first + 1} or more"
            )
        token = first + drawn % (tokens - first)
        seen = self.noted(observed, token - self.history, token + 1)
        inside = self.between(torch.tensor([[token]]), torch.arange(seen.shape[3]))[0]  # [1,N]
        image = (seen[:, :, :-1] * inside).flatten(0, 1)
        return image, inside.expand(len(image), -1), seen[:, :, -1].flatten(0, 1)

    def noted(self, observed: Observed, start: int, stop: int) -> Tensor:
        """What tokens start..stop-1 of rows give to blocks between their sinks and window [B,H,stop-start,N]."""
        tokens, at, places = observed.keys.shape[2], observed.positions, torch.arange(start, stop)
        asked = observed.queries[:, :, start:stop], at[:, start:stop], observed.keys, at[:, None]
        share = observed.form.weights(*asked).flatten(1, 2)
        share = F.pad(share, (0, -tokens % self.block)).unflatten(3, (-1, self.block)).amax(4)
        kept: Tensor = share * self.between(places[None], torch.arange(share.shape[3]))
        return kept
