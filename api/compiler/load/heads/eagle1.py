"""EAGLE heads (arXiv:2401.15077) in the layout of their authors, and in that of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    output_head,
    size_of,
    target_ids,
    tensors_of,
)
from accel.ir.capture.arch.eagle1 import Eagle1
from accel.ir.errors import CaptureError

_TYPE = "speculators_model_type"
_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
_JOINS, _QUERIES = "fc.weight", "layers.0.self_attn.q_proj.weight"
_OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "t2d")
_OUTPUT_BIAS = "layers.0.self_attn.o_proj.bias"


def _is_head(path: Path, config: Config) -> bool:
    """speculators name it; the authors' has the configuration of a model, and the tensors of a head."""
    if _TYPE in config:
        return bool(config[_TYPE] == "eagle")
    if config.get("num_hidden_layers") != 1 or "draft_vocab_size" in config:
        return False
    names = names_of(path)
    return {_JOINS, _QUERIES} <= names and "norm.weight" not in names


def _layer(config: Config) -> Config:
    inner = config.get("transformer_layer_config")
    return inner if isinstance(inner, Mapping) else config


def _vocabulary(config: Config) -> int:
    return size_of(_layer(config), "vocab_size")


def _width(config: Config) -> int:
    return size_of(_layer(config), "hidden_size")


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head. Raises CaptureError."""
    if config.get("layernorms"):
        raise CaptureError(
            f"{path}: config.json says layernorms, and accel reads heads of EAGLE, EAGLE-2 and HASS, which have none"
        )
    tensors = {_renamed(name): tensor for name, tensor in tensors_of(path).items()}
    for name in _OF_TARGET:
        tensors.pop(name, None)
    drafted, vocabulary = tensors.pop("d2t", None), _vocabulary(config)
    with torch.no_grad():
        head = _module(path, config, tensors, None if drafted is None else len(drafted))
        fill(path, head, tensors, ("stand_ins.", "lm_head."))
        weight, stored = output_head(path, target, vocabulary, _width(config))
        if drafted is None:
            head.lm_head.weight = weight
            return Loaded(head.float().eval(), {weight: stored})
        ids = target_ids(path, drafted, len(drafted), vocabulary)
        head.words.set_ids(ids)
        head.lm_head.weight = nn.Parameter(stored.read()[ids])
    return Loaded(head.float().eval(), {})


def _module(path: Path, config: Config, tensors: Mapping[str, Tensor], count: int | None) -> Eagle1:
    told = _layer(config)
    if _QUERIES.replace("weight", "bias") in tensors:
        told = {**told, "attention_bias": True}
    head = Eagle1(layer_config(path, told), _JOINS.replace("weight", "bias") in tensors, count)
    if _OUTPUT_BIAS not in tensors:
        attention: Any = head.layers[0].self_attn
        attention.o_proj.bias = None
    return head


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return next(
        (own + name.removeprefix(p) for p, own in _NAMES.items() if name.startswith(p)), name
    )


EAGLE1 = HeadFormat("eagle1", _is_head, _vocabulary, _width, _load, unscaled=True)
