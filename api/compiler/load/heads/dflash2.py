"""DFlash2 heads in the layout of their authors, and in that of speculators: DFlash's with convolutions over the block
and a selector.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import Config, HeadFormat, Target, class_names, number
from accel.compiler.load.heads._blocks import table_of, vocabulary_of, width_of
from accel.compiler.load.heads.dflash import load_dflash
from accel.ir.capture.arch.dflash2 import DFlash2, DFlash2Config
from accel.ir.capture.arch.walk import STAND_INS
from accel.ir.errors import CaptureError
from accel.runtime.draft._published import SPECULATORS

_SIZES = {
    "kernel": "conv_kernel_size",
    "group": "conv_group_size",
    "rank": "selector_rank",
    "candidates": "selector_top_k",
}


def _is_head(path: Path, config: Config) -> bool:
    if SPECULATORS in config:
        return bool(config[SPECULATORS] == "dflash2")
    return any("DFlash2" in name for name in class_names(config))


def _check(path: Path, table: Config, sizes: dict[str, Any]) -> None:
    """Raise CaptureError where sizes do not go together, or it is of a form that is not read."""
    said = [f"{n} = {table[n]!r}" for n in ("sample_from_anchor", "markov_rank") if table.get(n)]
    words, drafted = table.get("vocab_size"), table.get("draft_vocab_size")
    if drafted not in (None, words):
        said.append(f"draft_vocab_size = {drafted!r} of {words!r} tokens")
    if said:
        raise CaptureError(
            f"{path}: config.json says {' and '.join(said)}, and accel reads DFlash2 heads that draft all tokens of "
            "the target, each in its own place; use another drafter"
        )
    width, block = number(path, table, "hidden_size"), number(path, table, "block_size", 2)
    words = number(path, table, "vocab_size")
    for name, wrong, why in (
        ("kernel", sizes["kernel"] > block, f"blocks have {block} tokens"),
        ("group", width % sizes["group"] > 0, f"it must divide hidden_size = {width}"),
        ("candidates", sizes["candidates"] > words, f"the head has {words} tokens"),
    ):
        if wrong:
            raise CaptureError(
                f"{path}: config.json says {_SIZES[name]} = {sizes[name]}, and {why}; fetch the head again"
            )


def _load(path: Path, config: Config, target: Target) -> Loaded:
    """The head, with the target's output head where it has none. Raises CaptureError."""
    table = table_of(config)
    if SPECULATORS in config:  # what they leave out
        table = {"sliding_window_non_causal": True, **table}
    sizes: dict[str, Any] = {ours: number(path, table, theirs) for ours, theirs in _SIZES.items()}
    _check(path, table, sizes)

    def make(common: dict[str, Any]) -> DFlash2:
        return DFlash2(DFlash2Config(**common, **sizes))

    return load_dflash(path, config, table, target, make, (STAND_INS,))


DFLASH2 = HeadFormat("dflash2", _is_head, vocabulary_of, width_of, _load, unscaled=True)
