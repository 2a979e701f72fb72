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

from accel.compiler.load.quantised import Base, Weight, modules, needed, sized, typed
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
        needed(module, state, parts, "weight", "weight.absmax", "weight.quant_map")
        told = _state(f"{module}.{state}", parts[state])
        _check_four(module, parts, told)
        make = partial(_four_bits, parts, told)
        used = [f"{module}.{part}" for part in parts if part != "bias"]
        return Weight(f"{module}.weight", Made.of_shape(told["shape"], make, self.pages), used)

    def _eight(self, module: str, parts: Mapping[str, Tensor]) -> Weight:
        needed(module, "SCB", parts, "weight")
        weight = parts["weight"]
        typed(f"{module}.weight", weight, 2, torch.int8)
        rows, columns = weight.shape
        sized(f"{module}.SCB", parts["SCB"], rows)
        read = partial(_eight_bits, weight, parts["SCB"])
        stored = Coded.of_shape((rows, columns), read, (8, columns), self.pages)
        used = [f"{module}.{part}" for part in parts if part != "bias"]
        return Weight(f"{module}.weight", stored, used)


def _state(name: str, text: Tensor) -> dict[str, Any]:
    """What a weight's `quant_state` says. Raises CaptureError."""
    typed(name, text, 1, torch.uint8)
    try:
        told = json.loads(bytes(text.tolist()))
        sizes = [told["blocksize"], *told["shape"], told.get("nested_blocksize", 1)]
        float(told.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CaptureError(
            f"{name} is not what bitsandbytes writes ({type(error).__name__}: {error}): fetch the checkpoint again"
        ) from error
    if not all(type(size) is int and size > 0 for size in sizes):
        raise CaptureError(
            f"{name} has blocksize {told['blocksize']!r} and shape {told['shape']!r}: fetch the checkpoint again"
        )
    return dict(told)


def _check_four(module: str, parts: Mapping[str, Tensor], quant_state: Mapping[str, Any]) -> None:
    """Raise CaptureError where the tensors of a weight in 4 bits do not go together."""
    count, weight = torch.Size(quant_state["shape"]).numel(), parts["weight"]
    if not 0 <= weight.nbytes - -(-count // 2) < weight.itemsize:
        raise CaptureError(
            f"{module}.weight has {weight.nbytes} bytes, which do not hold {quant_state['shape']} codes of 4 bits: "
            "checkpoint and configuration do not match"
        )
    blocks = -(-count // quant_state["blocksize"])
    sized(f"{module}.weight.quant_map", parts["weight.quant_map"], 16)
    sized(f"{module}.weight.absmax", parts["weight.absmax"], blocks)
    if "weight.nested_absmax" in parts:
        needed(module, "weight.nested_absmax", parts, "weight.nested_quant_map")
        if not {"nested_blocksize", "nested_offset"} <= quant_state.keys():
            raise CaptureError(
                f"{module}.weight.nested_absmax is there, and its quant_state has no nested_blocksize and "
                "nested_offset: fetch the checkpoint again"
            )
        outer = -(-blocks // quant_state["nested_blocksize"])
        typed(f"{module}.weight.absmax", parts["weight.absmax"], 1, torch.uint8)
        sized(f"{module}.weight.nested_absmax", parts["weight.nested_absmax"], outer)
        sized(f"{module}.weight.nested_quant_map", parts["weight.nested_quant_map"], 256)


def _four_bits(parts: Mapping[str, Tensor], quant_state: Mapping[str, Any]) -> Tensor:
    packed = parts["weight"].contiguous().flatten().view(torch.uint8)
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten()
    count, size = torch.Size(quant_state["shape"]).numel(), int(quant_state["blocksize"])
    scales = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        table, outer = parts["weight.nested_quant_map"], parts["weight.nested_absmax"]
        scales = _blocks(table[scales.long()], outer, int(quant_state["nested_blocksize"]))
        scales = scales + float(quant_state["nested_offset"])
    value = parts["weight.quant_map"].float()[codes[:count].long()]
    return _blocks(value, scales, size).view(quant_state["shape"])


def _blocks(value: Tensor, scales: Tensor, size: int) -> Tensor:
    """Numbers [n], of which each `size` share a scale."""
    wide = F.pad(value, (0, -len(value) % size)).view(-1, size) * scales.float().unsqueeze(1)
    return wide.flatten()[: len(value)]


def _eight_bits(weight: Tensor, largest: Tensor) -> Codes:
    q = (weight.short() + 128).to(torch.uint8)
    scales = (largest.float() / 127).unsqueeze(1)
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    return Codes(q, scales, zeros, 8, weight.shape[1])
