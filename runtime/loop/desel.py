"""Decode-select (DeSel, arXiv:2310.06374): a list gets the items of sampled lists that are likely enough behind it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base, check_text
from accel.runtime.loop._branches import branched
from accel.runtime.loop._course import Course, Turn, Way, log_of, usable
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Desel(Base):
    """The answer of the likeliest tokens is a list, whose items `separator` parts. `samples` others are drawn. Each
    item of theirs that the list lacks, whatever its case, is scored: by the mean log-probability of its tokens and
    those of a separator before it, all behind the list, in one call; or by the request's scorer. Those at least as good
    as the weakest item of the list, where that stands, are added to it, the best first, as far as there is room.

    A list that ends for want of room, or in a token with more text than a stop string, stays as it is. So does that of
    a greedy request, which draws none.
    """

    samples: int = option(8, least=1, most=256)
    separator: str = ", "

    small: ClassVar[Mapping[str, Any]] = {"samples": 3, "separator": "w1"}

    grade = "approximate"
    writes = True
    takes = frozenset({"scorer"})
    lacks = "training (any model that writes lists)"

    def check(self, tokenizer: Tokenizer | None) -> None:
        check_text(tokenizer, "desel: items are")
        if not self.separator.strip():
            raise InputError(
                "loop.desel: separator is blank, so that no items can be told apart; give text, such as ', '"
            )

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        if any(row.scored for row in rows):
            raise InputError("loop = desel gives no logprobs; leave logprobs unset")
        return branched(session, rows, lambda row: _Lists(row, self, context))


class _Lists(Course):
    """The answers of one prompt."""

    reads = True

    def __init__(self, row: Row, method: Desel, context: DecodeContext):
        super().__init__(row, context)
        self._method = method

    def search(self, way: Way) -> Generator[Turn, None, Row]:
        row, samples = way.row, self._method.samples
        begun = row.branch()  # behind the prompt, without a token
        way.likeliest = True
        drawn = list[Way]()
        if not row.sampler.greedy:
            drawn = [way.branch(rng) for rng in row.rng.spawn(samples)]
        yield from self.write([way, *drawn], row.left)
        usable([way])
        end, text = row.tokens[-1], self.text(way)
        if row.finish != "eos" and (row.finish != "stop" or self.tokenizer.decode([end]).strip()):
            return row
        own = self._items(text)
        new = dict[str, str]()
        for one in drawn:
            for item in self._items(self.text(one)) if one.ended else ():
                new.setdefault(item.lower(), item)
        for item in own:
            new.pop(item.lower(), None)
        if not new or not own:
            return row
        kept = row.tokens[:-1]
        found = yield from self._scored(way, begun, kept, own, list(new.values()))
        answer = _with(begun, kept)
        for tokens in found:
            longer = _with(answer, tokens)
            if not longer.finish and longer.left:
                answer = longer
        answer.accept(end, None)
        return answer

    def _scored(
        self, way: Way, begun: Row, head: list[int], items: list[str], new: list[str]
    ) -> Generator[Turn, None, list[list[int]]]:
        """The tokens of the items to be added behind `head`, the best first."""
        tokens = [self._tokens(item) for item in new]
        if self.context.scorer is not None:
            prompt = self.tokenizer.decode(begun.prompt_text.tolist())
            numbers = self.context.scorer(prompt, [*items, *new])
            least, scores = min(numbers[: len(items)]), numbers[len(items) :]
        else:
            least = min(self._standing(head, way.logs))
            ways = [Way(_with(begun, [*head, *more]), place=way.place) for more in tokens]
            read = [one for one in ways if not one.ended]
            if read:
                yield Turn(read)
            scores = [
                self._mean(way, one, more) if not one.ended else -np.inf
                for one, more in zip(ways, tokens, strict=True)
            ]
        order = np.argsort(-np.array(scores), kind="stable").tolist()
        return [tokens[n] for n in order if scores[n] >= least]

    def _mean(self, way: Way, scored: Way, tokens: list[int]) -> float:
        """The mean log-probability of a text's last `tokens`, the first of which followed as the list's end did."""
        assert scored.lines is not None and way.before is not None
        lines = [way.before, *scored.lines[-len(tokens) :]]
        return float(
            np.mean([log_of(line, token) for line, token in zip(lines, tokens, strict=False)])
        )

    def _standing(self, tokens: list[int], logs: Sequence[float]) -> list[float]:
        """The mean log-probability of each item where it stands, with the separator before it."""
        stream, part, found = self.tokenizer.stream(), "", [list[float]()]
        mark = self._method.separator.strip()
        for token, log in zip(tokens, logs, strict=False):
            part += stream.push(token)
            if mark in part and found[-1]:
                found.append([])
                part = part.rpartition(mark)[2]
            found[-1].append(log)
        return [float(np.mean(one)) for one in found if one]

    def _items(self, text: str) -> list[str]:
        parts = (part.strip() for part in text.split(self._method.separator.strip()))
        return list({part.lower(): part for part in parts if part}.values())

    def _tokens(self, item: str) -> list[int]:
        return self.tokenizer.encode(self._method.separator + item, special=False)


def _with(row: Row, tokens: Sequence[int]) -> Row:
    """A row with more tokens, up to its end."""
    found = row.branch()
    for token in tokens:
        if found.finish:
            break
        found.accept(token, None)
    return found
