"""What those kinds share whose parts the loop reads (`TrainedPart`): how they learn from all examples at once, and
what their files tell.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.compiler.measure import duration, kept_at, made_by
from accel.compiler.part_text import Batch
from accel.compiler.train.kind import Kind, Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.passes.trained import write
from accel.runtime.decode.trained_part import TrainedPart

STEPS = 1500  # of learning, each on all examples
HELD = 8  # every so manieth text is not learnt from


class HostKind(Kind):
    """The kind of one class of methods, `of`."""

    of: ClassVar[type[TrainedPart]]

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, cls.of)


def learn(
    tensors: Iterable[Tensor], loss: Callable[[], Tensor], rate: float, steps: int = STEPS
) -> None:
    """Change tensors in place so that a loss of them falls."""
    changed = [tensor.requires_grad_(True) for tensor in tensors]
    optimiser = torch.optim.AdamW(changed, lr=rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    for tensor in changed:
        tensor.requires_grad_(False)


def batches(source: Source, options: TrainOptions) -> Iterator[Batch]:
    """`samples` batches of the source's text; the second tells how long all will take."""
    texts = source.rows(options.length, options.rows, options.seed)
    start, count = time.monotonic(), options.samples
    for number in range(count):
        if number == 1:
            whole = duration((time.monotonic() - start) * count)
            source.say(f"{count * options.rows} texts take about {whole}")
        source.progress(f"text {number + 1} of {count}", number / count)
        yield next(texts)


def kept(
    method: TrainedPart,
    read: Iterable[str],
    part: dict[str, Tensor],
    samples: Mapping[str, list[float]],
    told: Mapping[str, float],
    options: TrainOptions,
) -> Made:
    """Write a part's file. read: the method's options that it depends on. samples: of the models that it is for, by
    name. told: what its making tells.
    """
    notes = options.as_text("samples", "length", "rows", "inner", "rate", "seed")
    notes |= {name: f"{value:.4f}" for name, value in told.items()}
    by, who = made_by(method, read), json.dumps(samples)
    file = options.out or kept_at(method.key, who, by)
    write(method, file, {0: part}, who, notes, by)
    return Made(file, ", ".join(f"{name} {value:.4g}" for name, value in told.items()))
