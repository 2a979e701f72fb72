"""One build while it runs: its plan and options, and what is known so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from accel.compiler.assemble import Plan
from accel.compiler.build_options import BuildOptions
from accel.compiler.draft_build import Build as BuildDraft
from accel.compiler.pipeline import pipeline
from accel.ir.peft import PeftAdapter
from accel.ir.weights import Stored
from accel.passes import Pass, Step
from accel.passes.state.concat import Concat
from accel.runtime.model.adapters import Adapters, adapted

Progress = Callable[[str, float], None]


@dataclass
class Job:
    """One build: what is known so far, and how long each part took."""

    plan: Plan
    options: BuildOptions
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)  # what storing them in fewer bits saved
    loss: dict[str, Any] = field(default_factory=dict)  # what passes that approximate cost
    build_draft: BuildDraft | None = None  # makes the model that drafts
    output_head: Stored | None = None  # as it was captured, where a draft head reads it
    self_draft: Job | None = None  # that of the model as it drafts for itself
    peft_adapters: dict[str, PeftAdapter] = field(
        default_factory=dict
    )  # adapters that sessions choose
    adapters: Adapters | None = None  # the same, as sessions take them
    calibration: str | Tensor | None = None  # what was given, read
    dump: Path | None = None

    @property
    def target(self) -> str:
        return self.options.target

    @property
    def modules(self) -> list[str]:
        """Those that the adapters adapt which sessions choose. Raises InputError where one cannot be chosen."""
        return list(
            dict.fromkeys(m for given in self.peft_adapters.values() for m in adapted(given))
        )

    @contextmanager
    def part(self, name: str, done: float) -> Iterator[None]:
        """Time a part of the build; `done` is the share of the work before it."""
        self.progress(name, done)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)

    def passes(self, encoder: bool = False) -> list[Pass]:
        """All passes of the build, in order."""
        own = pipeline(encoder, self.plan.every, self.modules)
        return [*own, *([Concat()] if self.target == "onnx" else [])]
