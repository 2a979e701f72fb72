"""Heads of GliDe (arXiv:2402.02082) in a layout of accel's own.

`config.json` is that of the decoder's layers, as transformers' Llama has it. `vocab_size` is the target's, and
`target_config` says of its attention `hidden_size`, `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`,
`head_dim` and `rope_parameters`. Tensors have the names of a Llama's, and `layers.<i>.cross_attn.{q_proj,o_proj}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from accel.ir.capture.arch.glide import Glide, GlideConfig
from accel.ir.errors import CaptureError
from accel.runtime.draft._published import TARGET, glide_taps

_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_LEFT = ("model_type", "architectures", TARGET)


def _is_head(path: Path, config: Config) -> bool:
    return TARGET in config and config.get("architectures") == ["GlideDraft"]


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _inner(config: Config) -> Config:
    found = config.get(TARGET)
    return found if isinstance(found, Mapping) else {}


def _width(config: Config) -> int:
    return size_of(_inner(config), "hidden_size")


def _llama(path: Path, config: Config) -> Any:
    """Sizes as transformers has them. Raises CaptureError."""
    from transformers import LlamaConfig

    try:
        return LlamaConfig(**{n: v for n, v in config.items() if n not in _LEFT})
    except Exception as error:  # transformers raises many kinds
        raise CaptureError(
            f"{path}: transformers makes no layers of this config.json: {type(error).__name__}: {error}"
        ) from error


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """Raises CaptureError."""
    inner = _inner(config)
    for name in (*_SIZES, "intermediate_size", "vocab_size", "num_hidden_layers"):
        number(path, config, name)
    for name in (*_SIZES, "num_hidden_layers"):
        number(path, inner, name)
    count, layers = config["num_hidden_layers"], inner["num_hidden_layers"]
    read = [(inner["num_key_value_heads"], inner["head_dim"])] * count
    if target.layers != layers or list(target.caches[-count:]) != read:
        raise CaptureError(
            f"{path}: the head reads keys and values of {count} of {layers} layers, each of {read[0][0]} heads of "
            f"{read[0][1]} numbers, and its target has {target.layers} layers, the last of which "
            f"{list(target.caches[-count:])}; give a head that was trained for this model"
        )
    tensors = dict(tensors_of(path))
    drafted, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    heads = _llama(path, inner)
    with torch.no_grad():
        head = Glide(
            GlideConfig(
                _llama(path, config),
                heads,
                glide_taps(config, layers),
                None if drafted is None else len(drafted),
                "embed_tokens.weight" in tensors,
            )
        )
        if drafted is not None:
            head.words.set_ids(target_ids(path, drafted, len(drafted), config["vocab_size"]))
        fill(path, head, tensors, ("stand_ins.",))
    return Loaded(head.float().eval(), {})


GLIDE = HeadFormat("glide", _is_head, _vocabulary, _width, _load)
