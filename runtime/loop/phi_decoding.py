"""φ-Decoding (arXiv:2503.13288): steps are chosen by how the text goes on behind them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base, check_text
from accel.runtime.loop._branches import branched
from accel.runtime.loop._clusters import clusters
from accel.runtime.loop._course import Course, Turn, Way, usable
from accel.runtime.session.session import Session

SHARP = 0.1  # the temperature at which log-probabilities are compared
GROUPS, LAST_GROUPS = 3, 2  # of what follows steps, and of whole answers
EARLIEST = 4  # rounds before the search may stop
AGREED = 0.7  # more than this share in one group ends it
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PhiDecoding(Base):
    """Of `beams` texts each draws `tries` next steps, up to a line break or `step_tokens` tokens. Those of less than
    the mean log-probability less its deviation are dropped, but `beams` stay. Each of the others is continued by
    `foresight` tokens, which are then thrown away, and `beams` of them are drawn: by how much the mean log-probability
    of these tokens is above that behind the step before, and by how many others continue alike (words, in three
    clusters), where enough gain; else by the gain alone. A text that has ended counts by its last step, and stays.

    After `depth` rounds, or from the fourth on where more than 0.7 continue alike, the texts are written to their ends,
    and one of them is drawn in the same way. One beam with one try is plain sampling, and so is a greedy request.
    """

    beams: int = option(4, least=1, most=32)
    tries: int = option(4, least=1, most=32)
    depth: int = option(8, least=1, most=1024)
    step_tokens: int = option(1024, least=1)
    foresight: int = option(1024, least=1)

    small: ClassVar[Mapping[str, Any]] = {
        "beams": 2, "tries": 2, "step_tokens": 3, "foresight": 4,
    }  # fmt: skip

    grade = "approximate"

    def check(self, tokenizer: Tokenizer | None) -> None:
        check_text(tokenizer, "phi-decoding: steps are")

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        return branched(session, rows, lambda row: _Texts(row, self, context))


@dataclass
class _Step:
    """A text after a step. step: the mean log-probability of its last step; before: what `worth` was a step ago; worth:
    the mean log-probability of what was written behind it; text: that.
    """

    way: Way
    step: float
    before: float
    worth: float = 0.0
    text: str = ""


class _Texts(Course):
    """Those of one prompt."""

    def __init__(self, row: Row, method: PhiDecoding, context: DecodeContext):
        super().__init__(row, context)
        self._method = method

    def search(self, way: Way) -> Generator[Turn, None, Row]:
        method = self._method
        (self._draws,) = way.row.rng.spawn(1)
        beams = [_Step(one, 0.0, 0.0) for one in way.ways(method.beams)]
        for turn in range(1, method.depth + 1):
            steps = yield from self._steps(beams)
            kept = self._likely(steps)
            if len(kept) > 1:
                yield from self._look_ahead(kept, method.foresight)
            groups = self._groups(kept, GROUPS)
            alike = len({step.text for step in kept}) == 1 or _share(groups) > AGREED
            beams = self._drawn(kept, groups, method.beams)
            if all(beam.way.ended for beam in beams) or (turn >= EARLIEST and alike):
                break
        yield from self._look_ahead(beams, way.row.left, whole=True)
        beams = [beam for beam in beams if not beam.way.stuck] or beams
        usable([beam.way for beam in beams])
        (best,) = self._drawn(beams, self._groups(beams, LAST_GROUPS), 1)
        return best.way.row

    def _steps(self, beams: list[_Step]) -> Generator[Turn, None, list[_Step]]:
        """All texts after their next steps, and those that have ended."""
        found = list[_Step]()
        for beam in beams:
            ways = [beam.way] if beam.way.ended else beam.way.ways(self._method.tries)
            found += [_Step(way, beam.step, beam.worth) for way in ways]
        starts = [len(one.way.logs) for one in found]
        new = [one.way for one in found if not one.way.ended]
        ended = [one.way for one in found if one.way.ended]
        yield from self.write(new, self._method.step_tokens, "\n", waits=ended)
        usable([one.way for one in found])
        for one, start in zip(found, starts, strict=True):
            if len(one.way.logs) > start:
                one.step = one.way.mean(start)
        return [one for one in found if not one.way.stuck]

    def _likely(self, steps: list[_Step]) -> list[_Step]:
        """Without the least likely steps; `beams` at least, where there are so many."""
        values = np.array([one.step for one in steps])
        stays = values > values.mean() - values.std()
        lack = min(self._method.beams, len(steps)) - int(stays.sum())
        if lack > 0:
            others = np.flatnonzero(~stays)
            weights = _softmax(values[others] / SHARP)
            stays[self._draws.choice(others, lack, replace=False, p=_spread(weights))] = True
        return [one for one, stay in zip(steps, stays, strict=True) if stay]

    def _look_ahead(self, steps: list[_Step], most: int, whole: bool = False) -> Generator[Turn]:
        """Learn how texts go on; they do, where the `whole` of them is wanted."""
        ways = [one.way for one in steps]
        if due := [way for way in ways if way.after is None and not way.ended]:
            yield Turn(due, [way for way in ways if way not in due])
        aheads = ways
        if not whole:
            aheads = [way if way.ended else way.branch(way.row.rng.spawn(1)[0]) for way in ways]
        starts, lengths = [len(way.logs) for way in ways], [len(way.row.tokens) for way in ways]
        yield from self.write(
            [way for way in aheads if not way.ended], most, waits=[] if whole else ways
        )
        for one, ahead, start, length in zip(steps, aheads, starts, lengths, strict=True):
            if whole:
                one.before = one.worth
            one.worth = ahead.mean(start) if len(ahead.logs) > start else one.step
            one.text = (
                self.text(ahead) if whole else self.tokenizer.decode(ahead.row.tokens[length:])
            )

    def _groups(self, steps: list[_Step], count: int) -> list[int | None]:
        """The cluster of each text that gains and goes on; None of the others, or of all."""
        places = [n for n, one in enumerate(steps) if one.text and one.worth > one.before]
        labels = clusters([steps[n].text for n in places], count)
        found: list[int | None] = [None] * len(steps)
        for n, label in zip(places, [] if labels is None else labels.tolist(), strict=False):
            found[n] = label
        return found

    def _drawn(self, steps: list[_Step], groups: list[int | None], count: int) -> list[_Step]:
        """So many, by gain and by cluster where `count` have one, else of all by gain."""
        if len(steps) <= count:
            return steps
        there = [n for n, group in enumerate(groups) if group is not None]
        clustered = len(there) >= count and bool(there)
        places = there if clustered else list(range(len(steps)))
        weights = _softmax(np.array([steps[n].worth - steps[n].before for n in places]) / SHARP)
        if clustered:
            sizes = [groups.count(groups[n]) / len(there) for n in places]
            weights = (weights + _softmax(np.array(sizes))) / 2
        drawn = self._draws.choice(len(places), count, replace=False, p=_spread(weights))
        return [steps[places[n]] for n in sorted(drawn.tolist())]


def _share(groups: Sequence[int | None]) -> float:
    """Of those with a cluster, how many are in the largest."""
    there = [group for group in groups if group is not None]
    return max((there.count(group) / len(there) for group in there), default=0.0)


def _softmax(values: Values) -> Values:
    found: Values = np.exp(values - values.max())
    found /= found.sum()
    return found


def _spread(weights: Values) -> Values:
    """So that as many can be drawn as there are, also where rounding left nothing of some."""
    found: Values = np.maximum(weights, 1e-12)
    found /= found.sum()
    return found
