"""How a part is made, as one object, checked on creation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accel.compiler.train.device import CPU, check_device
from accel.compiler.train.precision import FLOAT32, PRECISIONS
from accel.ir.errors import InputError, shown, unknown
from accel.ir.parts import parts

_POSITIVE = ("budget", "length", "rows", "samples", "inner", "minutes", "pressure", "rate")


@dataclass(frozen=True)
class TrainOptions:
    """out: the file to write; none: the user's cache. text: what to learn from; none: accel's own. tasks: JSON
    lines, each a `prompt` and its `answer`, for what learns from what the model answers. draft, aux: the folders of
    the draft model, for lengths, and of a smaller model, for kv-prediction. target, reference: those of a draft
    model's target, and of a draft model that was tuned before, for tunings. minutes: of learning, all sessions.
    budget: tokens that a head should hold. pressure: the weight of what goes beyond it. length, rows: tokens of a
    row, and rows of a step. precision: of products with weights. device: where it learns, as PyTorch names it.
    samples: steps that a table is measured on. inner: the width of a gate or a head, or the rank of a coprocessor's
    products. rate: of learning. threads: of the processor; 0: as many as a model takes. resume: go on with a run
    that was left.
    """

    out: Path | None = None
    text: Path | None = None
    tasks: Path | None = None
    draft: Path | None = None
    aux: Path | None = None
    target: Path | None = None
    reference: Path | None = None
    minutes: float = 30.0
    budget: int = 128
    pressure: float = 1.0
    length: int = 768
    rows: int = 1
    samples: int = 64
    inner: int = 128
    rate: float = 2e-3
    precision: str = FLOAT32
    device: str = CPU
    seed: int = 0
    threads: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if not value > 0:
                raise InputError(f"{name} is {shown(value)}; give more than 0")
        if self.precision not in PRECISIONS:
            raise InputError(unknown("precision", self.precision, PRECISIONS))
        check_device(self.device)

    @classmethod
    def of(cls, key: str, settings: Mapping[str, Any]) -> TrainOptions:
        """Those that are given; others as the part that comes with accel was made."""
        bundled = parts()[key].settings if key in parts() else {}
        own: dict[str, Any] = {f.name: type(f.default) for f in fields(cls)}
        as_told = {n: own[n](v) for n, v in bundled.items() if own.get(n) in (int, float)}
        return cls(**{**as_told, **settings})

    def as_text(self, *names: str) -> dict[str, str]:
        """These, for a part's file."""
        return {name: str(getattr(self, name)) for name in names}
