"""DFlash heads (arXiv:2602.06036) in the layout of their authors."""

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
    class_names,
    fill,
    number,
    output_head,
    size_of,
    tensors_of,
)
from accel.ir.capture.arch.dflash import DFlash, DFlashConfig
from accel.ir.errors import CaptureError, shown
from accel.runtime.draft._published import dflash_ids, dflash_taps

_KIND = "qwen3"
_OTHERS = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": 0}


def _is_head(path: Path, config: Config) -> bool:
    names = class_names(config)
    return "speculators_model_type" not in config and any(
        "DFlashDraftModel" in str(name) for name in names
    )


def _vocabulary(config: Config) -> int:
    return size_of(config, "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "hidden_size")


def _inner(config: Config) -> Config:
    inner = config.get("dflash_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def _layers(path: Path, config: Config) -> Any:
    """What its layers are configured by. Raises CaptureError."""
    from transformers import AutoConfig

    for name in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "num_hidden_layers",
    ):
        number(path, config, name)
    if (kind := config.get("model_type", _KIND)) != _KIND:
        raise CaptureError(
            f"{path}: its layers are of model_type {shown(str(kind))}, and accel reads those of {_KIND}"
        )
    left = ("model_type", "architectures", "quantization_config", "auto_map", "dflash_config")
    try:
        found = AutoConfig.for_model(kind, **{n: v for n, v in config.items() if n not in left})
    except Exception as error:  # transformers raises many kinds
        raise CaptureError(
            f"{path}: transformers makes no layers of this config.json: {type(error).__name__}: {error}"
        ) from error
    if other := sorted(set(found.layer_types or []) - {"full_attention"}):
        raise CaptureError(
            f"{path}: its layers have {other[0]}, and accel reads heads of full attention"
        )
    return found


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head. Raises CaptureError."""
    told, ids, layers = _inner(config), dflash_ids(config), target.layers
    if not ids or not all(isinstance(k, int) and -1 <= k < layers for k in ids):
        raise CaptureError(
            f"{path}: the head reads what comes out of layers {ids}, and its target has {layers}; give a head that was "
            "trained for this model"
        )
    if told.get("is_causal") or "conv_kernel_size" in told:
        raise CaptureError(
            f"{path}: it is a later form (is_causal, or DFlash2), and accel reads DFlash alone"
        )
    for name, usual in _OTHERS.items():
        if told.get(name) not in (None, usual):
            raise CaptureError(
                f"{path}: config.json says {name} = {told[name]}, which accel does not compute"
            )
    inner = _layers(path, config)
    block, mask = number(path, told, "block_size", 2), number(path, told, "mask_token_id", 0)
    if mask >= inner.vocab_size:
        raise CaptureError(
            f"{path}: mask_token_id is {mask}, of {inner.vocab_size} tokens; fetch the head again"
        )
    with torch.no_grad():
        head = DFlash(DFlashConfig(inner, dflash_taps(config), block, mask))
        fill(path, head, tensors_of(path), ("stand_ins.", "lm_head."))
    head.lm_head.weight, stored = output_head(path, target, inner.vocab_size, inner.hidden_size)
    return Loaded(head.eval(), {head.lm_head.weight: stored})


DFLASH = HeadFormat("dflash", _is_head, _vocabulary, _width, _load, unscaled=True)
