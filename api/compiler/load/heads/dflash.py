"""DFlash heads (arXiv:2602.06036) in the layout of their authors, and in that of speculators."""

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
    class_names,
    fill,
    number,
    output_head,
    size_of,
    target_ids,
    tensors_of,
)
from accel.ir.capture.arch.dflash import DFlash, DFlashConfig, Scales
from accel.ir.errors import CaptureError, shown
from accel.runtime.draft._published import SPECULATORS, dflash_ids, dflash_taps

_KIND = "qwen3"
_SLIDING = "sliding_attention"
_LATER_KINDS, _LATER_NAMES = ("dflash2", "dspark"), ("DFlash2DraftModel", "DSparkModel")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "num_hidden_layers",
)
_LEFT = ("model_type", "architectures", "quantization_config", "auto_map", "dflash_config")
# of the target, in speculators' files
_OF_TARGET = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")


def _is_head(path: Path, config: Config) -> bool:
    """Later forms, too, which are refused by name."""
    if SPECULATORS in config:
        return config[SPECULATORS] in ("dflash", *_LATER_KINDS)
    names = ("DFlashDraftModel", *_LATER_NAMES)
    return any(one in name for name in class_names(config) for one in names)


def _inner(config: Config) -> Config:
    """What it says of the head, in one table."""
    if SPECULATORS in config:
        inner = config.get("transformer_layer_config")
        return {**inner, **config} if isinstance(inner, Mapping) else config
    inner = config.get("dflash_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def _vocabulary(config: Config) -> int:
    return size_of(_inner(config), "vocab_size")


def _width(config: Config) -> int:
    return size_of(_inner(config), "hidden_size")


def _layers(path: Path, config: Config, table: Config) -> Any:
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


def _causal(path: Path, table: Config, layers: Any, block: int) -> tuple[int, ...]:
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


def _check(path: Path, config: Config, table: Config, target: Target) -> None:
    """Raise CaptureError where it is of another target, or of a later form."""
    later = {"conv_kernel_size": None, "markov_rank": None, "projector_type": "dflash"}
    said = [
        f"{n} = {table[n]!r}" for n, usual in later.items() if table.get(n) not in (usual, None)
    ]
    said += [one for one in _LATER_KINDS if config.get(SPECULATORS) == one]
    said += [one for one in _LATER_NAMES if one in " ".join(class_names(config))]
    if said:
        raise CaptureError(
            f"{path}: it is a later form ({', '.join(said)}), and accel reads DFlash alone"
        )
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


def _scales(path: Path, table: Config) -> Scales:
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


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head where it has none. Raises CaptureError."""
    table = _inner(config)
    _check(path, config, table, target)
    layers = _layers(path, config, table)
    block, mask = number(path, table, "block_size", 2), number(path, table, "mask_token_id", 0)
    if mask >= layers.vocab_size:
        raise CaptureError(
            f"{path}: mask_token_id is {mask}, of {layers.vocab_size} tokens; fetch the head again"
        )
    tensors: dict[str, Tensor] = dict(tensors_of(path))
    drafted, own = None, False
    if SPECULATORS in config:
        drafted, own = tensors.pop("d2t", None), "lm_head.weight" in tensors
        for name in _OF_TARGET:
            tensors.pop(name, None)
    count = None if drafted is None else len(drafted)
    if table.get("draft_vocab_size") not in (None, count or layers.vocab_size) or count and not own:
        raise CaptureError(
            f"{path}: its draft vocabulary has {table.get('draft_vocab_size')} tokens of {layers.vocab_size}, d2t "
            f"names {count or 'none'}, and lm_head.weight is {'there' if own else 'missing'}; fetch the head again"
        )
    with torch.no_grad():
        head = DFlash(
            DFlashConfig(
                layers,
                dflash_taps(config),
                block,
                mask,
                _causal(path, table, layers, block),
                bool(table.get("sample_from_anchor")),
                own,
                count,
                _scales(path, table),
            )
        )
        if drafted is not None:
            head.words.set_ids(target_ids(path, drafted, len(drafted), layers.vocab_size))
        fill(path, head, tensors, ("stand_ins.",) if own else ("stand_ins.", "lm_head."))
    if own:
        return Loaded(head.float().eval(), {})
    head.lm_head.weight, stored = output_head(path, target, layers.vocab_size, layers.hidden_size)
    return Loaded(head.eval(), {head.lm_head.weight: stored})


DFLASH = HeadFormat("dflash", _is_head, _vocabulary, _width, _load, unscaled=True)
