"""DFlash heads (arXiv:2602.06036) in the layout of their authors, and in that of speculators."""

from __future__ import annotations

from collections.abc import Callable
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

# of the target, in speculators' files
OF_TARGET = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")


def _is_head(path: Path, config: Config) -> bool:
    """Later forms of no name of their own, too, which are refused."""
    if SPECULATORS in config:
        return bool(config[SPECULATORS] == "dflash")
    return any("DFlashDraftModel" in name for name in class_names(config))


def _check(path: Path, table: Config) -> None:
    """Raise CaptureError where it is of a later form."""
    later = {"conv_kernel_size": None, "markov_rank": None, "projector_type": "dflash"}
    said = [
        f"{n} = {table[n]!r}" for n, usual in later.items() if table.get(n) not in (usual, None)
    ]
    if said:
        raise CaptureError(
            f"{path}: it is a later form ({', '.join(said)}), and by the names in config.json (architectures, "
            f"{SPECULATORS}) it is DFlash; accel reads DFlash and DFlash2 (DFlash2DraftModel, dflash2) by their names"
        )


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head where it has none. Raises CaptureError."""
    table = table_of(config)
    _check(path, table)
    return load_dflash(path, config, table, target, lambda common: DFlash(DFlashConfig(**common)))


def load_dflash(
    path: Path,
    config: Config,
    table: Config,
    target: Target,
    make: Callable[[dict[str, Any]], DFlash],
    others: tuple[str, ...] = (),
) -> Loaded:
    """The head that is made of what config.json says of DFlash (`DFlashConfig`), with the target's output head where it
    has none. table: as of `table_of`. others: as of `fill`. Raises CaptureError.
    """
    check_target(path, config, table, target)
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
    common = {
        "layers": layers,
        "taps": dflash_taps(config),
        "block": block,
        "mask": mask,
        "causal": causal_layers(path, table, layers, block),
        "anchored": bool(table.get("sample_from_anchor")),
        "own_head": own,
        "draft_vocabulary": count,
        "scales": scales_of(path, table),
    }
    with torch.no_grad():
        head = make(common)
        if drafted is not None:
            head.words.set_ids(target_ids(path, drafted, len(drafted), layers.vocab_size))
        fill(path, head, tensors, ("stand_ins.", *others, *(() if own else ("lm_head.",))))
    if own:
        return Loaded(head.float().eval(), {})
    head.lm_head.weight, stored = output_head(path, target, layers.vocab_size, layers.hidden_size)
    return Loaded(head.eval(), {head.lm_head.weight: stored})


DFLASH = HeadFormat("dflash", _is_head, vocabulary_of, width_of, _load, unscaled=True)
