"""What the encoder of an encoder-decoder model takes."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Positive


@dataclass(frozen=True)
class EncoderFacts:
    """What the encoder of an encoder-decoder model takes, and the tokens that its decoder starts from."""

    vocab_size: int  # of token ids [B,X]; 0: it takes features
    max_length: Positive  # longest X
    features: tuple[int, ...] = ()  # sizes of one row's features, after B
    start: tuple[int, ...] = ()
