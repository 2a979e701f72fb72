"""What formats of heads that draft blocks have in common: DFlash's layers, and what config.json says of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.compiler.load.heads import Config, Target, number, size_of
from accel.ir.capture.arch.dflash import Scales
from accel.ir.errors import CaptureError, shown
from accel.runtime.draft._published import SPECULATORS, dflash_ids

_KIND = "qwen3"
_SLIDING = "sliding_attention"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "num_hidden_layers",
)
_LEFT = ("model_type", "architectures", "quantization_config", "auto_map", "dflash_config")


def table_of(config: Config) -> Config:
    """What it says of the head, in one table."""
    if SPECULATORS in config:
        inner = config.get("transformer_layer_config")
        return {**inner, **config} if isinstance(inner, Mapping) else config
    inner = config.get("dflash_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def vocabulary_of(config: Config) -> int:
    return size_of(table_of(config), "vocab_size")


def width_of(config: Config) -> int:
    return size_of(table_of(config), "hidden_size")


def layers_of(path: Path, config: Config, table: Config) -> Any:
    """What its layers are configured by. Raises CaptureError."""
    from transformers import AutoConfig

    for name in _SIZES:
        number(path, table, name)
    inner = config.get("transformer_layer_config") if SPECULATORS in config else config
    if not isinstance(inner, Mapping):
        raise CaptureError(
            f"{path}: config.json lacks the table transformer_layer_config; fetch the head again"
        )
    if (kind := inner.get("model_type", _KIND)) != _KIND:
        raise CaptureError(
            f"{path}: its layers are of model_type {shown(str(kind))}, and accel reads those of {_KIND}"
        )
    try:
        found = AutoConfig.for_model(kind, **{n: v for n, v in inner.items() if n not in _LEFT})
    except Exception as error:  # transformers raises many kinds
        raise CaptureError(
            f"{path}: transformers makes no layers of this config.json: {type(error).__name__}: {error}"
        ) from error
    kinds = set(found.layer_types)
    if other := sorted(kinds - {"full_attention", _SLIDING}):
        raise CaptureError(
            f"{path}: its layers have {other[0]}, and accel reads heads of full or sliding attention"
        )
    if _SLIDING in kinds and (found.sliding_window or 0) < 1:
        raise CaptureError(
            f"{path}: config.json says of layers that they slide, and sliding_window = {inner.get('sliding_window')!r},"
            f" use_sliding_window = {inner.get('use_sliding_window')!r}; fetch the head again"
        )
    return found


def causal_layers(path: Path, table: Config, layers: Any, block: int) -> tuple[int, ...]:
    """The layers where a token of a block sees none behind it: those that slide, where nothing else is said. Raises
    CaptureError.
    """
    slides = [kind == _SLIDING for kind in layers.layer_types]
    said = table.get("is_causal")
    if SPECULATORS in table:
        said = False if table.get("sliding_window_non_causal") else None
    found = tuple(i for i, one in enumerate(slides) if (one if said is None else said))
    if said is False and any(slides) and layers.sliding_window < block:
        raise CaptureError(
            f"{path}: blocks of {block} tokens see each other in layers that slide over {layers.sliding_window}, which "
            "accel does not compute; use another head"
        )
    return found


def mask_of(path: Path, table: Config, layers: Any) -> int:
    """The token that the places of a block hold behind the first. Raises CaptureError."""
    mask = number(path, table, "mask_token_id", 0)
    if mask >= layers.vocab_size:
        raise CaptureError(
            f"{path}: mask_token_id is {mask}, of {layers.vocab_size} tokens; fetch the head again"
        )
    return mask


def check_target(path: Path, config: Config, table: Config, target: Target) -> None:
    """Raise CaptureError where it is of another target."""
    ids, layers = dflash_ids(config), target.layers
    if not ids or not all(isinstance(k, int) and -1 <= k < layers for k in ids):
        raise CaptureError(
            f"{path}: the head reads what comes out of layers {ids}, and its target has {layers}; give a head that was "
            "trained for this model"
        )
    if table.get("num_target_layers", layers) != layers:
        raise CaptureError(
            f"{path}: config.json says num_target_layers = {table['num_target_layers']}, and the model has {layers} "
            "layers; give a head that was trained for this model"
        )


def scales_of(path: Path, table: Config) -> Scales:
    """Raises CaptureError."""
    found = dict[str, float]()
    for name, usual in (
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", 0.0),
    ):
        value = usual if table.get(name) is None else table[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise CaptureError(
                f"{path}: config.json says {name} = {value!r}; a head needs a number of 0 or more there"
            )
        found[name] = float(value)
    return Scales(*found.values())
