"""Self-infilling (arXiv:2311.17972): where the model is unsure it writes the end of its text first, then the middle."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.prompts import prompted
from accel.runtime.decode.row import Row
from accel.runtime.inputs.infill import FORMS, forms_of
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base
from accel.runtime.session.session import Session

REPEATS = 0.1  # text that zlib makes shorter than that says the same again and again


@dataclass(frozen=True)
class SelfInfill(Base):
    """For models that were trained to fill in the middle. Where the likeliest token has a probability below
    `threshold`, and the line does not have the text `suffix` yet, the rest of the text is written first: it begins with
    `suffix` and ends where the request's texts do. Then the middle is written until it joins. Where it does not, or the
    rest is empty or repeats itself, or the request lets nothing follow, the text goes on from left to right.
    `randomly`: it is interrupted below the threshold with a probability of 1 to a half, the less sure the likelier.

    `loops` further times, the text before the rest stays and goes on from left to right; then a text is filled in
    whose rest begins as the new one does, up to its last `suffix`. With `threshold` = 0 and no loops the output is
    plain decoding's of the prompt behind the prefix sentinel, without any sentinels.
    """

    threshold: float = option(0.1, least=0, most=1)
    suffix: str = "return"
    randomly: bool = False
    loops: int = option(0, least=0, most=16)

    grade = "approximate"
    relies = frozenset({Invariant.REWIND, Invariant.TEXT_PROMPT})
    searches = True
    writes = True

    def check(self, tokenizer: Tokenizer | None) -> None:
        _Marks.of(tokenizer)

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        model = context.model
        tokenizer = None if model is None else model.tokenizer
        assert model is not None and tokenizer is not None, "checked"
        marks = _Marks.of(tokenizer)
        live = [i for i, row in enumerate(rows) if not row.finish]
        if not live:
            return
        bos = model.facts.bos
        places = np.array([int(row.prompt[0] == bos) for row in rows])  # of the prefix sentinel
        session.rewind(np.where(session.lengths > places, 0, session.lengths))
        inner = _behind_prefix(rows, places, marks)
        logits = prompted(session, inner)
        calls = _Calls(session, rows, [row.prompt for row in inner])
        fills, asks = dict[int, _Fill](), dict[int, _Ask]()
        for i in live:
            rows[i].began = inner[i].began
            filler = _Filler(self, rows[i], int(places[i]), marks, tokenizer, calls.room(i))
            fills[i] = filler.fill(logits[i, 0])
        answers: dict[int, Logits | None] = dict.fromkeys(fills)
        try:
            while answers:
                for i, lines in answers.items():
                    try:
                        asks[i] = fills[i].send(lines)  # type: ignore[arg-type]
                    except StopIteration:
                        asks.pop(i, None)
                        yield from ((i, token) for token in rows[i].tokens)
                answers = calls(asks)
        finally:
            with suppress(InputError):  # of a session that a failed call closed
                session.rewind(np.zeros_like(places))


class _Ask(NamedTuple):
    """What a row asks for: that the session holds its first `hold` tokens, and the logits after each of `tokens`, or
    after the last alone where no log-probabilities are told.
    """

    hold: int
    tokens: list[int]


_Fill = Generator[_Ask, Logits, None]
_Part = tuple[
    int, Logits | None
]  # a token, and the logits [V] that it follows from, where they are told


class _Full(Exception):
    """The session has no room for what is asked."""


class _Marks(NamedTuple):
    """The ids of the sentinels, and of what ends a middle."""

    prefix: int
    suffix: int
    middle: int
    end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> _Marks:
        """Raises InputError where there are none."""
        for form, known in forms_of(tokenizer):
            if form.middle:
                ends = known.get(form.ends[0]) if form.ends else None
                return cls(known[form.prefix], known[form.suffix], known[form.middle], ends)
        what = "has no tokenizer" if tokenizer is None else "has a tokenizer without them"
        told = "; ".join(", ".join(form.marks) for form in FORMS if form.middle)
        raise InputError(
            f"loop.self-infill needs the sentinels of a model that infills ({told}), and this model {what}; "
            "give such a model, or build with loop = autoregressive"
        )


def _behind_prefix(rows: list[Row], places: Ints, marks: _Marks) -> list[Row]:
    """Rows whose prompts have the prefix sentinel; samples of one prompt still share it."""
    prompts = {
        id(row.prompt): np.insert(row.prompt, place, marks.prefix)
        for row, place in zip(rows, places, strict=True)
    }
    found = []
    for row in rows:
        ids = prompts[id(row.prompt)]
        found.append(Row(ids, row.sampler, row.rng, limit=1, max_context=ids.size + 1))
        found[-1].finish = row.finish
    return found


class _Calls:
    """The calls of a session that holds the prompts [n] of rows, or what a recipe kept of them."""

    def __init__(self, session: Session, rows: list[Row], prompts: list[Ints]):
        self._session = session
        self._told = any(row.scored for row in rows)
        self._held: list[list[int]] = [ids.tolist() for ids in prompts]
        self._sizes = [ids.size for ids in prompts]
        self._cut = np.array(self._sizes) - session.lengths  # tokens of prompts that it left out

    def room(self, i: int) -> int:
        """Most tokens of a row."""
        return self._session.max_context + int(self._cut[i])

    def __call__(self, asks: dict[int, _Ask]) -> dict[int, Logits | None]:
        """One call for what rows ask. Where the session cannot go back so far, a row runs anew."""
        if not asks:
            return {}
        session, keep, runs = self._session, self._session.lengths, dict[int, list[int]]()
        least = session.held_from
        for i, (hold, tokens) in asks.items():
            at, back = hold - int(self._cut[i]), hold < len(self._held[i])
            anew = back and (at < least[i] or self._cut[i] > 0 and hold < self._sizes[i])
            runs[i] = [*self._held[i][:hold], *tokens] if anew else tokens
            keep[i], self._cut[i] = (0, 0) if anew else (at, self._cut[i])
            self._held[i][hold:] = tokens
        if (keep < session.lengths).any():
            session.rewind(keep)
        counts = np.zeros(session.batch, np.int64)
        counts[list(runs)] = [len(tokens) for tokens in runs.values()]
        columns = np.zeros((session.batch, int(counts.max())), np.int64)
        for i, tokens in runs.items():
            columns[i, : counts[i]] = tokens
        lengths = None if (counts == columns.shape[1]).all() else counts
        logits = session.run(columns, lengths, last_only=not self._told)
        if not self._told:
            return {i: logits[i] for i in asks}
        return {i: logits[i, counts[i] - len(ask.tokens) : counts[i]] for i, ask in asks.items()}


class _Filler:
    """What writes the text of one row."""

    def __init__(
        self, method: SelfInfill, row: Row, place: int, marks: _Marks, tokenizer: Tokenizer, room: int
    ):  # fmt: skip
        self._method, self._row, self._place, self._marks = method, row, place, marks
        self._tokenizer, self._room = tokenizer, room
        self._prompt: list[int] = row.prompt.tolist()
        self._begin = self._encoded(method.suffix)

    def fill(self, line: Logits) -> _Fill:
        """Let the row take its text, of which `line` [V] are the first token's logits."""
        before, rest = yield from self._first(line)
        for turn in range(self._method.loops):
            try:
                before, rest = yield from self._looped(
                    before, rest, last=turn + 1 == self._method.loops
                )
            except (_Full, InputError):
                break
        for token, told in [*before, *rest]:
            self._row.accept(token, told)
            if self._row.finish:
                return
        self._row.finish = "stop" if rest else "context"

    def _first(self, line: Logits) -> Generator[_Ask, Logits, tuple[list[_Part], list[_Part]]]:
        """The text up to its rest, and that: none where it was written from left to right."""
        text, parts, infills = self._row.branch(with_logprobs=False), list[_Part](), True
        start = len(self._prompt) + 1
        with suppress(_Full):
            while True:
                if infills and self._unsure(text, line):
                    found = None
                    with suppress(_Full, InputError):  # the request may let nothing follow there
                        found = yield from self._filled(text, start + len(parts), [], self._begin)
                    if found is not None:
                        return parts + found[0], found[1]
                    infills = False
                token = self._picked(text, line, parts)
                if text.finish:
                    break
                line = (yield from self._run(start + len(parts) - 1, [token]))[-1]
        return parts, []

    def _filled(
        self, text: Row, hold: int, lead: list[int], begin: list[int]
    ) -> Generator[_Ask, Logits, tuple[list[_Part], list[_Part]] | None]:
        """The middle and the rest behind `text`, the rest beginning with the tokens `begin`; None where they do not
        join. `lead`: what is to be run before them.
        """
        rest, parts = text.branch(), list[_Part]()
        asked = [*lead, self._marks.suffix, *begin]
        lines = yield from self._run(hold, asked)
        hold += len(asked)
        for place, token in enumerate(begin, len(lead)):
            if rest.finish:
                return None
            rest.accept(token, None)
            parts.append((token, lines[place] if self._row.scored else None))
        line = lines[-1]
        while not rest.finish:
            token = self._picked(rest, line, parts)
            if not rest.finish:
                line = (yield from self._run(hold, [token]))[-1]
                hold += 1
        written = self._tokenizer.decode([token for token, _ in parts[len(begin) :]])
        if rest.finish not in ("eos", "stop") or not written.strip():
            return None
        asked = [*([] if rest.finish == "eos" else [parts[-1][0]]), self._marks.middle]
        line = (yield from self._run(hold, asked))[-1]
        hold += len(asked)
        middle, joined = text.branch(), list[_Part]()
        while True:
            token = middle.pick(self._allowed(line, middle=True))
            if token == self._marks.end or middle.ends(token):
                break
            middle.accept(token, None)
            joined.append((token, line if self._row.scored else None))
            if middle.finish or len(joined) + len(parts) + len(text.tokens) > self._row.left:
                return None
            line = (yield from self._run(hold, [token]))[-1]
            hold += 1
        whole = [*text.tokens, *(token for token, _ in [*joined, *parts])]
        return None if self._repeats(whole) else (joined, parts)

    def _looped(
        self, before: list[_Part], rest: list[_Part], last: bool
    ) -> Generator[_Ask, Logits, tuple[list[_Part], list[_Part]]]:
        """The text once more: what is before its rest stays and goes on from left to right; but for the last time, it
        is then filled in again. As it was, where nothing comes of it.
        """
        kept = [token for token, _ in before]
        if not rest:  # it was written from left to right: its rest begins with the last `suffix`
            kept = self._encoded(self._upto(self._text(before), self._method.suffix)[0])
        text, parts, new = self._row.branch(with_logprobs=False), list[_Part](), list[_Part]()
        asked = [*self._prompt[self._place :], *kept]
        lines = yield from self._run(self._place, asked)
        for place, token in enumerate(kept, len(asked) - len(kept) - 1):
            if text.finish:
                return before, rest
            text.accept(token, None)
            parts.append((token, lines[place] if self._row.scored else None))
        hold, line = self._place + len(asked), lines[-1]
        while not text.finish:
            token = self._picked(text, line, new)
            if not text.finish:
                line = (yield from self._run(hold, [token]))[-1]
                hold += 1
        written = self._tokenizer.decode(text.tokens)
        if written.strip() and self._method.suffix in written and not self._repeats(text.tokens):
            before, rest = parts, new
        if last:
            return before, rest
        begin = "".join(self._upto(self._text(rest), self._method.suffix))
        lead = [self._marks.prefix, *self._prompt[self._place :]]
        text = self._row.branch(with_logprobs=False)
        again = yield from self._filled(
            text, self._place, lead, self._encoded(begin) or self._begin
        )
        return (before, rest) if again is None else again

    def _run(self, hold: int, tokens: list[int]) -> Generator[_Ask, Logits, Logits]:
        if hold + len(tokens) > self._room:
            raise _Full
        return (yield _Ask(hold, tokens))

    def _picked(self, text: Row, line: Logits, parts: list[_Part]) -> int:
        """The next token of a text, which takes it."""
        token = text.pick(self._allowed(line))
        text.accept(token, None)
        parts.append((token, line if self._row.scored else None))
        return token

    def _allowed(self, line: Logits, middle: bool = False) -> Logits:
        """Logits [V] without the sentinels; a middle may end."""
        line = line.copy()
        line[list(self._marks[:3])] = -np.inf
        end = self._marks.end
        if end is not None and not middle and not self._row.ends(end):
            line[end] = -np.inf
        return line

    def _unsure(self, text: Row, line: Logits) -> bool:
        """Whether the rest is to be written now."""
        most = self._method.threshold
        if not most:
            return False
        scores = text.sampler.scores(self._allowed(line), text.seen)
        sure = 1 / float(np.exp(scores - scores.max()).sum(dtype=np.float64))
        if sure >= most:
            return False
        if self._method.randomly and text.rng.random() >= 1 - sure / most / 2:
            return False
        newest = self._tokenizer.decode(text.tokens).rpartition("\n")[2]
        return not self._method.suffix or self._method.suffix not in newest

    def _text(self, parts: list[_Part]) -> str:
        return self._tokenizer.decode([token for token, _ in parts])

    def _upto(self, text: str, what: str) -> tuple[str, str]:
        """A text up to its last `what`, and that; nothing where it does not have it."""
        head, found, _ = text.rpartition(what) if what else ("", "", "")
        return (head, found) if found else ("", "")

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False) if text else []

    def _repeats(self, tokens: list[int]) -> bool:
        data = self._tokenizer.decode(tokens).encode()
        return len(zlib.compress(data)) < REPEATS * len(data)
