"""P-EAGLE heads (arXiv:2602.01469) in the layout of speculators: EAGLE-3's, and what slots of masks read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel.compiler.load.checkpoint import Loaded
from accel.compiler.load.heads import Config, HeadFormat, Target, number
from accel.compiler.load.heads.eagle3 import load_eagle3, target_width, vocabulary_of
from accel.ir.errors import CaptureError

COUNT = 8  # tokens of a draft, where a head says nothing of it


def _is_head(path: Path, config: Config) -> bool:
    return bool(config.get("speculators_model_type") == "peagle")


def _count(config: Config) -> int:
    """Tokens of a draft."""
    told: Any = config.get("speculators_config")
    try:
        found = told["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return COUNT
    return found if isinstance(found, int) and found > 0 else COUNT


def _load(path: Path, config: Config, target: Target) -> Loaded:
    mask, vocabulary = number(path, config, "mask_token_id", 0), vocabulary_of(config)
    if mask >= vocabulary:
        raise CaptureError(
            f"{path}: mask_token_id is {mask}, of {vocabulary} tokens; fetch the head again"
        )
    return load_eagle3(path, config, target, _count(config), mask)


PEAGLE = HeadFormat("peagle", _is_head, vocabulary_of, target_width, _load)
