"""Methods that delete layers: how many, which of them stay, and what is refused. A method gives the order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.depth import Base
from accel.passes.depth._joint import layers
from accel.passes.depth._remove import remove
from accel.passes.weights._calibrated import calibration_of

ANOTHER = 10.0  # the error of another model; that one without the layers is what is left, the laws of this axis hold


def no_adapters(program: Program, use: str) -> None:
    """Raise PassError where sessions choose adapters."""
    if program.facts.adapters is not None:
        raise PassError(
            f"{use}: it deletes layers, of which adapters that sessions choose have weights; merge one "
            f"adapter (merge_adapter), or leave {use} out"
        )


@dataclass(frozen=True)
class Deletion(Base):
    """Deletes the fraction `share` of something, as a calibration text orders it.

    tokens: how many of the calibration text are read; one row of it at least.
    """

    share: float = option(0.25, least=0, below=1)
    tokens: int = option(8192, least=1)

    stage = -1  # before weights are stored otherwise
    reads_text = True
    breaks = frozenset({Invariant.FIXED_LAYERS})
    provides = frozenset()
    error = ANOTHER
    small: ClassVar[Mapping[str, Any]] = {"share": 0.4, "tokens": 5}

    def text(self, program: Program) -> Tensor:
        """Rows [n,T] of the calibration text, of T > 1. Raises PassError."""
        return self.samples(program, program.facts.max_context)

    def samples(self, program: Program, length: int) -> Tensor:
        """The same, its rows cut into samples of at most `length` tokens."""
        rows = calibration_of(program).tokens[:, : program.facts.max_context]
        width = min(length, rows.shape[1])
        if width < 2:
            raise self.too_short(rows, "no token has one before it")
        rows = rows[:, : rows.shape[1] // width * width].reshape(-1, width)
        return rows[: max(1, self.tokens // width)]

    def too_short(self, text: Tensor, why: str) -> PassError:
        """The error of a text that does not order the layers."""
        return PassError(
            f"{self.use}: {text.numel()} tokens of text do not order the layers: {why}; give a longer text "
            f"(calibration=…) and more tokens of it (tokens, now {self.tokens})"
        )


def tell(program: Program, done: int, count: int) -> None:
    """Show how much of the text, or of the layers, an order goes by so far."""
    calibration_of(program).progress(f"ordering layers: {done + 1} of {count}", done / count)


@dataclass(frozen=True)
class Deletes(Deletion):
    """Deletes the fraction `share` of the layers, with weights and caches; the first and the last layer stay."""

    by: ClassVar[str] = "score"  # what the numbers of `goes` are, in a word

    @abstractmethod
    def goes(
        self, program: Program, calls: Sequence[fx.Node], count: int, text: Tensor
    ) -> dict[int, float]:
        """The layers that go, none of them the first or the last: `count` of them, and the number that each goes by.

        calls: of the layers, in order; text: token ids [n,T], of which T is 2 at least.
        """

    def run(self, program: Program) -> Report:
        """See Pass."""
        no_adapters(program, self.use)
        calls = layers(program)
        count = int(self.share * len(calls))
        if count == 0:
            return Report(refused=[f"{self.share:g} of {len(calls)} layers is none"])
        most = max(0, len(calls) - 2)
        if count > most:
            raise PassError(
                f"{self.use}: {self.share:g} of {len(calls)} layers are {count}, but the first and the "
                f"last layer stay; give a share of at most {most / len(calls):.3g}"
            )
        numbers = self.goes(program, calls, count, self.text(program))
        remove(program, calls, sorted(numbers))
        listed = ", ".join(f"{i} ({x:.3f})" for i, x in sorted(numbers.items()))
        program.facts.notes.append(
            f"{self.use} deleted layers {listed} of {len(calls)} ({self.by})"
        )
        return Report(changed=count)


@dataclass(frozen=True)
class Ranks(Deletes):
    """Every layer has a score by which layers go, the lowest first."""

    @abstractmethod
    def scores(
        self, program: Program, calls: Sequence[fx.Node], text: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of each layer its score [L], and how far another text of this length may be from it [L]: a standard error,
        without what all layers have in common.
        """

    def goes(
        self, program: Program, calls: Sequence[fx.Node], count: int, text: Tensor
    ) -> dict[int, float]:
        """See Deletes."""
        found, error = (x[1:-1].double() for x in self.scores(program, calls, text))
        spread, noise = float(found.std(correction=0)), float(error.square().mean().sqrt())
        if count < len(found) and noise > spread:
            raise self.too_short(
                text,
                f"their {self.by} differs by {spread:.2g} from layer to layer, and by {noise:.2g} from text to text",
            )
        values = found.tolist()
        order = sorted(range(len(values)), key=values.__getitem__)
        return {i + 1: values[i] for i in order[:count]}
