"""Dovetail's heads (arXiv:2412.18934) in the layout of their authors: `config.json` is that of a model of so many
layers; tensors are the layers' own, of which the first has no norm before its attention, and those of the gated fusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import (
    Config,
    HeadFormat,
    Target,
    fill,
    layer_config,
    names_of,
    number,
    output_head,
    size_of,
    target_ids,
    tensors_of,
)
from accel.ir.capture.arch.dovetail import Dovetail

PRODUCTS = {"W_1": "fusion.w1.weight", "W_2": "fusion.w2.weight", "W_z": "fusion.wz.weight"}
NORM = {"input_layernorm.weight": "fusion.norm.weight"}
_OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "t2d")


def published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's tensors by the authors' names; products are stored as [in,out]."""
    names = {own: name for name, own in (PRODUCTS | NORM).items()}
    return {names.get(n, n): t.T if names.get(n) in PRODUCTS else t for n, t in tensors.items()}


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way round."""
    names = PRODUCTS | NORM
    return {names.get(n, n): t.T if n in PRODUCTS else t for n, t in tensors.items()}


def _is_head(path: Path, config: Config) -> bool:
    return "vocab_size" in config and names_of(path) >= PRODUCTS.keys()


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "hidden_size")


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head. Raises CaptureError."""
    layers, tensors = layer_config(path, config), tensors_of(path)
    layers.num_hidden_layers = number(path, config, "num_hidden_layers")
    for name in _OF_TARGET:
        tensors.pop(name, None)
    drafted, vocabulary = tensors.pop("d2t", None), layers.vocab_size
    with torch.no_grad():
        head = Dovetail(layers, None if drafted is None else len(drafted))
        fill(path, head, _own(tensors), ("stand_ins.", "lm_head."))
        weight, stored = output_head(path, target, vocabulary, layers.hidden_size)
        if drafted is None:
            head.lm_head.weight = weight
            return Loaded(head.float().eval(), {weight: stored})
        ids = target_ids(path, drafted, len(drafted), vocabulary)
        head.words.set_ids(ids)
        head.lm_head.weight = nn.Parameter(stored.read()[ids])
    return Loaded(head.float().eval(), {})


DOVETAIL = HeadFormat("dovetail", _is_head, _vocabulary, _width, _load, unscaled=True)
