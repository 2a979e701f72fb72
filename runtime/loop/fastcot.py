"""FastCoT (arXiv:2311.08263): a rationale of a few calls, the last part of which is only guessed, then the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds, begin_figures
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base
from accel.runtime.loop.speculative import DRAFTS_RELY, reach
from accel.runtime.session.session import Session
from accel.runtime.tree import Tree
from accel.runtime.verify import Chance, Target, match


@dataclass(frozen=True)
class FastCoT(Base):
    """`passes` calls, that of the prompt included, generate a rationale by Jacobi iteration: each runs the newest token
    and `window` guesses, accepts what plain decoding would give, and replaces the other guesses. Then the guesses left
    are taken as they are, the text `answer` follows, and the rest is plain decoding. A row that ends, or writes
    `answer` itself, before that gets the tokens of plain decoding, as do all with `passes` enough. `window` = 0 is
    plain decoding, of a rationale of `passes` tokens.
    """

    window: int = option(8, least=0, most=256)
    passes: int = option(64, least=1)
    answer: str = ""

    grade = "approximate"
    relies = DRAFTS_RELY
    writes = True

    def check(self, tokenizer: Tokenizer | None) -> None:
        if self.answer and tokenizer is None:
            raise InputError(
                "loop.fastcot: answer is text, but this model has no tokenizer; build with tokenizer=…, or with "
                "answer = ''"
            )

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        tokenizer = None if context.model is None else context.model.tokenizer
        return _Rounds(session, rows, self, tokenizer if self.answer else None)


class _Rounds(Rounds):
    """`joins` is False: the passes of all rows are counted together."""

    def __init__(
        self, session: Session, rows: Sequence[Row], method: FastCoT, tokenizer: Tokenizer | None
    ):
        super().__init__(session, rows)
        self._method = method
        self._reach = reach(session.capabilities)
        self._chances = [Chance(row.rng) for row in rows]
        self._guesses: list[Ints] = [np.zeros(0, np.int64) for _ in rows]
        self._reasons = [True] * len(rows)  # whether a row still writes its rationale
        self._forced: list[Ints] = [np.zeros(0, np.int64) for _ in rows]  # to be taken as they are
        self._left = method.passes - 1
        self._answer: Ints = np.zeros(0, np.int64)
        self._found: list[_Finder] = []
        if tokenizer is not None:
            self._answer = np.array(tokenizer.encode(method.answer, special=False), np.int64)
            self._found = [_Finder(tokenizer, method.answer, row) for row in rows]
        begin_figures(rows)

    def run(self) -> list[tuple[int, int]]:
        live, rows, lengths = self.live, self._rows, self._session.lengths
        for i, found in enumerate(self._found):
            self._reasons[i] &= not found()
        if not self._left:
            for i in live:
                self._forced[i] = self._given(i)
            self._reasons = [False] * len(rows)
        room = self._session.room
        behind = {i: self._behind(i, int(room[i])) for i in live}
        before = {i: len(rows[i].tokens) for i in live}
        start = perf_counter()
        logits = self._called(behind)
        spent = perf_counter() - start
        try:
            for i, ids in behind.items():
                judge = self._judge if self._reasons[i] else self._take
                try:
                    judge(i, ids, logits[i])
                except Exception as error:
                    rows[i].fail(error)
        finally:  # what was judged stands, even where it is interrupted
            taken = [len(row.tokens) - before.get(i, len(row.tokens)) for i, row in enumerate(rows)]
            if (lengths + taken < self._session.lengths).any():
                self._session.rewind(np.minimum(lengths + taken, self._session.lengths))
        self._left = max(0, self._left - 1)
        rows[0].clock(0.0, spent, perf_counter() - start)  # for all
        return [(i, token) for i in live for token in rows[i].tokens[before[i] :]]

    def _given(self, i: int) -> Ints:
        """What a row is to take as it is: at the end of its rationale the guesses left, and the answer's beginning."""
        if not self._reasons[i]:
            return self._forced[i]
        guesses = self._guesses[i]
        over = [place for place, token in enumerate(guesses) if self._rows[i].ends(token)]
        return np.concatenate([guesses[: over[0] if over else None], self._answer])

    def _behind(self, i: int, room: int) -> Ints:
        """What a row's call runs after its newest token: guesses, or behind its rationale what it takes as it is."""
        row, most = self._rows[i], self._method.window
        size = min(self._reach, row.left - 1, room - 1)
        if not self._reasons[i]:
            return self._forced[i][:size]
        known = np.array([row.tokens[-1], *self._guesses[i]], np.int64)
        return np.pad(known, (0, most), mode="edge")[1 : 1 + min(most, size)]

    def _called(self, behind: dict[int, Ints]) -> Logits:
        """The logits [B,T,V] after each row's newest token and after each that follows."""
        counts = np.zeros(len(self._rows), np.int64)
        counts[list(behind)] = [1 + ids.size for ids in behind.values()]
        tokens = np.zeros((len(self._rows), int(counts.max())), np.int64)
        for i, ids in behind.items():
            tokens[i, : counts[i]] = [self._rows[i].tokens[-1], *ids]
        return self._session.run(tokens, None if (counts == tokens.shape[1]).all() else counts)

    def _judge(self, i: int, ids: Ints, logits: Logits) -> None:
        """Let a row take the guesses that stand, up to its end, and guess again."""
        row, tree, before = self._rows[i], Tree.chain(ids), len(self._rows[i].tokens)
        target = Target(tree, logits[: ids.size + 1], row.seen, row.sampler)
        verdict = match(target, self._chances[i])
        said = list[int]()  # after each guess that falls
        for node in range(len(verdict.path), ids.size):
            if target.ends(node):
                break
            said.append(int(target.scores(node).argmax()))
        row.accept_all(target.taken(verdict))
        stood = min(len(verdict.path), len(row.tokens) - before)
        self._guesses[i] = np.array(said, np.int64)
        row.drafting.update(rounds=ids.size > 0, drafted=ids.size, accepted=stood)
        if ids.size:
            row.drafts[ids.size, stood] += 1

    def _take(self, i: int, ids: Ints, logits: Logits) -> None:
        """Let a row take tokens as they are, up to its end, and then the next one of these or the one that it picks."""
        row, rest = self._rows[i], self._forced[i][ids.size :]
        self._forced[i] = rest[1:]
        for token, line in zip(ids.tolist(), logits, strict=False):
            row.accept(token, line)
            if row.finish:
                return
        line = logits[ids.size]
        row.accept(int(rest[0]) if rest.size else row.pick(line), line)


class _Finder:
    """Whether a row's new text has a text in it."""

    def __init__(self, tokenizer: Tokenizer, what: str, row: Row):
        self._stream, self._what, self._row = tokenizer.stream(), what, row
        self._read, self._text, self._found = 0, "", False

    def __call__(self) -> bool:
        for token in self._row.tokens[self._read :]:
            self._text = self._text[-len(self._what) :] + self._stream.push(token)
            self._found |= self._what in self._text
        self._read = len(self._row.tokens)
        return self._found
