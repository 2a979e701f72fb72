"""The options of a build as one object, checked on creation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.ir.embedding import POOLINGS
from accel.ir.errors import InputError, RecipeError, shown, unknown
from accel.lowering.onnx.threads import MOST_THREADS

TARGETS = ("onnx", "eager", "triton")
# rows of a call have memory each; positions are counted in 32 bits
MOST = {"max_context": 1 << 24, "max_batch": 4096, "threads": MOST_THREADS}


@dataclass(frozen=True)
class BuildOptions:
    """The options of `optimize` besides the model and the recipe; `optimize` documents them. Raises
    RecipeError with the option, its value and the range.
    """

    target: str = "onnx"
    tokenizer: Any = None
    max_context: int = 2048
    max_batch: int = 8
    verify: bool = True
    calibration: Any = None
    trust_remote_code: bool = False
    dump: str | Path | None = None
    threads: int | None = None
    download: bool = False
    merge_adapter: str | Path | None = None
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    train: bool = False
    pooling: str | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise RecipeError(unknown("target", str(self.target), TARGETS))
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise InputError(unknown("pooling", str(self.pooling), POOLINGS))
        if not isinstance(self.adapters, Mapping):
            raise InputError(
                f"adapters is {self.adapters!r}; give a dict of names and folders, {{name: DIR}} (to merge one: "
                "merge_adapter=DIR)"
            )
        for name, most in MOST.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is None and name == "threads":
                continue
            if not whole or not 1 <= value <= most:
                raise RecipeError(
                    f"{name} is {shown(value)}; give a whole number of at least 1, up to {most}"
                )
