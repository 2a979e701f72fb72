"""What those kinds share whose parts the loop reads (`TrainedPart`): how they learn from all examples at once, and
what their files tell.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accel.compiler.measure import duration, kept_at, made_by
from accel.compiler.part_text import Batch
from accel.compiler.train.kind import Kind, Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source
from accel.ir.errors import InputError
from accel.passes.trained import write
from accel.runtime.decode.trained_part import TrainedPart

Tokens = npt.NDArray[np.int64]
STEPS = 1500  # of learning, each on all examples
AHEAD = 4  # tokens of a text that answer what is before them
CHECKED = 20  # steps between two looks at what is not learnt from
HELD = 8  # one of so many texts is not learnt from


class HostKind(Kind):
    """The kind of one class of methods, `of`. `asks`: whether it learns from answers to `questions`."""

    of: ClassVar[type[TrainedPart]]
    asks: ClassVar[bool] = False

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, cls.of)


def learn(
    tensors: Iterable[Tensor],
    loss: Callable[[], Tensor],
    rate: float,
    steps: int = STEPS,
    check: Callable[[], Tensor] | None = None,
) -> None:
    """Change tensors in place so that a loss of them falls. check: another loss, of examples that `loss` does not
    have; the tensors are then as they were when it was least.
    """
    changed = [tensor.requires_grad_(True) for tensor in tensors]
    optimiser = torch.optim.AdamW(changed, lr=rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    least, best = float("inf"), list[Tensor]()
    for step in range(steps + 1):
        if check is not None and step % CHECKED == 0:
            with torch.no_grad():
                found = float(check())
            if found < least:
                least, best = found, [tensor.detach().clone() for tensor in changed]
        if step < steps:
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()
            schedule.step()
    for tensor in changed:
        tensor.requires_grad_(False)
    for tensor, then in zip(changed, best, strict=False):
        tensor.copy_(then)


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


def questions(source: Source, options: TrainOptions) -> Iterator[tuple[Tokens, str | None]]:
    """`samples` x `rows` prompts [n] and their answers: those of the file `tasks`, or first halves of a text's rows and
    the `AHEAD` tokens behind, none where the model has no tokenizer. Raises InputError.
    """
    if options.tasks is None:
        half, reader = options.length // 2, source.tokenizer
        for ids, _ in batches(source, options):
            for row in ids:
                ahead = row[half : half + AHEAD].tolist()
                yield row[:half].numpy(), None if reader is None else reader.decode(ahead)
        return
    if source.tokenizer is None:
        raise InputError(f"{source.path} has no tokenizer for {options.tasks}; give tokenizer=…")
    tasks = _tasks(options.tasks)[: options.samples * options.rows]
    for number, (prompt, answer) in enumerate(tasks):
        source.progress(f"task {number + 1} of {len(tasks)}", number / len(tasks))
        yield np.array(source.tokenizer.encode(prompt), np.int64), answer


def parted(texts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Those to learn from, and those that are apart: pairs, as every second text samples. Raises InputError where all
    would be apart.
    """
    learnt = [text for n, text in enumerate(texts) if n // 2 % HELD]
    if not learnt:
        raise InputError(
            f"{len(texts)} texts are read, and the first two only judge what was learnt; give samples=… of 3 or more"
        )
    return learnt, [text for n, text in enumerate(texts) if n // 2 % HELD == 0]


def _tasks(file: Path) -> list[tuple[str, str]]:
    """Prompts and answers. Raises InputError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"tasks: {file} cannot be read ({error}); give a file of JSON lines"
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            prompt, answer = one["prompt"], one["answer"]
        except (ValueError, TypeError, KeyError):
            prompt = answer = None
        if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt:
            raise InputError(
                f'tasks: line {number} of {file} is no task; give {{"prompt": "…", "answer": "…"}}'
            )
        found.append((prompt, answer))
    if not found:
        raise InputError(f"tasks: {file} is empty; give a task a line")
    return found


def begun(sizes: Mapping[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of a network that has learnt nothing: matrices at random, others 0."""
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor.normal_(0, tensor.shape[0] ** -0.5, generator=generator)
    return tensors


def save_part(
    method: TrainedPart,
    read: Iterable[str],
    part: dict[str, Tensor],
    samples: Mapping[str, list[float]],
    figures: Mapping[str, float],
    options: TrainOptions,
) -> Made:
    """Write a part's file. read: the method's options that it depends on. samples: of the models that it is for, by
    name. figures: what its making tells.
    """
    notes = options.as_text("samples", "length", "rows", "inner", "rate", "seed")
    notes |= {name: f"{value:.4f}" for name, value in figures.items()}
    by, who = made_by(method, read), json.dumps(samples)
    file = options.out or kept_at(method.key, who, by)
    write(method, file, {0: part}, who, notes, by)
    return Made(file, ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
