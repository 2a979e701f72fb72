"""bitsandbytes: 4 bits (QLoRA, arXiv:2305.14314) and 8 bits (LLM.int8, arXiv:2208.07339).

4 bits: `weight` holds the flat weight, two codes in a byte, the first in the high half; a code is an index into
`quant_map`, and absmax scales a block. absmax may be quantised itself, by `nested_absmax` and an offset.
8 bits: `weight` [N,K] int8 and SCB [N], the largest value of each row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.compiler.load.quantised import Base, Weight, modules, sized
from accel.ir.codes import Coded, Codes, Made
from accel.ir.errors import CaptureError

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


@dataclass
class Bitsandbytes(Base):
    """nf4 and fp4 are computed in float32, since no integer codes equal them; int8 is kept."""

    def weights(self, tensors: Mapping[str, Tensor]) -> Iterator[Weight]:
        for state in _STATES:
            for module, parts in modules(tensors, state):
                yield self._four(module, parts, state)
        for module, parts in modules(tensors, "SCB"):
            yield self._eight(module, parts)

    def _four(self, module: str, parts: Mapping[str, Tensor], state: str) -> Weight:
        told = json.loads(bytes(parts[state].tolist()))
        missing = [
            part for part in ("weight", "weight.absmax", "weight.quant_map") if part not in parts
        ]
        if missing:
            raise CaptureError(f"{module} has no {missing[0]}: fetch the checkpoint again")
        make = partial(_four_bits, parts, told)
        used = [f"{module}.{part}" for part in parts if part != "bias"]
        return Weight(f"{module}.weight", Made.of_shape(told["shape"], make, self.pages), used)

    def _eight(self, module: str, parts: Mapping[str, Tensor]) -> Weight:
        weight = parts["weight"]
        rows, columns = weight.shape
        sized(f"{module}.SCB", parts["SCB"], rows)
        read = partial(_eight_bits, weight, parts["SCB"])
        stored = Coded.of_shape((rows, columns), read, (8, columns), self.pages)
        used = [f"{module}.{part}" for part in parts if part != "bias"]
        return Weight(f"{module}.weight", stored, used)


def _four_bits(parts: Mapping[str, Tensor], told: Mapping[str, Any]) -> Tensor:
    packed = parts["weight"].contiguous().flatten().view(torch.uint8)
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten()
    count, size = torch.Size(told["shape"]).numel(), int(told["blocksize"])
    scales = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        table, outer = parts["weight.nested_quant_map"], parts["weight.nested_absmax"]
        scales = _blocks(table[scales.long()], outer, int(told["nested_blocksize"]))
        scales = scales + float(told["nested_offset"])
    value = parts["weight.quant_map"].float()[codes[:count].long()]
    return _blocks(value, scales, size).view(told["shape"])


def _blocks(value: Tensor, scales: Tensor, size: int) -> Tensor:
    """Numbers [n], of which each `size` share a scale."""
    wide = F.pad(value, (0, -len(value) % size)).view(-1, size) * scales.float().unsqueeze(1)
    return wide.flatten()[: len(value)]


def _eight_bits(weight: Tensor, largest: Tensor) -> Codes:
    q = (weight.short() + 128).to(torch.uint8)
    scales = (largest.float() / 127).unsqueeze(1)
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    return Codes(q, scales, zeros, 8, weight.shape[1])
