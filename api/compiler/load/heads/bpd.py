"""Heads of blockwise parallel decoding (arXiv:1811.03115), of which none is published: in a layout of accel's own, as
`accel-compile train bpd` writes it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import (
    Config,
    HeadFormat,
    Target,
    fill,
    number,
    size_of,
    target_ids,
    tensors_of,
)
from accel.ir.capture.arch.bpd import Bpd

_HEADS, _INNER = "bpd_num_heads", "bpd_inner_size"


def _is_head(path: Path, config: Config) -> bool:
    return _HEADS in config


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "hidden_size")


def _load(path: Path, config: Config, target: Target) -> Loaded:
    width, vocabulary = number(path, config, "hidden_size"), number(path, config, "vocab_size")
    heads, inner = number(path, config, _HEADS), number(path, config, _INNER)
    tensors = dict(tensors_of(path))
    drafted = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    with torch.no_grad():
        size = None if drafted is None else len(drafted)
        head = Bpd(vocabulary, width, heads, inner, size)
        if drafted is not None:
            head.words.set_ids(target_ids(path, drafted, len(drafted), vocabulary))
        fill(path, head, tensors, ("stand_ins.",))
    return Loaded(head.eval(), {})


BPD = HeadFormat("bpd", _is_head, _vocabulary, _width, _load)
