"""A shallow decoder behind a whole encoder (arXiv:2503.05931): delete half of the decoder's layers."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.axis import option
from accel.passes.depth.shortgpt import ShortGPT


@dataclass(frozen=True)
class CanaryDepth(ShortGPT):
    """Of an encoder-decoder, deletes the fraction `share` of the decoder's layers with the lowest block influence, with
    weights, caches and the keys of their cross-attention. The decoder runs once a token, the encoder once in all. Of a
    model without an encoder it deletes what `shortgpt` does.
    """

    share: float = option(0.5, least=0, below=1)
    lacks = "training with the layers moved to the encoder"
