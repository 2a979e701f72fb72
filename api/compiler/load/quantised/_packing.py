"""Codes out of 32-bit words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.ops.quantized import unpack

_CHUNK = 1 << 22  # codes that are unpacked at a time, where they cross words


def words_of(count: int, bits: int) -> int:
    """How many words hold so many codes, one after another."""
    return -(-count * bits // 32)


def from_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Words [R,W] int32 -> codes [R,count] uint8: one after another from the lowest bits on, across words."""
    if 8 % bits == 0:
        return unpack(words.contiguous().view(torch.uint8), bits)[:, :count]
    start = torch.arange(count) * bits
    word, shift = start // 32, start % 32
    rows = max(1, _CHUNK // max(1, count))
    return torch.cat([_across(part, word, shift, bits) for part in words.split(rows)])


def _across(words: Tensor, word: Tensor, shift: Tensor, bits: int) -> Tensor:
    wide = F.pad(words.long() & 0xFFFFFFFF, (0, 1))
    both = wide[:, word] | (wide[:, word + 1] << 32)
    codes: Tensor = (both >> shift) & (2**bits - 1)
    return codes.to(torch.uint8)


def within_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Words [R,W] int32 -> codes [R,count] uint8: as many whole codes as fit into each word."""
    shift = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes: Tensor = (words.unsqueeze(-1) >> shift) & (2**bits - 1)
    return codes.flatten(1)[:, :count].to(torch.uint8)
