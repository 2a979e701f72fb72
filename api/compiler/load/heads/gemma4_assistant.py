"""Assistants of Gemma 4, as transformers writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import (
    Config,
    HeadFormat,
    Target,
    fill,
    number,
    size_of,
    tensors_of,
)
from accel.ir.capture.arch.gemma4_assistant import FULL, SLIDING, AssistantConfig, Gemma4Assistant
from accel.ir.errors import CaptureError
from accel.ir.taps import last_own

_KIND, _UNIFIED = "gemma4_assistant", "gemma4_unified_assistant"
_ORDER, _CENTROIDS = "masked_embedding.token_ordering", "masked_embedding.centroids.weight"


def _is_head(path: Path, config: Config) -> bool:
    return config.get("model_type") in (_KIND, _UNIFIED)


def _text(config: Config) -> Config:
    found = config.get("text_config")
    return found if isinstance(found, Mapping) else {}


def _vocabulary(config: Config) -> int:
    return size_of(_text(config), "vocab_size")


def _width(config: Config) -> int:
    return size_of(config, "backbone_hidden_size")


def _config(path: Path, config: Config) -> AssistantConfig:
    """Raises CaptureError."""
    from transformers import AutoConfig

    if config.get("model_type") == _UNIFIED:
        raise CaptureError(
            f"{path}: it is a {_UNIFIED}, and accel reads a {_KIND}; use another drafter"
        )
    for name in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"):
        number(path, _text(config), name)
    width, centroids = number(path, config, "backbone_hidden_size"), None
    try:
        found = AutoConfig.for_model(
            _KIND, **{n: v for n, v in config.items() if n != "model_type"}
        )
    except Exception as error:  # transformers raises many kinds
        raise CaptureError(
            f"{path}: transformers makes no assistant of this config.json: {type(error).__name__}: {error}"
        ) from error
    if found.use_ordered_embeddings:
        count, chosen = found.num_centroids, found.centroid_intermediate_top_k
        if count < 1 or found.text_config.vocab_size % count or not 1 <= chosen <= count:
            raise CaptureError(
                f"{path}: config.json says num_centroids = {count} and centroid_intermediate_top_k = {chosen}, of "
                f"{found.text_config.vocab_size} tokens; fetch the head again"
            )
        centroids = count, chosen
    return AssistantConfig(found.text_config, width, centroids)


def _check(path: Path, config: AssistantConfig, target: Target) -> None:
    """Raise CaptureError where the target has no such layers."""
    for kind in (FULL, SLIDING):
        layer = last_own(target.windows, target.shares, kind == SLIDING)
        wanted = config.cache(kind)
        if layer is None or target.caches[layer] != wanted:
            found = "has none" if layer is None else f"has {list(target.caches[layer])}"
            raise CaptureError(
                f"{path}: the head reads keys and values of the target's last layer of {kind}, of {wanted[0]} heads "
                f"of {wanted[1]} numbers, and its target {found}; give a head that was trained for this model"
            )
        if kind == SLIDING and target.windows[layer] != config.layers.sliding_window:
            raise CaptureError(
                f"{path}: config.json says sliding_window = {config.layers.sliding_window}, and the model's is "
                f"{target.windows[layer]}; give a head that was trained for this model"
            )


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of the module; the embedding is the output head."""
    found = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if (words := found.pop("embed_tokens.weight", None)) is not None:
        found.setdefault("lm_head.weight", words)
    return found


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """Raises CaptureError."""
    own = _config(path, config)
    _check(path, own, target)
    tensors = _named(tensors_of(path))
    with torch.no_grad():
        head = Gemma4Assistant(own)
        for i, layer in enumerate(head.layers):
            scalar: Any = tensors.pop(f"layers.{i}.layer_scalar", None)
            if scalar is not None:
                layer.layer_scalar.copy_(scalar)
        if own.centroids is not None:
            order = tensors.pop(_ORDER, torch.zeros(0)).long().flatten()
            count = own.layers.vocab_size
            if not torch.equal(order.sort().values, torch.arange(count)):
                raise CaptureError(
                    f"{path}: {_ORDER} is no order of {count} tokens; fetch the head again"
                )
            head.tokens_of.copy_(order.view(own.centroids[0], -1))
            if _CENTROIDS in tensors:
                tensors["centroids.weight"] = tensors.pop(_CENTROIDS)
        fill(path, head, tensors, ("stand_ins.",))
    return Loaded(head.float().eval(), {})


GEMMA4_ASSISTANT = HeadFormat("gemma4-assistant", _is_head, _vocabulary, _width, _load)
