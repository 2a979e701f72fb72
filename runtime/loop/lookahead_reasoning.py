"""Lookahead Reasoning (arXiv:2506.19830): a draft model writes steps of text ahead; the model writes each of them, too,
all at once, and a judge says whether they mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from accel.ir.axis import count
from accel.ir.errors import InputError, RecipeError
from accel.ir.invariants import Invariant
from accel.runtime.backends.protocol import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.judge import Judge
from accel.runtime.decode.rounds import Rounds, begin_figures
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base
from accel.runtime.loop._branches import leave
from accel.runtime.loop.speculative import DRAFTS_RELY
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower, second

BLANK_LINE = "\n\n"


@dataclass(frozen=True)
class LookaheadReasoning(Base):
    """A step is text up to a blank line, of at most `step_tokens` tokens. In a round the draft model writes `steps` of
    them, one after the other, and the model writes each one itself, behind the drafted ones before it, and one more: so
    many rows of a session. Drafted steps stand up to the first that the request's judge refuses, where the model's own
    takes its place. Steps of the same tokens are not asked about; without a judge, those stand that differ in blanks
    and case alone. With a judge that says no the output is that of plain decoding, also when sampling.
    """

    steps: int = count(4, most=32)
    step_tokens: int = count(100, most=1024)

    asks = {"draft": ""}
    relies = DRAFTS_RELY | {Invariant.DRAFT_MODEL}
    grade = "approximate"
    judges = True
    weighs = False

    def __post_init__(self) -> None:
        for name in ("steps", "step_tokens"):
            if getattr(self, name) < 1:
                raise RecipeError(
                    f"loop.lookahead-reasoning: {name} is {getattr(self, name)}; give at least 1"
                )

    def check(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise InputError(
                "loop.lookahead-reasoning: steps are text, but this model has no tokenizer; build with tokenizer="
            )

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        draft_model, model = second(context, self), context.model
        assert model is not None and model.tokenizer is not None, "checked"
        follower = Follower(draft_model, len(rows))
        return _Rounds(session, rows, self, model.tokenizer, follower, context.judge)


@dataclass
class _Step:
    """A step that a row writes, from the tokens that it has on."""

    row: Row
    tokenizer: Tokenizer
    most: int
    start: int = field(init=False)
    whole: bool = field(init=False)

    def __post_init__(self) -> None:
        self.start, self.whole = len(self.row.tokens), bool(self.row.finish)
        self._stream, self._text = self.tokenizer.stream(), ""

    def accept(self, token: int, logits: Logits | None) -> None:
        """Let the row take the step's next token; logits [V] as in `Row.accept`."""
        self.row.accept(token, logits)
        self._text = (self._text + self._stream.push(token)).lstrip()  # blanks before it end none
        full = len(self.row.tokens) - self.start == self.most
        self.whole = bool(self.row.finish) or full or BLANK_LINE in self._text

    @property
    def tokens(self) -> list[int]:
        return self.row.tokens[self.start :]


@dataclass
class _Draft:
    """Drafted `tokens` of a row; `ends`: how many of them each step ends with."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def step(self, number: int) -> list[int]:
        """The tokens of a step."""
        return self.tokens[self.ends[number - 1] if number else 0 : self.ends[number]]


@dataclass
class _Group:
    """What a row may go on with: way k takes k drafted steps and what the model writes then. `stood`: steps that the
    judge let stand so far; `chosen`: the way, once it is known.
    """

    draft: _Draft
    ways: list[_Step]
    stood: int = 0
    chosen: int | None = None


class _Rounds(Rounds):
    """`joins` is False: a round gives each row several of the session."""

    def __init__(
        self, session: Session, rows: Sequence[Row], method: LookaheadReasoning, tokenizer: Tokenizer,
        follower: Follower, judge: Judge | None,
    ):  # fmt: skip
        super().__init__(session, rows)
        self._method = method
        self._tokenizer, self._follower, self._judge = tokenizer, follower, judge
        begin_figures(rows)

    def close(self) -> None:
        self._follower.close()

    def run(self) -> list[tuple[int, int]]:
        rows, live, held = self._rows, self.live, self._session.lengths
        before = {i: len(rows[i].tokens) for i in live}
        start = perf_counter()
        drafts = self._drafted(live)
        drafted = perf_counter()
        sizes = np.ones(len(rows), np.int64)
        try:
            sizes[live] = [1 + len(drafts[i].ends) for i in live]
            lines = self._read(drafts, sizes)
            groups = {i: self._ways(i, draft, lines.get(i)) for i, draft in drafts.items()}
            chosen = self._written(groups, sizes)
        except BaseException:  # nothing was taken: the session holds what it did
            whole = self._session.batch == sizes.sum()
            with suppress(InputError):  # of a session that a failed call closed
                leave(self._session, sizes if whole else np.ones_like(sizes), held)
            raise
        self._session.select(chosen)
        for i, group in groups.items():
            assert group.chosen is not None
            rows[i].follow(group.ways[group.chosen].row)
            rows[i].rng = group.ways[group.chosen].row.rng
            ends = [0, *group.draft.ends]
            rows[i].drafting.update(
                rounds=len(ends) > 1, drafted=ends[-1], accepted=ends[group.chosen]
            )
        end = perf_counter()
        rows[0].clock(drafted - start, end - drafted, end - start)  # for all
        return [(i, token) for i in live for token in rows[i].tokens[before[i] :]]

    def _drafted(self, live: list[int]) -> dict[int, _Draft]:
        """What the draft model writes behind each row; a step that there is no room to end is left out."""
        rows = self._rows
        drafts = {i: _Draft() for i in live}
        most = {i: self._follower.most(rows[i].seen.size, rows[i].left) for i in live}
        steps = {
            i: self._step(rows[i].branch(deepcopy(rows[i].rng), told=False))
            for i in live
            if most[i] > 0
        }
        if not steps:
            return drafts
        ids = {i: rows[i].seen for i in steps}
        logits = self._follower.follow(ids, {i: each.size for i, each in ids.items()})
        while True:
            new = dict[int, int]()
            for i in list(steps):
                step, draft = steps[i], drafts[i]
                new[i] = step.row.pick(self._whole(logits[i, 0]))
                step.accept(new[i], None)
                draft.tokens.append(new[i])
                if step.whole:
                    draft.ends.append(len(draft.tokens))
                    steps[i] = self._step(step.row)
                over = step.row.finish or len(draft.ends) == self._method.steps
                if over or len(draft.tokens) == most[i]:
                    del steps[i], new[i]
            if not steps:
                return drafts
            logits = self._follower.run({i: np.array([token]) for i, token in new.items()})

    def _whole(self, logits: Logits) -> Logits:
        """Logits [V] of the target's tokens; those that the draft model lacks never come."""
        found = np.full(self._session.vocab_size, -np.inf, np.float32)
        size = min(found.size, logits.size)
        found[:size] = logits[:size]
        return found

    def _read(self, drafts: Mapping[int, _Draft], sizes: Ints) -> dict[int, Logits]:
        """Let the session have a row for each way, which holds its drafted steps but for the last token: the logits
        [n,V] that each drafted token of a row follows from, where they are told.

        The drafted steps are run once, and rewound for the ways that take fewer; by each way, where the session does
        not go back any number of tokens.
        """
        session, first, last = self._session, sizes.cumsum() - sizes, sizes.cumsum() - 1
        ends, of = np.zeros(int(sizes.sum()), np.int64), np.repeat(np.arange(sizes.size), sizes)
        for i, draft in drafts.items():
            ends[first[i] : last[i] + 1] = [0, *draft.ends]
        alone = session.capabilities.back is not None
        held = session.lengths
        if alone:
            session.select(of)
            logits = self._run(
                {n: drafts.get(i, _Draft()) for n, i in enumerate(of.tolist())}, of, ends
            )
        else:
            logits = self._run(drafts, np.arange(sizes.size), ends[last])
            session.select(of)
            if (held[of] + ends < session.lengths).any():
                session.rewind(held[of] + ends)
        if logits is None:
            return {}
        return {i: logits[last[i] if alone else i, : ends[last[i]]] for i in drafts}

    def _run(self, drafts: Mapping[int, _Draft], of: Ints, counts: Ints) -> Logits | None:
        """Run so many tokens [B], each row's newest and the drafted ones behind it, of which row of the loop a row of
        the session is `of` [B]: the logits [B,T,V], where they are told.
        """
        told = any(row.scored for row in self._rows)
        tokens = np.zeros((counts.size, int(counts.max())), np.int64)
        for n, draft in drafts.items():
            ids = [self._rows[of[n]].tokens[-1:], draft.tokens]
            tokens[n, : counts[n]] = np.concatenate(ids)[: counts[n]]
        parts, start = list[Logits](), 0
        while start < tokens.shape[1]:
            wide = int(self._session.room.min())
            part = tokens[:, start : start + wide]
            lengths = np.clip(counts - start, 0, part.shape[1])
            parts.append(self._session.run(part, lengths, last_only=not told))
            start += wide
        return np.concatenate(parts, axis=1) if told and parts else None

    def _ways(self, i: int, draft: _Draft, lines: Logits | None) -> _Group:
        """The ways that a row may go; lines [n,V]: what each drafted token follows from."""
        row, ways = self._rows[i], list[_Step]()
        for end in [0, *draft.ends]:
            way = row.branch(deepcopy(row.rng))
            if not row.sampler.greedy:
                way.rng.random(end)  # what plain decoding draws for these tokens
            for place, token in enumerate(draft.tokens[:end]):
                way.accept(token, None if lines is None else lines[place])
            ways.append(self._step(way))
        return _Group(draft, ways)

    def _written(self, groups: Mapping[int, _Group], sizes: Ints) -> Ints:
        """Let the model write all ways that may be chosen; the rows [B] of the session, which has one for each way,
        that hold those chosen.
        """
        session, first, ways = self._session, sizes.cumsum() - sizes, int(sizes.sum())
        for group in groups.values():
            self._choose(group)
        while due := self._due(groups):
            column, counts = np.zeros((ways, 1), np.int64), np.zeros(ways, np.int64)
            for i, k in due:
                column[first[i] + k, 0] = groups[i].ways[k].row.tokens[-1]
                counts[first[i] + k] = 1
            logits = session.run(column, None if counts.all() else counts)[:, 0]
            for i, k in due:
                step, line = groups[i].ways[k], logits[first[i] + k]
                step.accept(step.row.pick(line), line)
            for group in groups.values():
                self._choose(group)
        for i, group in groups.items():
            assert group.chosen is not None
            first[i] += group.chosen
        return first

    def _due(self, groups: Mapping[int, _Group]) -> list[tuple[int, int]]:
        """The ways (row, number) that the next call goes on with: all that may be chosen, or the judge is to see."""
        return [
            (i, k)
            for i, group in groups.items()
            for k, step in enumerate(group.ways)
            if group.chosen is None and k >= group.stood and not step.whole
        ]

    def _choose(self, group: _Group) -> None:
        """Judge the steps of a row in their order, as far as the model has written them; each is asked about once."""
        while group.chosen is None and group.ways[group.stood].whole:
            k = group.stood
            last = k == len(group.draft.ends)
            if last or not self._same(group.draft.step(k), group.ways[k].tokens):
                group.chosen = k
            else:
                group.stood += 1

    def _same(self, drafted: list[int], own: list[int]) -> bool:
        """Whether a drafted step may stand for the model's own."""
        if drafted == own:
            return True
        one, other = self._tokenizer.decode(drafted), self._tokenizer.decode(own)
        if self._judge is not None:
            return self._judge(one, other)
        return "".join(one.split()).lower() == "".join(other.split()).lower()

    def _step(self, row: Row) -> _Step:
        return _Step(row, self._tokenizer, self._method.step_tokens)
