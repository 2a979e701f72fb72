"""accel on Ray: replicas of the server (`app`), and models over datasets (`generate`). Needs the extra `ray`.

    ray.serve.run(accel.ray.app("artifact", replicas=2, cpus=4))
    accel.ray.generate(ray.data.read_parquet("prompts"), "artifact", actors=2, cpus=4).write_parquet("texts")

A Ray that is started after this import sends no usage statistics, unless RAY_USAGE_STATS_ENABLED says otherwise.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from accel.ir.errors import extra, unknown

if TYPE_CHECKING:
    from accel.ray.batches import Generate, generate, row_seed
    from accel.ray.replica import app

_WHERE = {
    "app": "accel.ray.replica",
    **dict.fromkeys(("Generate", "generate", "row_seed"), "accel.ray.batches"),
}

__all__ = ["Generate", "app", "generate", "row_seed"]

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def __getattr__(name: str) -> Any:
    """`app` needs FastAPI, the others do not."""
    if name not in _WHERE:
        raise AttributeError(unknown("accel.ray name", name, _WHERE))
    with extra("ray"):
        return getattr(importlib.import_module(_WHERE[name]), name)
