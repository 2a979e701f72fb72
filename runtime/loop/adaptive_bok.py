"""Input-adaptive best-of-k (arXiv:2410.04707): a probe tells from the prompt how many samples an answer is worth."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import InputError, RecipeError
from accel.ir.taps import FINAL
from accel.ir.trained import Tensors
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.prompts import distinct
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import Sizes, TrainedPart, sizes_of
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base, check_text
from accel.runtime.loop._branches import branched
from accel.runtime.loop._course import Course, Turn, Way, usable
from accel.runtime.session.observers.observer import CallWatcher
from accel.runtime.session.session import Session

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class AdaptiveBok(TrainedPart, Base):
    """As many samples as a prompt is worth, of which the request's scorer takes the best, else the mean
    log-probability does; of equals the first. A probe reads the hidden state of the prompt's last token and tells the
    chance that a sample is right. `mean` samples of each prompt are spread over the chances that it told of prompts it
    did not learn from, each sample to where it gains most, `least` to `most` a prompt; a prompt gets what the nearest
    chance got. So each prompt has the samples that it would have alone, and the mean holds for prompts of that kind.

    A greedy request has one sample. `trained`: the probe's file, from `accel-compile train adaptive-bok`; empty: the
    one that a build finds. With a model that has none each prompt gets `mean` samples, rounded: plain best-of-k.
    """

    mean: float = option(4.0, least=1, most=256)
    least: int = option(1, least=1, most=256)
    most: int = option(16, least=1, most=256)
    trained: str = ""

    small: ClassVar[Mapping[str, Any]] = {"mean": 2.0, "most": 3}
    key: ClassVar[str] = "adaptive-bok"
    optional = True
    grade = "approximate"  # of several answers the best
    takes = frozenset({"scorer"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.least <= self.mean <= self.most:
            raise RecipeError(
                f"{self.full_name}: mean is {self.mean:g}, which is not between least = {self.least} and most = "
                f"{self.most}; give a mean between them"
            )

    @classmethod
    def sizes(cls, width: int, inner: int) -> Sizes:
        """Of the probe's tensors; `width`: of a hidden state."""
        return {
            "first": (width, inner), "first.bias": (inner,), "last": (inner, 1), "last.bias": (1,),
        }  # fmt: skip

    @classmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """See TrainedPart. "bins": the mean chances of prompts, a tenth or so of them each."""
        first, bins = sizes_of(tensors, "first"), sizes_of(tensors, "bins")
        probe = cls.sizes(*(first if len(first) == 2 else (0, 0)))
        return probe | {"bins": (max(1, *bins),) if len(bins) == 1 else (1,)}

    @classmethod
    def odds(cls, probe: Mapping[str, Any], x: Any) -> Any:
        """The logarithm of the odds [N] that a sample is right, by hidden states [N,E]: of arrays, or of torch's
        tensors to learn by.
        """
        x = x @ probe["first"] + probe["first.bias"]
        x = x * (x > 0)
        return (x @ probe["last"] + probe["last.bias"])[:, 0]

    def check(self, tokenizer: Tokenizer | None) -> None:
        check_text(tokenizer, "adaptive-bok: answers are")

    def taps(self, layers: int) -> Sequence[str]:
        return (FINAL,)

    def samples(self, chances: Floats) -> Ints:
        """How many samples prompts of these chances [N] get."""
        bins = np.sort(self.part["bins"].astype(np.float64))
        budget = int(round(self.mean * bins.size))
        counts = np.array(allocated(bins, budget, self.least, self.most))
        found: Ints = counts[np.abs(bins - np.asarray(chances)[:, None]).argmin(1)]
        return found

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        if all(row.finish for row in rows):
            return
        if not self.part:
            even = int(round(self.mean))
            yield from branched(session, rows, lambda row: _Samples(row, context, lambda: even))
            return
        prompts, order = Prompts(rows), {id(row): i for i, row in enumerate(rows)}

        def begin(row: Row) -> _Samples:
            return _Samples(row, context, lambda: self._worth(prompts.states[order[id(row)]]))

        session.listen(prompts)
        try:
            yield from branched(session, rows, begin)
        finally:
            with suppress(InputError):  # of a session that a failed call closed
                session.unlisten(prompts)

    def _worth(self, state: Floats) -> int:
        """How many samples the prompt with this hidden state [E] gets."""
        odds = np.clip(self.odds(self.part, state[None]), -80, 80)
        return int(self.samples(1 / (1 + np.exp(-odds)))[0])


def allocated(chances: Floats, budget: int, least: int, most: int) -> list[int]:
    """How many of `budget` samples each prompt gets, `least` to `most`, so that most prompts are expected to have a
    right one: the next sample is of the prompt whose chance of a first right one it raises most, the first of equals.
    As each further one raises it less, no other choice is better. Samples that raise none are given out too.
    """
    counts = [least] * len(chances)
    gains = [(-gain(float(chance), least), n) for n, chance in enumerate(chances)]
    heapq.heapify(gains)
    for _ in range(budget - sum(counts)):
        while gains and counts[gains[0][1]] >= most:
            heapq.heappop(gains)
        if not gains:
            break
        _, n = gains[0]
        counts[n] += 1
        heapq.heapreplace(gains, (-gain(float(chances[n]), counts[n]), n))
    return counts


def gain(chance: float, count: int) -> float:
    """What a sample behind `count` others adds to the chance that one is right."""
    return chance * (1 - chance) ** count


class Prompts(CallWatcher):
    """The hidden states of the last tokens of prompts, until they are asked for."""

    def __init__(self, rows: list[Row]):
        first, self._places = distinct(rows)
        self._states: list[Floats | None] = [None] * len(first)
        self._over = False

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See CallWatcher."""
        return () if self._over else (FINAL,)

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See CallWatcher."""
        if self._over:
            return
        for i, places in enumerate(positions):
            if (places >= 0).any():
                self._states[i] = extra[FINAL][i, int(places.argmax())].astype(np.float32)

    @cached_property
    def states(self) -> Floats:
        """[B,E] of the rows whose prompts have run; 0 of others."""
        self._over = True
        width = next(state.size for state in self._states if state is not None)
        nothing = np.zeros(width, np.float32)
        found = np.stack([nothing if state is None else state for state in self._states])
        return found[self._places]


class _Samples(Course):
    """Those of one prompt. `count`: tells how many, when the prompt has run."""

    def __init__(self, row: Row, context: DecodeContext, count: Callable[[], int]):
        super().__init__(row, context)
        self._count = count

    def search(self, way: Way) -> Generator[Turn, None, Row]:
        ways = way.ways(self._count())
        yield from self.write(ways, way.row.left)
        answers = usable(ways)
        scores = self.scores(answers) or [one.mean() for one in answers]
        return answers[int(np.argmax(scores))].row
