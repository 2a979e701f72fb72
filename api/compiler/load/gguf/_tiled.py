"""Qwen3.5's layers of gated delta rules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._delta import Delta
from accel.compiler.load.gguf._file import GgufTensor
from accel.ir.weights import Stored

TILED = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}  # fmt: skip


@dataclass(frozen=True)
class Tiled(Delta):
    """A file has the heads of values in another order than the model: the first of each head of keys, then the
    second of each, and so on.
    """

    def config(self) -> dict[str, Any]:
        config = super().config()
        sections = self.metadata.sections("rope.dimension_sections")
        rope = {"mrope_section": sections, "mrope_interleaved": True}
        return {**config, "rope_parameters": {**config["rope_parameters"], **rope}}

    def weight(self, kind: str, name: str, tensor: GgufTensor) -> Stored:
        own, metadata = super().weight(kind, name, tensor), self.metadata
        keys, values = self.heads()
        width = metadata.count("ssm.inner_size") // values
        before = 2 * keys * metadata.count("ssm.state_size")  # rows of queries and keys
        sizes = {"attn_qkv": width, "attn_gate": width, "ssm_conv1d": width, "ssm_out": width}
        sizes |= {"ssm_beta": 1, "ssm_alpha": 1, "ssm_dt.bias": 1, "ssm_a": 1}
        if keys == values or kind not in sizes:
            return own
        order = _grouped(keys, values, sizes[kind])
        if kind in ("attn_qkv", "ssm_conv1d"):
            order = torch.cat([torch.arange(before), order + before])
        axis = 1 if kind == "ssm_out" else 0
        if tensor.shape[axis] != len(order):
            raise metadata.wrong(
                f"{name} is {list(tensor.shape)}, not {len(order)} along its axis {axis}"
            )
        if len(tensor.shape) == 2 and kind != "ssm_conv1d":
            rows = {"columns" if axis else "rows": order}
            return stored(name, tensor, metadata.file.pages, **rows)
        return own.changed(partial(_in_order, order))


def _grouped(keys: int, values: int, width: int) -> Tensor:
    """Where a file has what the model has here: heads of `width` numbers, `values / keys` of each head of keys."""
    return torch.arange(values * width).view(values // keys, keys, width).transpose(0, 1).flatten()


def _in_order(order: Tensor, value: Tensor) -> Tensor:
    return value[order.to(value.device)]
