"""A model that learns from a text and from windows on it in one call: tokens that a call of a loop would run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from accel.compiler.load.source import open_source
from accel.compiler.train.kind import Tuning
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.run import Run
from accel.compiler.train.source import Source
from accel.compiler.train.tuned import Tuned, Weights
from accel.ir.errors import InputError, PassError
from accel.ir.program import Program
from accel.passes.state.trees import Trees
from accel.passes.trained import Parts


@dataclass(frozen=True, eq=False)
class Shown:
    """Tokens [B,M] that lie at places [B,M] of a text [B,T]. Each sees the text before `begins` [B,M], and of the
    others those that `sees` [M,M] says.
    """

    tokens: Tensor
    places: Tensor
    begins: Tensor
    sees: Tensor


@dataclass
class Windowed:
    """A model all of whose weights learn. `program`: over state, with trees."""

    program: Program
    folder: Path
    method: Any

    def __post_init__(self) -> None:
        self.model = Tuned(self.program, self.folder)

    def start(self, inner: int, seed: int) -> Parts:
        return {0: self.model.start()}

    def logits(self, text: Tensor, shown: Shown, weights: Weights) -> tuple[Tensor, Tensor]:
        """Of a text [B,T], [B,T,V], and of what is shown behind it, [B,M,V]."""
        batch, length = text.shape
        size = length + shown.tokens.shape[1]
        places = torch.arange(length)
        tree = torch.zeros(batch, size, size, dtype=torch.bool)
        tree[:, :length, :length] = places <= places[:, None]
        tree[:, length:, :length] = places < shown.begins[..., None]
        tree[:, length:, length:] = shown.sees
        found = self.model.logits(
            torch.cat([text, shown.tokens], 1),
            weights,
            tree=tree,
            positions=torch.cat([places.expand(batch, -1), shown.places], 1),
        )
        return found[:, :length], found[:, length:]


class WindowedRun(Run):
    """The run of a tuning whose model learns from windows, and is saved as a folder of its own."""

    folder = True
    tunes: ClassVar[type[Tuning]]

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return method is cls.tunes

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        return None if options.out else "a tuned model is a folder of its own; give out=DIR"

    @classmethod
    def opened(
        cls, method: Any, source: Source, options: TrainOptions
    ) -> tuple[Windowed, TrainOptions]:
        """See Run. Raises InputError where its weights do not learn, or it has other state than a cache."""
        if open_source(source.path).quantised:
            raise InputError(
                f"{source.path} has weights in few bits, which do not learn; give the model that it was made from"
            )
        program = source.program.copy()
        try:
            Trees().run(program)
        except PassError as error:
            raise InputError(
                f"{method.key}: a step runs a text and windows on it in one call, which the state of {source.path} "
                "does not take; give a model all of whose layers have a cache of keys and values"
            ) from error
        length = min(options.length, program.facts.max_context)
        return Windowed(program, source.path, method), replace(options, length=length)

    @property
    def config(self) -> Mapping[str, Any]:
        """What the configuration of the tuned model says, too."""
        return {}

    def write(self, out: Path, about: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """A Hugging Face directory."""
        stated = {name: str(value) for name, value in by.items()}
        self.soft.model.save(out, self.parts[0], {**about, **stated}, self.config)
