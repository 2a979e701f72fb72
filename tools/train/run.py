"""Kinds of training, of which `runs/` has a file each, and what those share that learn step by step."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

import runs
import torch
from captured import opened_program
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from texts import rows_of
from torch import Tensor

from accel.ir.errors import InputError
from accel.ir.program import Program
from accel.passes.trained import Parts, write

WARMUP = 20


class Kind(ABC):
    """How the file of some methods is made."""

    @classmethod
    @abstractmethod
    def takes(cls, method: type[Any]) -> bool:
        """Whether it is for this method; no other kind is."""

    @classmethod
    def lacks(cls, options: argparse.Namespace) -> str | None:
        """The option that must be given, and is not: what to tell."""
        return None

    @classmethod
    @abstractmethod
    def make(cls, method: type[Any], ids: Tensor | None, options: argparse.Namespace) -> str:
        """Write `options.out` by the tokens of a text (none: by what the bundled model was trained on); what to say.

        Raises AccelError.
        """


@cache
def kinds() -> tuple[type[Kind], ...]:
    """One of each file of `runs/`."""
    found: list[type[Kind]] = []
    for info in pkgutil.iter_modules(runs.__path__):
        module = importlib.import_module(f"runs.{info.name}")
        found += [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, Kind)
            and value.__module__ == module.__name__
        ]
    return tuple(found)


def kind_of(method: type[Any]) -> type[Kind] | None:
    """The kind of a method; none where it has no trained part and no table."""
    return next((kind for kind in kinds() if kind.takes(method)), None)


def state_of(out: Path) -> Path:
    """The file of a run that can be left."""
    return out.with_name(out.name + ".run")


@dataclass
class Run(Kind):
    """A run that can be left and taken up again.

    soft: what the parts are trained beside; it has the `method`, what they `start` as, and `names`, by which the model
    is known again.
    """

    soft: Any
    parts: Parts
    options: argparse.Namespace
    step: int = 0
    seconds: float = 0.0
    stopping: bool = False
    optimiser: Any = field(init=False)

    @classmethod
    def over(cls, program: Program, method: Any) -> Any:
        """`soft` of a program over state."""
        raise NotImplementedError(f"{cls.__name__} trains beside no program")

    @classmethod
    def opened(cls, method: type[Any], options: argparse.Namespace) -> Any:
        """`soft` of the options' model."""
        return cls.over(opened_program(options), method())

    @classmethod
    def begun(cls, method: type[Any], options: argparse.Namespace) -> Self:
        """With parts that have learnt nothing."""
        soft = cls.opened(method, options)
        return cls(soft, soft.start(options.inner, options.seed), options)

    @classmethod
    def make(cls, method: type[Any], ids: Tensor | None, options: argparse.Namespace) -> str:
        """See Kind."""
        if state_of(options.out).exists() != options.resume:
            what, act = (
                ("is not there", "leave --resume out")
                if options.resume
                else ("exists", "add --resume")
            )
            raise InputError(f"{state_of(options.out)} {what}: {act}, or choose another --out")
        run = cls.begun(method, options)
        if options.resume:
            run.load()
        means = run.train(rows_of(ids, options))
        told = {
            n: str(getattr(options, n))
            for n in ("budget", "pressure", "length", "rows", "inner", "rate", "seed")
        }
        told |= {"steps": str(run.step), "seconds": str(round(run.seconds))}
        told |= {n: f"{v:.4f}" for n, v in means.items()}
        write(run.soft.method, options.out, run.parts, run.soft.names, told)
        losses = ", ".join(f"{n} {v:.4f}" for n, v in means.items())
        return f"{run.step} steps in {run.seconds:.0f} s; {losses}"

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

    @property
    def file(self) -> Path:
        return state_of(self.options.out)

    def save(self) -> None:
        new = self.file.with_name(self.file.name + ".new")
        state = {"tensors": self.tensors, "optimiser": self.optimiser.state_dict()}
        torch.save({**state, "step": self.step, "seconds": self.seconds}, new)
        new.replace(self.file)

    def load(self) -> None:
        state = torch.load(self.file, weights_only=True)
        for mine, saved in zip(self.tensors, state["tensors"], strict=True):
            mine.data.copy_(saved)
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]

    def descend(self, loss: Tensor) -> None:
        """One step."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.rate * min(
                1.0, (self.step + 1) / WARMUP, max(0.05, (1 - self.progress) / 0.3)
            )
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.tensors, 1.0)
        self.optimiser.step()
        self.step += 1

    @abstractmethod
    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], of which tokens with weight `known` [B,T] can be predicted; losses by name."""

    def train(self, rows: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Until the minutes are over, or a signal comes; the last means of the losses."""

        def stop(*_: object) -> None:
            self.stopping = True

        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, stop)
        for _ in range(self.step):
            next(rows)  # those that a run before saw
        means: dict[str, float] = {}
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as bar, self.file.with_suffix(".jsonl").open("a") as log:
            task = bar.add_task(
                "training", total=self.options.minutes * 60, told="", completed=self.seconds
            )
            while not self.stopping and self.seconds < self.options.minutes * 60:
                start = time.monotonic()
                found = self.learn(*next(rows))
                self.seconds += time.monotonic() - start
                means = {
                    n: v if not means else 0.95 * means[n] + 0.05 * v for n, v in found.items()
                }
                told = " ".join(f"{n} {v:.4f}" for n, v in means.items())
                bar.update(task, completed=self.seconds, told=f"step {self.step} {told}")
                if self.step % 20 == 0:
                    print(
                        json.dumps({"step": self.step, "seconds": round(self.seconds), **means}),
                        file=log,
                        flush=True,
                    )
                    self.save()
        self.save()
        return means
