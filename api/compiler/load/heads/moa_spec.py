"""Heads of Mixture of Attentions (arXiv:2410.03804) in a layout of accel's own.

`config.json` is that of the two layers over tokens, as transformers' Llama has it, `vocab_size` and `hidden_size` those
of the target. `summary_config` is that of the layer over layers, and `target_config` says of the target
`num_hidden_layers`, `num_key_value_heads` and `head_dim`. Tensors have the names of `accel.ir.capture.arch.moa_spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
from accel.ir.capture.arch.moa_spec import MoaSpec, MoaSpecConfig
from accel.ir.errors import CaptureError
from accel.runtime.draft._published import TARGET, moa_taps

SUMMARY = "summary_config"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_LAYER = (*_SIZES, "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act")


def _is_head(path: Path, config: Config) -> bool:
    return config.get("architectures") == ["MoaSpecDraft"]


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "hidden_size")


def _layer(path: Path, config: Config, **more: int) -> Any:
    """Sizes as transformers has them. Raises CaptureError."""
    from transformers import LlamaConfig

    for name in _SIZES:
        number(path, config, name)
    try:
        return LlamaConfig(**{n: config[n] for n in _LAYER if n in config}, **more)
    except Exception as error:  # transformers raises many kinds
        raise CaptureError(
            f"{path}: transformers makes no layer of this config.json: {type(error).__name__}: {error}"
        ) from error


def _part(config: Config, name: str) -> Config:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head. Raises CaptureError."""
    inner, vocabulary = _part(config, TARGET), number(path, config, "vocab_size")
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    layers, groups, size = (number(path, inner, name) for name in names)
    layer, summary = (
        _layer(path, config, vocab_size=vocabulary),
        _layer(path, _part(config, SUMMARY)),
    )
    if list(target.caches) != [(groups, size)] * layers:
        raise CaptureError(
            f"{path}: the head reads keys and values of {layers} layers, each of {groups} heads of {size} numbers, and "
            f"its target has {target.layers} layers, of {sorted(set(target.caches))}; give a head that was trained for "
            "this model"
        )
    if summary.hidden_size != 2 * groups * size:
        raise CaptureError(
            f"{path}: the layer over layers is {summary.hidden_size} wide, and keys and values of a token are "
            f"{2 * groups * size} numbers; fetch the head again"
        )
    tensors = dict(tensors_of(path))
    drafted, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    count = None if drafted is None else len(drafted)
    with torch.no_grad():
        head = MoaSpec(MoaSpecConfig(layer, summary, groups, moa_taps(layers), count))
        fill(path, head, tensors, ("stand_ins.", "lm_head."))
        weight, stored = output_head(path, target, vocabulary, layer.hidden_size)
        if drafted is None:
            head.lm_head.weight = weight
            return Loaded(head.float().eval(), {weight: stored})
        ids = target_ids(path, drafted, len(drafted), vocabulary)
        head.words.set_ids(ids)
        head.lm_head.weight = nn.Parameter(stored.read()[ids])
    return Loaded(head.float().eval(), {})


MOA_SPEC = HeadFormat("moa-spec", _is_head, _vocabulary, _width, _load)
