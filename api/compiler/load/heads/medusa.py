"""Medusa heads (arXiv:2401.10774) in the layout of their authors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import (
    Config,
    HeadFormat,
    Target,
    fill,
    number,
    output_head,
    size_of,
    target_ids,
    tensors_of,
)
from accel.ir.capture.arch.medusa import Medusa
from accel.ir.errors import CaptureError

_HEADS, _BLOCKS = "medusa_num_heads", "medusa_num_layers"
_TENSOR = re.compile(r"^(\d+)\.(\d+)\.(?:linear\.)?(?:weight|bias)$")  # head, part


def _is_head(path: Path, config: Config) -> bool:
    return _HEADS in config


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "hidden_size")


def _count(tensors: Mapping[str, Tensor]) -> int:
    """Heads of a file: published config.json files say fewer than there are."""
    return 1 + max((int(m[1]) for name in tensors if (m := _TENSOR.match(name))), default=-1)


def _missing(path: Path, config: Config) -> Config:
    """Sizes, which the authors' config.json lacks."""
    if "hidden_size" in config and "vocab_size" in config:
        return {}
    words = tensors_of(path).get(f"0.{size_of(config, _BLOCKS)}.weight")
    if words is None or words.dim() != 2:
        raise CaptureError(
            f"{path} lacks 0.{size_of(config, _BLOCKS)}.weight, by which its first head says its tokens, and its "
            "config.json says no vocab_size and hidden_size; fetch the head again"
        )
    return {"vocab_size": len(words), "hidden_size": words.shape[1]}


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The heads; where they have no words of their own, with the target's output head. Raises CaptureError."""
    width, vocabulary = number(path, config, "hidden_size"), number(path, config, "vocab_size")
    told, blocks = number(path, config, _HEADS), number(path, config, _BLOCKS, 0)
    tensors = dict(tensors_of(path))
    drafted, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    heads = max(told, _count(tensors))
    words = [f"{i}.{blocks}.weight" for i in range(heads)]
    own = any(name in tensors for name in words)
    with torch.no_grad():
        size = None if drafted is None else len(drafted)
        head = Medusa(vocabulary, width, heads, blocks, size)
        if drafted is not None:
            head.words.set_ids(target_ids(path, drafted, len(drafted), vocabulary))
        fill(path, head.heads, tensors, () if own else tuple(words))
    if own:
        return Loaded(head.eval(), {})
    weight, stored = output_head(path, target, vocabulary, width)
    head.set_words(weight)
    return Loaded(head.eval(), {weight: stored})


MEDUSA = HeadFormat("medusa", _is_head, _vocabulary, _width, _load, missing=_missing)
