"""What those kinds share that learn step by step."""

from __future__ import annotations

import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel.compiler.measure import duration, kept_at, made_by, watched
from accel.compiler.part_text import Batch
from accel.compiler.train.device import CPU, made_on
from accel.compiler.train.kind import Kind, Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.precision import products_in
from accel.compiler.train.source import Source
from accel.ir.errors import InputError
from accel.ir.program import Program
from accel.ir.trained import stem
from accel.passes.trained import Parts, write

WARMUP = 20
SAVED = 60.0  # seconds between two savings
LEARNT_BY = (
    "budget",
    "pressure",
    "length",
    "rows",
    "inner",
    "rate",
    "precision",
    "seed",
)  # of the options


def state_of(out: Path) -> Path:
    """The file of a run that can be left."""
    return out.with_name(out.name + ".run")


@dataclass
class Run(Kind):
    """A run that can be left and taken up again.

    soft: what the parts are trained beside; it has the `method`, what they `start` as, and `names`, by which the model
    is known again. file: the run's state.
    """

    soft: Any
    parts: Parts
    options: TrainOptions
    file: Path
    step: int = 0
    seconds: float = 0.0
    stopping: bool = False
    optimiser: Any = field(init=False)

    @classmethod
    def over(cls, program: Program, method: Any) -> Any:
        """`soft` of a program over state."""
        raise NotImplementedError(f"{cls.__name__} trains beside no program")

    @classmethod
    def opened(cls, method: Any, source: Source, options: TrainOptions) -> tuple[Any, TrainOptions]:
        """`soft` of the source's model, and the options with rows as long as it takes."""
        program = source.program
        length = min(options.length, program.facts.max_context)
        return cls.over(program, method), replace(options, length=length)

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        method, read = watched(method)
        soft, options = cls.opened(method, source, options)
        rows = source.rows_of(method, options.length, options.rows, options.seed)
        out = options.out or kept_at(method.key, soft.names, {})
        file = state_of(options.out or out.with_name(stem(method.key, soft.names)))
        if file.exists() != options.resume:
            wrong, act = (
                ("is not there", "leave resume=True out")
                if options.resume
                else ("holds a run that was left", "add resume=True, or remove it")
            )
            raise InputError(f"{file} {wrong}: {act}")
        run = cls(soft, soft.start(options.inner, options.seed), options, file)
        if options.resume:
            run.load()
        means = run.train(rows, source)
        losses = ", ".join(f"{n} {v:.4f}" for n, v in means.items())
        if run.stopping:
            return Made(
                None, f"left after {run.step} steps; {losses}; the same with resume=True goes on"
            )
        told = options.as_text(*LEARNT_BY)
        told |= {"steps": str(run.step), "seconds": str(round(run.seconds))}
        told |= {n: f"{v:.4f}" for n, v in means.items()}
        by = made_by(method, read)
        out = options.out or kept_at(method.key, soft.names, by)
        run.write(out, told, by)
        file.unlink(missing_ok=True)
        return Made(out, f"{run.step} steps in {duration(run.seconds)}; {losses}")

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            tensor.requires_grad_(True)
        self.optimiser = torch.optim.AdamW(self.tensors, lr=self.options.rate, weight_decay=0.0)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for part in self.parts.values() for t in part.values()]

    @property
    def progress(self) -> float:
        """The share of the minutes that is over."""
        return self.seconds / 60 / self.options.minutes

    def write(self, out: Path, about: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """The part's file, whole or not at all. about: how it was made. by: the method's options that it depends on."""
        write(self.soft.method, out, self.parts, self.soft.names, about, by)

    @property
    def learnt_by(self) -> dict[str, str]:
        """The options that a run goes by from its first step to its last, its method's too."""
        method = self.soft.method
        own = {f.name: str(getattr(method, f.name)) for f in fields(method)}
        return {**self.options.as_text(*LEARNT_BY), **own}

    def save(self) -> None:
        new = self.file.with_name(self.file.name + ".new")
        state = {"tensors": self.tensors, "optimiser": self.optimiser.state_dict()}
        state |= {"step": self.step, "seconds": self.seconds, "options": self.learnt_by}
        torch.save(state, new)
        new.replace(self.file)

    def load(self) -> None:
        """Raises InputError: it is no run of this model and these options."""
        try:
            state = torch.load(self.file, map_location=CPU, weights_only=True)
            before = dict(state["options"])
            for mine, saved in zip(self.tensors, state["tensors"], strict=True):
                mine.data.copy_(saved)
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.seconds = state["step"], state["seconds"]
        except Exception as error:  # of torch's reader, and of other sizes
            raise InputError(
                f"{self.file} holds no run of this model with these options ({error}); remove it, and leave "
                "resume=True out"
            ) from error
        for name, value in self.learnt_by.items():
            if before.get(name) != value:
                raise InputError(
                    f"{self.file} holds a run with {name} = {before.get(name)}, not {value}; resume it with the "
                    "options that it was begun with, or remove it"
                )

    def descend(self, loss: Tensor) -> None:
        """One step."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.rate * min(
                1.0, (self.step + 1) / WARMUP, max(0.05, (1 - self.progress) / 0.3)
            )
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.tensors, 1.0)
        self.optimiser.step()
        self.step += 1

    @abstractmethod
    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], of which tokens with weight `known` [B,T] can be predicted; losses by name."""

    def train(self, rows: Iterator[Batch], source: Source) -> dict[str, float]:
        """Until the minutes are over, or a signal comes; the last means of the losses."""
        for _ in range(self.step):
            next(rows)  # those that a run before saw
        means: dict[str, float] = {}
        total, saved, begun = self.options.minutes * 60, time.monotonic(), self.step
        device = self.options.device
        with self._signals():
            while not self.stopping and self.seconds < total:
                start = time.monotonic()
                batch = next(rows)
                with made_on(device), products_in(self.options.precision):
                    found = self.learn(*(one.to(device) for one in batch))
                spent = time.monotonic() - start
                self.seconds += spent
                means = {
                    n: v if not means else 0.95 * means[n] + 0.05 * v for n, v in found.items()
                }
                if self.step == begun + 1:
                    self._foretell(spent, source)
                told = " ".join(f"{n} {v:.4f}" for n, v in means.items())
                source.progress(f"step {self.step} {told}", min(1.0, self.progress))
                if time.monotonic() - saved > SAVED:
                    self.save()
                    saved = time.monotonic()
            if self.stopping:
                self.save()
        return means

    def _foretell(self, seconds: float, source: Source) -> None:
        """Say how far it will come. Raises InputError where the text is too short for that."""
        steps = self.step + (self.options.minutes * 60 - self.seconds) / seconds
        size = self.options.rows * self.options.length
        source.check_enough(steps * size, self.options.minutes)
        source.say(
            f"a step of {size} tokens takes {seconds:.2g} s: about {steps:,.0f} steps in "
            f"{duration(60 * self.options.minutes)}; Ctrl-C keeps what was learnt, for resume=True"
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the run behind a step."""

        def stop(*_: object) -> None:
            self.stopping = True

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, stop) for kind in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
