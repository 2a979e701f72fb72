"""ATTS (arXiv:2509.15148): a draft model writes on by turns; where the model finds a turn unlikelier than most that it
was calibrated on, it writes a turn itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.ir.trained import Tensors
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.prompts import prompted
from accel.runtime.decode.rounds import begin_figures
from accel.runtime.decode.row import Row
from accel.runtime.decode.trained_part import Sizes, TrainedPart, sizes_of
from accel.runtime.loop import Base, check_rows
from accel.runtime.loop.speculative import DRAFTS_RELY
from accel.runtime.session.session import Session
from accel.runtime.speculation.follow import Follower, second


@dataclass(frozen=True)
class Atts(TrainedPart, Base):
    """The draft model goes on by up to `turn` tokens, which stay. The model reads them in one call; where their
    perplexity is above that of a share of `threshold` or more of the turns that it was calibrated on, it goes on by up
    to `turn` tokens itself. Of turns like those it takes over behind a share of 1 - `threshold`: behind every one at 0,
    behind none above 1. A turn that ends the answer is not asked about.

    `trained`: the file of these perplexities, from `accel-compile train atts MODEL --draft DRAFT`; empty: the one that
    a build finds for the two models.
    """

    turn: int = option(500, least=1, most=4096)
    threshold: float = option(0.6, least=0, most=2)
    trained: str = ""

    small: ClassVar[Mapping[str, Any]] = {"turn": 3}
    key: ClassVar[str] = "atts"
    models = ("model", "draft")
    asks = {"draft": ""}
    relies = DRAFTS_RELY | {Invariant.DRAFT_MODEL}
    grade = "approximate"  # most text is the draft model's
    searches = True
    weighs = False
    lacks = "turns of several answers at once without waiting for each other (rows of a batch take turns together)"

    @classmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """See TrainedPart."""
        size = sizes_of(tensors, "perplexities")
        return {"perplexities": (max(1, *size),) if len(size) == 1 else (1,)}

    def refuses(self, perplexity: float) -> bool:
        """Whether the model takes over behind a turn of this perplexity."""
        known = self.part["perplexities"]
        return float((known < perplexity).mean()) >= self.threshold

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        if all(row.finish for row in rows):
            return
        draft_model = second(context, self)
        begin_figures(rows)
        with closing(_Turns(session, rows, self, Follower(draft_model, len(rows)))) as turns:
            while turns.live:
                yield from turns.drafted()
                check_rows(rows)
                yield from turns.written(turns.taken_over())
                check_rows(rows)


class _Turns:
    """Of a group of rows. `session` holds all tokens of a row, or all but the last that it read."""

    def __init__(self, session: Session, rows: list[Row], method: Atts, follower: Follower):
        self._session, self._rows, self._method = session, rows, method
        self._follower = follower
        self._starts = [0] * len(rows)  # tokens that each row had before its turn
        self._after = prompted(session, rows)[:, 0].copy()  # behind what is held [B,V]

    @property
    def live(self) -> list[int]:
        """The rows that run."""
        return [i for i, row in enumerate(self._rows) if not row.finish]

    def close(self) -> None:
        """Let the session hold what rows have but for the last token."""
        with suppress(InputError):  # of a session that a failed call closed
            self._read({i: row.seen[:-1] for i, row in enumerate(self._rows) if row.tokens})
        self._follower.close()

    def drafted(self) -> Iterator[tuple[int, int]]:
        """A turn of the draft model for each row that runs: (row, token)."""
        self._starts = [row.seen.size for row in self._rows]
        left = {i: self._follower.most(self._starts[i], self._method.turn) for i in self.live}
        while going := [i for i, n in left.items() if n > 0 and not self._rows[i].finish]:
            logits = self._follower.follow({i: self._rows[i].seen for i in going})[:, 0]
            for i in going:
                left[i] -= 1
                yield from self._take(i, logits[i], None)

    def taken_over(self) -> list[int]:
        """The rows behind whose turns the model goes on: those that it refuses, and those that the draft model has no
        room for.
        """
        drafted = {i: self._rows[i].seen[self._starts[i] :] for i in self.live}
        first, held = self._after.copy(), self._session.lengths
        lines = self._read({i: self._rows[i].seen[:-1] for i, ids in drafted.items() if ids.size})
        found = []
        for i, ids in drafted.items():
            own = lines.get(i, first[:0])
            before = np.concatenate([first[i][None], own])[self._starts[i] - int(held[i]) :]
            refused = not ids.size or self._method.refuses(perplexity(before, ids))
            if ids.size:
                self._rows[i].drafting.update(
                    rounds=1, drafted=ids.size, accepted=0 if refused else ids.size
                )
            found += [i] if refused else []
        return found

    def written(self, rows: list[int]) -> Iterator[tuple[int, int]]:
        """A turn of the model for these rows: (row, token)."""
        for _ in range(self._method.turn):
            rows = [i for i in rows if not self._rows[i].finish]
            if not rows:
                return
            self._read({i: self._rows[i].seen for i in rows})
            for i in rows:
                yield from self._take(i, self._after[i], self._after[i])

    def _take(self, i: int, logits: Logits, said: Logits | None) -> Iterator[tuple[int, int]]:
        """Let a row take the token that it picks from logits [V]; `said`: as in `Row.accept`."""
        row = self._rows[i]
        try:
            token = row.pick(logits)
            row.accept(token, said)
        except Exception as error:
            row.fail(error)
        else:
            yield i, token

    def _read(self, rows: Mapping[int, npt.NDArray[np.int64]]) -> dict[int, Logits]:
        """Let rows hold these tokens [n], of which they hold the first: the logits [k,V] behind each new one."""
        held = self._session.lengths
        new = {i: ids[held[i] :] for i, ids in rows.items() if ids.size > held[i]}
        if not new:
            return {}
        counts = np.zeros(len(self._rows), np.int64)
        for i, ids in new.items():
            counts[i] = ids.size
        columns = np.zeros((counts.size, int(counts.max())), np.int64)
        for i, ids in new.items():
            columns[i, : ids.size] = ids
        whole = None if (counts == columns.shape[1]).all() else counts
        logits = self._session.run(columns, whole, last_only=False)
        found = {i: logits[i, : ids.size].copy() for i, ids in new.items()}
        for i, lines in found.items():
            self._after[i] = lines[-1]
        return found


def perplexity(logits: Logits, tokens: npt.NDArray[np.int64]) -> float:
    """Of tokens [n] by the logits [m,V] that they follow, m >= n."""
    lines = logits[: tokens.size].astype(np.float64)
    lines -= lines.max(1, keepdims=True)
    logs = lines[np.arange(tokens.size), tokens] - np.log(np.exp(lines).sum(1))
    return float(np.exp(-logs.mean()))
