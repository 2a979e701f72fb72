"""DSpark heads (arXiv:2607.05147) in the layout of their authors, and in that of speculators."""

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
from accel.compiler.load.heads.dflash import OF_TARGET
from accel.ir.capture.arch.dspark import KINDS, DSpark, DSparkConfig
from accel.ir.capture.arch.walk import STAND_INS
from accel.ir.errors import CaptureError, unknown
from accel.runtime.draft._published import SPECULATORS, dflash_taps


def _is_head(path: Path, config: Config) -> bool:
    if SPECULATORS in config:
        return bool(config[SPECULATORS] == "dspark")
    return any("DSpark" in name for name in class_names(config))


def _check(path: Path, config: Config, table: Config, target: Target) -> None:
    """Raise CaptureError where it is of another target, or of a form that is not read."""
    said = [
        f"{name} = {table[name]!r}"
        for name, usual in (("sample_from_anchor", True), ("rope_is_neox_style", True))
        if table.get(name, usual) not in (usual, None)
    ]
    if said:
        raise CaptureError(
            f"{path}: config.json says {' and '.join(said)}, and accel reads heads whose first token drafts, "
            "with Qwen3's rotations; use another drafter"
        )
    check_target(path, config, table, target)


def _kind(path: Path, table: Config, rank: int, width: int) -> str:
    """Of its Markov head. Raises CaptureError."""
    kind = str(table.get("markov_head_type", KINDS[0])).lower()
    if kind not in KINDS:
        raise CaptureError(f"{path}: {unknown('markov_head_type', kind, KINDS)}")
    if kind == "rnn" and rank >= width:
        raise CaptureError(
            f"{path}: markov_rank is {rank}, and hidden_size {width}; accel reads Markov heads of less"
        )
    return kind


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head. Raises CaptureError."""
    table = table_of(config)
    _check(path, config, table, target)
    layers = layers_of(path, config, table)
    block, mask = number(path, table, "block_size", 2), mask_of(path, table, layers)
    rank = number(path, table, "markov_rank")
    confident = bool(table.get("enable_confidence_head"))
    tensors: dict[str, Tensor] = dict(tensors_of(path))
    drafted = tensors.pop("d2t", None)
    for name in OF_TARGET[1:]:
        tensors.pop(name, None)
    count = None if drafted is None else len(drafted)
    if table.get("draft_vocab_size") not in (None, count or layers.vocab_size):
        raise CaptureError(
            f"{path}: its draft vocabulary has {table['draft_vocab_size']} tokens of {layers.vocab_size}, and d2t "
            f"names {count or 'none'}; fetch the head again"
        )
    with torch.no_grad():
        head = DSpark(
            DSparkConfig(
                layers,
                dflash_taps(config),
                block,
                mask,
                causal_layers(path, table, layers, block),
                anchored=True,
                own_head=True,
                draft_vocabulary=count,
                scales=scales_of(path, table),
                own_embedding=True,
                rank=rank,
                kind=_kind(path, table, rank, layers.hidden_size),
                confident=confident,
                with_markov=confident and bool(table.get("confidence_head_with_markov")),
            )
        )
        if drafted is not None:
            head.words.set_ids(target_ids(path, drafted, len(drafted), layers.vocab_size))
        fill(path, head, tensors, ("stand_ins.", STAND_INS))
    return Loaded(head.float().eval(), {})


DSPARK = HeadFormat("dspark", _is_head, vocabulary_of, width_of, _load)
