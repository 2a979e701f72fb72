"""EAGLE-3 heads (arXiv:2503.01840) in the layout of their authors, and in that of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import (
    Config,
    HeadFormat,
    Target,
    class_names,
    fill,
    layer_config,
    size_of,
    target_ids,
    tensors_of,
)
from accel.ir.capture.arch.eagle3 import Eagle3, Eagle3Config
from accel.ir.errors import CaptureError
from accel.runtime.draft._published import eagle3_ids, eagle3_taps

_TYPE = "speculators_model_type"
_OF_TARGET = (
    "t2d",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)  # which a draft does not need


def _is_head(path: Path, config: Config) -> bool:
    """speculators name it; the authors' have a draft vocabulary, or an architecture that says so."""
    if _TYPE in config:
        return bool(config[_TYPE] == "eagle3")
    names = class_names(config)
    return any("Eagle3" in str(name) for name in names) or (
        "draft_vocab_size" in config and "dflash_config" not in config
    )


def _layer(config: Config) -> Config:
    """What its decoder layer is configured by."""
    inner = config.get("transformer_layer_config")
    return inner if isinstance(inner, Mapping) else config


def vocabulary_of(config: Config) -> int:
    return size_of(_layer(config), "vocab_size")


def target_width(config: Config) -> int:
    inner = _layer(config)
    return size_of(config, "target_hidden_size") or size_of(inner, "hidden_size")


def load_eagle3(
    path: Path, config: Config, target: Target, parallel: int = 0, mask: int = 0
) -> Loaded:
    """The head in a folder; parallel, mask: as of `Eagle3Config`. Raises CaptureError."""
    with torch.no_grad():
        module = _module(path, config, tensors_of(path), target.layers, parallel, mask)
    return Loaded(module.float().eval(), {})


def _module(
    path: Path,
    config: Config,
    tensors: Mapping[str, Tensor],
    layers: int,
    parallel: int,
    mask: int,
) -> Eagle3:
    """The head over its tensors. Raises CaptureError."""
    ids = eagle3_ids(config, layers)
    if not all(isinstance(k, int) and 0 <= k <= layers for k in ids):
        raise CaptureError(
            f"{path}: the head reads what goes into layers {ids}, and its target has {layers}; give a head that was "
            "trained for this model"
        )
    named = {_renamed(name): tensor for name, tensor in tensors.items()}
    layer = layer_config(path, _layer(config))
    vocabulary, drafted = layer.vocab_size, named.pop("d2t", None)
    for name in _OF_TARGET:
        named.pop(name, None)
    if "lm_head.weight" not in named:
        raise CaptureError(
            f"{path} has no lm_head.weight, by which a head says its tokens; fetch it again"
        )
    count = len(named["lm_head.weight"])
    if drafted is None and count != vocabulary:
        raise CaptureError(
            f"{path}: its draft vocabulary has {count} tokens of {vocabulary}, and no d2t says which; fetch it again"
        )
    eagle = config.get("eagle_config") or {}
    head = Eagle3(
        Eagle3Config(
            layer,
            eagle3_taps(config, layers),
            target_width(config),
            None if drafted is None else count,
            "embed_tokens.weight" in named,
            target_width(config),
            residual_normed=bool(config.get("norm_before_residual", False)),
            tap_norms=bool(config.get("fc_norm", eagle.get("fc_norm", False))),
            all_taps_norm=bool(config.get("norm_before_fc", eagle.get("norm_before_fc", False))),
            output_normed=bool(config.get("norm_output", eagle.get("norm_output", False))),
            parallel=parallel,
            mask=mask,
        )
    )
    if drafted is not None:
        head.words.set_ids(target_ids(path, drafted, count, vocabulary))
    fill(path, head, named, ("stand_ins.",))
    return head


def _renamed(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


EAGLE3 = HeadFormat("eagle3", _is_head, vocabulary_of, target_width, load_eagle3)
