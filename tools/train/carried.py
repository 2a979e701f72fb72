"""The state of the reference run, small enough to commit: a run on another machine goes on from it.

Weights in 8 bits, a scale for each row, and the log so far. Moments are left out: the rate is warmed up again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import Checkpoints
from reference_export import compact, replace
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "carried"
_SCALE = ".scale"


def encode(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices [R,C] as int8 with a scale for each row; the rest as it is."""
    found: dict[str, Tensor] = {}
    for name, x in weights.items():
        if x.dim() < 2:
            found[name] = x.contiguous()
            continue
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        found[name] = (x / scale).round().to(torch.int8)
        found[name + _SCALE] = scale
    return found


def decode(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights [R,C] float32."""
    return {
        name: x.float() * parts[name + _SCALE] if x.dtype == torch.int8 else x
        for name, x in parts.items()
        if not name.endswith(_SCALE)
    }


def save(folder: Path, trainer: str) -> None:
    """The newest checkpoint of a run. Raises `SystemExit` where it has none."""
    state = Checkpoints(folder).load()
    if state is None:
        raise SystemExit(f"{folder} has no checkpoint to carry: train first")
    FOLDER.mkdir(exist_ok=True)
    replace(FOLDER / "weights.safetensors", lambda path: save_file(encode(state["model"]), path))
    about = {"trainer": trainer, "trained": state["count"], "decay": state["decay"]}
    told = compact(about, folder / "log.jsonl")
    replace(FOLDER / "run.json", lambda path: path.write_text(told))
    print(f"step {state['count']['step']} stands in {FOLDER.name}/")


def facts() -> dict[str, Any]:
    """What `run.json` says: `trainer`, `trained`, `decay` and the `lines` of the log; empty where there is none."""
    path = FOLDER / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def weights() -> dict[str, Tensor]:
    return decode(load_file(FOLDER / "weights.safetensors"))
