"""The options of a build as one object, checked on creation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.ir.errors import RecipeError, unknown

TARGETS = ("onnx", "eager", "triton")


@dataclass(frozen=True)
class BuildOptions:
    """The options of `optimize` besides the model and the recipe; `optimize` documents them. Raises
    RecipeError with the option, its value and the range.
    """

    target: str = "onnx"
    tokenizer: Any = None
    max_context: int = 2048
    max_batch: int = 1
    verify: bool = True
    calibration: Any = None
    trust_remote_code: bool = False
    dump: str | Path | None = None
    threads: int | None = None
    download: bool = False

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise RecipeError(unknown("target", str(self.target), TARGETS))
        counts = {"max_context": self.max_context, "max_batch": self.max_batch}
        if self.threads is not None:
            counts["threads"] = self.threads
        for name, value in counts.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RecipeError(f"{name} is {value!r}; give a whole number of at least 1")
