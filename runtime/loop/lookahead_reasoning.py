"""Lookahead Reasoning (arXiv:2506.19830): a draft model writes steps of text ahead; the model writes each of them, too,
all at once, and a judge says whether they mean the same.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import AccelError, InputError, RecipeError
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.judge import Judge
from accel.runtime.decode.rounds import Rounds, begin_figures
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base, check_text
from accel.runtime.loop._branches import leave
from accel.runtime.loop.speculative import DRAFTS_RELY
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower, second

BLANK_LINE = "\n\n"
MOST = 64  # steps of a round


@dataclass(frozen=True)
class LookaheadReasoning(Base):
    """A step is text up to a blank line, of at most `step_tokens` tokens. In a round the draft model writes `steps` of
    them, one after the other, and the model writes each one itself, behind the drafted ones before it, and one more: so
    many rows of a session. Drafted steps stand up to the first that the request's judge refuses, where the model's own
    takes its place. Steps of the same tokens are not asked about; without a judge, those stand that differ in blanks
    and case alone. With a judge that says no the output is that of plain decoding, also when sampling.

    `width`: steps that are drafted at each place, a tree of them; of those that may stand the first one does. The
    others are drawn with random numbers of their own or, of a greedy row, begin with less likely tokens.
    """

    steps: int = option(4, least=1, most=32)
    step_tokens: int = option(100, least=1, most=1024)
    width: int = option(1, least=1, most=8)

    lacks = "drafting while the model writes (they take turns)"
    asks = {"draft": ""}
    relies = DRAFTS_RELY | {Invariant.DRAFT_MODEL}
    grade = "approximate"
    takes = frozenset({"judge"})
    weighs = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (nodes := sum(self.width**level for level in range(1, self.steps + 1))) > MOST:
            raise RecipeError(
                f"{self.full_name}: width = {self.width} and steps = {self.steps} are {nodes} steps of a round, each a "
                f"row of the session; give smaller ones, for up to {MOST}"
            )

    def check(self, tokenizer: Tokenizer | None) -> None:
        check_text(tokenizer, "lookahead-reasoning: steps are")

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

    def pick(self, logits: Logits) -> None:
        """Let the row take what it picks. An error is of the way that it goes alone, which may not be chosen."""
        try:
            self.accept(self.row.pick(logits), logits)
        except Exception as error:
            self.row.fail(error)
            self.whole = True

    @property
    def tokens(self) -> list[int]:
        return self.row.tokens[self.start :]


@dataclass
class _Draft:
    """Drafted steps of a row, a tree: the `tokens` of step 1, 2, … and the step that each follows, 0 being the row."""

    tokens: list[list[int]] = field(default_factory=lambda: [[]])
    parents: list[int] = field(default_factory=lambda: [-1])

    def __len__(self) -> int:
        """The ways that the row may go: no step, or one and those before it."""
        return len(self.tokens)

    def add(self, parent: int, tokens: list[int]) -> int | None:
        """A step behind another one; None where there is the same."""
        if any(self.tokens[child] == tokens for child in self.children(parent)):
            return None
        self.tokens.append(tokens)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def children(self, step: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == step]

    def path(self, step: int) -> list[int]:
        """All tokens up to the end of a step."""
        return [*self.path(self.parents[step]), *self.tokens[step]] if step else []

    def within(self, step: int, above: int) -> bool:
        """Whether a step is this one or comes after it."""
        while step > above:
            step = self.parents[step]
        return step == above

    @property
    def branches(self) -> bool:
        return len(set(self.parents)) < len(self.parents)


@dataclass
class _Group:
    """What a row may go on with: way k takes the drafted steps up to step k and what the model writes then. `stood`:
    the step up to which the judge let them stand so far; `chosen`: the way, once it is known.
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
            sizes[live] = [len(drafts[i]) for i in live]
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
            way = group.ways[group.chosen].row
            rows[i].follow(way)
            rows[i].rng = way.rng
            if way.error is not None:
                rows[i].fail(way.error)
            rows[i].drafting.update(
                rounds=len(group.draft) > 1,
                drafted=sum(map(len, group.draft.tokens)),
                accepted=len(group.draft.path(group.chosen)),
            )
        end = perf_counter()
        rows[0].clock(drafted - start, end - drafted, end - start)  # for all
        return [(i, token) for i in live for token in rows[i].tokens[before[i] :]]

    def _drafted(self, live: list[int]) -> dict[int, _Draft]:
        """What the draft model writes behind each row."""
        rows, growths = self._rows, {i: self._growth(i) for i in live}
        drafts, asked = dict[int, _Draft](), dict[int, list[int]]()

        def further(i: int, logits: Logits | None) -> None:
            try:
                asked[i] = growths[i].send(logits)
            except StopIteration as end:
                drafts[i] = end.value

        for i in live:
            further(i, None)
        while asked:
            ids = {i: np.append(rows[i].seen, path) for i, path in asked.items()}
            # A draft may go back to the newest token, which is then run again.
            logits = self._follower.follow(ids, {i: rows[i].seen.size - 1 for i in asked})
            waiting, asked = asked, {}
            for i in waiting:
                further(i, self._whole(logits[i, 0]))
        return {i: drafts[i] for i in live}

    def _growth(self, i: int) -> Generator[list[int], Logits | None, _Draft]:
        """The draft of a row: asks for what follows tokens behind the row, and gets logits [V]. A step that there is no
        room to end, or that the request does not let end, is left out.
        """
        row, draft = self._rows[i], _Draft()
        most = self._follower.most(row.seen.size, row.left)

        def below(parent: int, row: Row, levels: int) -> Generator[list[int], Logits | None, None]:
            before = draft.path(parent)
            for rank in range(self._method.width if levels and not row.finish else 0):
                step = self._step(row.branch(_numbers(row, rank), with_logprobs=False))
                while not step.whole and len(before) + len(step.tokens) < most:
                    logits = yield [*before, *step.tokens]
                    assert logits is not None
                    others = rank if row.sampler.greedy and not step.tokens else 0
                    try:
                        token = _pick(step.row, logits, others)
                    except (
                        AccelError
                    ):  # the request lets no such token follow, or the draft has no numbers
                        break
                    step.accept(token, None)
                if step.whole and (new := draft.add(parent, step.tokens)) is not None:
                    yield from below(new, step.row, levels - 1)

        yield from below(0, row, self._method.steps)
        return draft

    def _whole(self, logits: Logits) -> Logits:
        """Logits [V] of the target's tokens; those that the draft model lacks never come."""
        found = np.full(self._session.vocab_size, -np.inf, np.float32)
        size = min(found.size, logits.size)
        found[:size] = logits[:size]
        return found

    def _read(self, drafts: Mapping[int, _Draft], sizes: Ints) -> dict[int, list[Logits]]:
        """Let the session have a row for each way, which holds its drafted steps but for the last token: of each way
        the logits [n,V] that its drafted tokens follow from, where they are told.

        Steps behind each other are run once, and rewound for the ways that take fewer; by each way, where there are
        several at a place or the session does not go back any number of tokens.
        """
        session, first, of = (
            self._session, sizes.cumsum() - sizes, np.repeat(np.arange(sizes.size), sizes),
        )  # fmt: skip
        paths: list[list[int]] = []
        for i, size in enumerate(sizes.tolist()):
            paths += [drafts[i].path(k) for k in range(size)] if i in drafts else [[]]
        ends = np.array([len(path) for path in paths])
        alone = session.capabilities.back is not None or any(d.branches for d in drafts.values())
        held = session.lengths
        if alone:
            session.select(of)
            logits = self._run(paths, of)
        else:
            longest = [paths[k] for k in first + sizes - 1]
            logits = self._run(longest, np.arange(sizes.size))
            session.select(of)
            if (held[of] + ends < session.lengths).any():
                session.rewind(held[of] + ends)
        if logits is None:
            return {}
        ways = {i: range(int(first[i]), int(first[i] + sizes[i])) for i in drafts}
        return {i: [logits[k if alone else i, : ends[k]] for k in ways[i]] for i in drafts}

    def _run(self, paths: list[list[int]], of: Ints) -> Logits | None:
        """Run each row's newest token and the drafted ones of its path behind it, but for the last, of which row of the
        loop a row of the session is `of` [B]: the logits [B,T,V], where they are told.
        """
        told = any(row.scored for row in self._rows)
        counts = np.array([len(path) for path in paths])
        tokens = np.zeros((counts.size, int(counts.max())), np.int64)
        for n in np.flatnonzero(counts):
            tokens[n, : counts[n]] = [self._rows[of[n]].tokens[-1], *paths[n][:-1]]
        parts, start = list[Logits](), 0
        while start < tokens.shape[1]:
            wide = int(self._session.room.min())
            part = tokens[:, start : start + wide]
            lengths = np.clip(counts - start, 0, part.shape[1])
            parts.append(self._session.run(part, lengths, last_only=not told))
            start += wide
        return np.concatenate(parts, axis=1) if told and parts else None

    def _ways(self, i: int, draft: _Draft, lines: list[Logits] | None) -> _Group:
        """The ways that a row may go; lines: of each way what its drafted tokens follow from, [n,V]."""
        row, ways = self._rows[i], list[_Step]()
        for k in range(len(draft)):
            way, path = row.branch(deepcopy(row.rng)), draft.path(k)
            if not row.sampler.greedy:
                way.rng.random(len(path))  # what plain decoding draws for these tokens
            for place, token in enumerate(path):
                way.accept(token, None if lines is None else lines[k][place])
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
                groups[i].ways[k].pick(logits[first[i] + k])
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
            if group.chosen is None and group.draft.within(k, group.stood) and not step.whole
        ]

    def _choose(self, group: _Group) -> None:
        """Judge the steps of a row in their order, as far as the model has written them; each is asked about once."""
        while group.chosen is None and group.ways[group.stood].whole:
            k, draft = group.stood, group.draft
            own, failed = group.ways[k].tokens, group.ways[k].row.error is not None
            children = () if failed else draft.children(k)
            stands = (c for c in children if self._same(draft.tokens[c], own))
            if (child := next(stands, None)) is None:
                group.chosen = k
            else:
                group.stood = child

    def _same(self, drafted: list[int], target_tokens: list[int]) -> bool:
        """Whether a drafted step may stand for the model's own."""
        if drafted == target_tokens:
            return True
        one, other = self._tokenizer.decode(drafted), self._tokenizer.decode(target_tokens)
        if self._judge is not None:
            return self._judge(one, other)
        return "".join(one.split()).lower() == "".join(other.split()).lower()

    def _step(self, row: Row) -> _Step:
        return _Step(row, self._tokenizer, self._method.step_tokens)


def _numbers(row: Row, rank: int) -> np.random.Generator:
    """The random numbers of a step that is drafted behind a row: the row's own for the first."""
    rng = deepcopy(row.rng)
    return rng if not rank else np.random.default_rng([rank, int(rng.integers(1 << 62))])


def _pick(row: Row, logits: Logits, rank: int) -> int:
    """The sampler's choice, or what it would choose without `rank` that are likelier."""
    for _ in range(rank):
        logits[row.pick(logits)] = -np.inf
    return row.pick(logits)
