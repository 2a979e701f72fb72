"""Mamba-2 as llama.cpp's files have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.compiler.load.gguf._metadata import Metadata
from accel.ir.weights import Change, Stored

MAMBA = {
    "ssm_in": "mamba.in_proj", "ssm_out": "mamba.out_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm",
    "ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias",
}  # fmt: skip


def mamba(metadata: Metadata, hidden: int) -> dict[str, Any]:
    """The part of a configuration that says how wide its states are."""
    inner, heads = metadata.count("ssm.inner_size"), metadata.count("ssm.time_step_rank")
    if inner % heads or inner % hidden:
        raise metadata.wrong(f"ssm.inner_size is {inner} for {heads} heads and {hidden} columns")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": metadata.count("ssm.group_count", 1),
        "mamba_d_state": metadata.count("ssm.state_size"),
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": metadata.holds("ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.holds("ssm_in.bias"),
    }


def mamba_weight(kind: str, weight: Stored) -> Stored:
    """A weight of such a layer as transformers has it: a file has -exp of A_log, and other axes."""
    changes: dict[str, Change] = {
        "ssm_a": log_decay,
        "ssm_d": torch.flatten,
        "ssm_norm": torch.flatten,
    }
    if kind in changes:
        return weight.changed(changes[kind])
    return weight.changed(between) if kind == "ssm_conv1d" and weight.blank.dim() == 2 else weight


def log_decay(value: Tensor) -> Tensor:
    """-exp(A_log), of any shape -> A_log [n]."""
    return (-value).log().flatten()


def between(value: Tensor) -> Tensor:
    """The weights [C,K] of a convolution of each channel -> [C,1,K]."""
    return value.unsqueeze(1)
