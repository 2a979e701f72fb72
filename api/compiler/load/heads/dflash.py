"""DFlash heads (arXiv:2602.06036) in the layout of their authors, and in that of speculators."""

from __future__ import annotations

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
    number,
    output_head,
    target_ids,
    tensors_of,
)
from accel.compiler.load.heads._blocks import (
    causal_layers,
    check_target,
    layers_of,
    mask_of,
    scales_of,
    table_of,
    vocabulary_of,
    width_of,
)
from accel.ir.capture.arch.dflash import DFlash, DFlashConfig
from accel.ir.errors import CaptureError
from accel.runtime.draft._published import SPECULATORS, dflash_taps

_LATER_KINDS, _LATER_NAMES = ("dflash2",), ("DFlash2DraftModel",)
# of the target, in speculators' files
OF_TARGET = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")


def _is_head(path: Path, config: Config) -> bool:
    """Later forms, too, which are refused by name."""
    if SPECULATORS in config:
        return config[SPECULATORS] in ("dflash", *_LATER_KINDS)
    names = ("DFlashDraftModel", *_LATER_NAMES)
    return any(one in name for name in class_names(config) for one in names)


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
    check_target(path, config, table, target)


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head where it has none. Raises CaptureError."""
    table = table_of(config)
    _check(path, config, table, target)
    layers = layers_of(path, config, table)
    block, mask = number(path, table, "block_size", 2), mask_of(path, table, layers)
    tensors: dict[str, Tensor] = dict(tensors_of(path))
    drafted, own = None, False
    if SPECULATORS in config:
        drafted, own = tensors.pop("d2t", None), "lm_head.weight" in tensors
        for name in OF_TARGET:
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
                causal_layers(path, table, layers, block),
                bool(table.get("sample_from_anchor")),
                own,
                count,
                scales_of(path, table),
            )
        )
        if drafted is not None:
            head.words.set_ids(target_ids(path, drafted, len(drafted), layers.vocab_size))
        fill(path, head, tensors, ("stand_ins.",) if own else ("stand_ins.", "lm_head."))
    if own:
        return Loaded(head.float().eval(), {})
    head.lm_head.weight, stored = output_head(path, target, layers.vocab_size, layers.hidden_size)
    return Loaded(head.eval(), {head.lm_head.weight: stored})


DFLASH = HeadFormat("dflash", _is_head, vocabulary_of, width_of, _load, unscaled=True)
