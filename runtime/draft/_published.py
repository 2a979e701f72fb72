"""What config.json of a published head says of its target, without its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.ir.errors import RecipeError
from accel.ir.taps import EMBEDS, keys, stream, values

CONFIG = "config.json"
TARGET = "target_config"  # of a GliDe head: what it says of its target
_LAST = 3  # layers from the top: the last of EAGLE-3's taps


def config_of(folder: Path, method: str) -> Mapping[str, Any]:
    """Raises RecipeError where there is none."""
    file = folder / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(
            f"{method}: {file} cannot be read ({error}); set `path` to the folder of a head, which holds a "
            f"{CONFIG} and its weights"
        ) from error
    return found if isinstance(found, dict) else {}


def eagle3_ids(config: Mapping[str, Any], layers: int) -> list[int]:
    """The layers whose inputs a head reads, of a target of so many."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner = config.get("eagle_config")
    found = config.get(name, inner.get(name) if isinstance(inner, Mapping) else None)
    return list(found) if isinstance(found, list) else [2, layers // 2, layers - _LAST]


def eagle3_taps(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The same by the names of the target's outputs: k is what goes into layer k."""
    return tuple(EMBEDS if k == 0 else stream(k - 1) for k in eagle3_ids(config, layers))


SPECULATORS = "speculators_model_type"  # of a head in their layout: its kind


def dflash_ids(config: Mapping[str, Any]) -> list[int]:
    """The layers whose outputs a head reads; -1: what goes into the first. speculators count what goes into layers."""
    if SPECULATORS in config:
        found = config.get("aux_hidden_state_layer_ids")
        return [k - 1 for k in found if isinstance(k, int)] if isinstance(found, list) else []
    inner = config.get("dflash_config")
    found = inner.get("target_layer_ids") if isinstance(inner, Mapping) else None
    found = config.get("target_layer_ids", found)
    return list(found) if isinstance(found, list) else []


def dflash_taps(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The same by the names of the target's outputs: k is what comes out of layer k."""
    return tuple(EMBEDS if k == -1 else stream(k) for k in dflash_ids(config))


def glide_taps(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """The target's keys and values that a head reads, of a target of so many layers: of its last ones."""
    count = config.get("num_hidden_layers")
    count = min(count, layers) if isinstance(count, int) else 1
    return moa_taps(layers)[-2 * count :]


def moa_taps(layers: int) -> tuple[str, ...]:
    """The target's keys and values of all layers."""
    return tuple(name for i in range(layers) for name in (keys(i), values(i)))
