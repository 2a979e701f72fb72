"""Heads of LongSpec (arXiv:2502.17421) in the layout of their authors: `config.json` is that of the target, with the
class of the layer as `architectures`; tensors are the layer's own. `window` and
`embed_norm.weight`, where there are such, are accel's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import (
    Config,
    HeadFormat,
    Target,
    class_names,
    fill,
    number,
    output_head,
    size_of,
    tensors_of,
)
from accel.ir.capture.arch.longspec import Longspec, LongspecConfig
from accel.ir.errors import CaptureError
from accel.runtime.draft._published import glide_taps

WINDOW = 512
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_LAYER = (*_SIZES, "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act")
_TURNS = ("rope_parameters", "rope_theta", "rope_scaling")
# its attention to the target has the shape of the other, and uses no keys and values of its own
_UNUSED = tuple(f"cross_attn.{n}_proj.{part}" for n in "kv" for part in ("weight", "bias"))


def _is_head(path: Path, config: Config) -> bool:
    return any(name.endswith("GlideDecoderLayer") for name in class_names(config))


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "hidden_size")


def _layer(path: Path, config: Config) -> Any:
    """Sizes as transformers has them. Raises CaptureError."""
    from transformers import LlamaConfig

    for name in (*_SIZES, "vocab_size", "num_hidden_layers"):
        number(path, config, name)
    said = {n: config[n] for n in (*_LAYER, *_TURNS) if n in config}
    size = config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim") is not None:
        size = number(path, config, "head_dim")
    try:
        return LlamaConfig(**said, head_dim=size, num_hidden_layers=1)
    except Exception as error:  # transformers raises many kinds
        raise CaptureError(
            f"{path}: transformers makes no layer of this config.json: {type(error).__name__}: {error}"
        ) from error


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head. Raises CaptureError."""
    layer, layers = _layer(path, config), config["num_hidden_layers"]
    window = number(path, config, "window") if "window" in config else WINDOW
    read = layer.num_key_value_heads, layer.head_dim
    if target.layers != layers or list(target.caches[-1:]) != [read]:
        raise CaptureError(
            f"{path}: the head reads keys and values of the last of {layers} layers, of {read[0]} heads of {read[1]} "
            f"numbers, and its target has {target.layers} layers, the last of which {list(target.caches[-1:])}; give a "
            "head that was trained for this model"
        )
    tensors = {n: t for n, t in tensors_of(path).items() if n not in _UNUSED}
    normed = "embed_norm.weight" in tensors
    with torch.no_grad():
        head = Longspec(LongspecConfig(layer, window, glide_taps({}, layers), normed))
        fill(path, head, tensors, ("stand_ins.", "lm_head."))
        weight, stored = output_head(path, target, layer.vocab_size, layer.hidden_size)
        head.lm_head.weight = weight
    return Loaded(head.float().eval(), {weight: stored})


LONGSPEC = HeadFormat("longspec", _is_head, _vocabulary, _width, _load)
