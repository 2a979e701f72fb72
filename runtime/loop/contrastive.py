"""Contrastive search (arXiv:2202.06417): the next token is likely, and its hidden state unlike those before."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.ir.taps import FINAL
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop import Base, check_rows
from accel.runtime.loop._branches import refuse_samples
from accel.runtime.loop.speculative import DRAFTS_RELY
from accel.runtime.session.observers.observer import CallWatcher
from accel.runtime.session.session import Session

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Contrastive(Base):
    """Of the `k` likeliest tokens that one is taken for which (1 - `alpha`) times its probability, less `alpha` times
    the largest cosine of its hidden state with that of a token before it, is largest; of equals the likelier one.
    Hidden states are those in front of the output head, behind the last norm; those of the prompt count.

    All candidates of a row run in one call, as siblings of a draft tree, of which one is kept: a token takes one call
    of `k` tokens, and no row is copied. `k` = 1 and `alpha` = 0 are greedy decoding. Requests that sample are refused.
    """

    k: int = option(4, least=1, most=64)
    alpha: float = option(0.6, least=0, most=1)

    grade = "approximate"  # other tokens than greedy decoding takes
    trees = True
    searches = True
    relies = DRAFTS_RELY | {Invariant.EVERY_TOKEN_RUNS}

    def taps(self, layers: int) -> Sequence[str]:
        return (FINAL,)

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        refuse_samples(rows, "contrastive", "takes the tokens that score best")
        if all(row.finish for row in rows):
            return
        session.rewind(0)  # of what it holds there are no hidden states
        states = _States([row.prompt.size + row.left for row in rows])
        session.listen(states)
        try:
            sizes = np.array([0 if row.finish else row.prompt.size for row in rows])
            prompts = np.zeros((len(rows), int(sizes.max())), np.int64)
            for ids, row, size in zip(prompts, rows, sizes, strict=True):
                ids[:size] = row.prompt[:size]
            logits = session.prompt(prompts, sizes)[:, 0]
            for row in rows:
                row.began = perf_counter()
            while not all(row.finish for row in rows):
                yield from self._round(session, rows, states, logits)
        finally:
            with suppress(InputError):  # of a session that a failed call closed
                session.unlisten(states)

    def _round(
        self, session: Session, rows: list[Row], states: _States, logits: Logits
    ) -> Iterator[tuple[int, int]]:
        """A token of each row that runs. `logits` [B,V]: those behind a row's tokens, before and after."""
        live = [i for i, row in enumerate(rows) if not row.finish]
        tried = {i: self._likeliest(rows[i], logits[i]) for i in live}
        counts = np.array([len(tried[i][0]) if i in tried else 0 for i in range(len(rows))])
        tokens = np.zeros((len(rows), int(counts.max())), np.int64)
        for i, (likely, _) in tried.items():
            tokens[i, : likely.size] = likely
        after, hidden, whole = _siblings(session, tokens, counts, live)
        taken, columns = list[tuple[int, int]](), np.zeros(len(rows), np.int64)
        for i, (likely, chances) in tried.items():
            near = states.nearest(i, hidden[i, : likely.size])
            columns[i] = np.argmax((1 - self.alpha) * chances - self.alpha * near)
            token = int(likely[columns[i]])
            try:
                rows[i].accept(token, logits[i])
            except Exception as error:
                rows[i].fail(error)
            else:
                taken.append((i, token))
        yield from taken
        check_rows(rows)
        goes = np.array([not row.finish for row in rows])
        if not goes.any():
            return
        first = np.arange(len(rows))
        logits[:] = after[first, columns]
        if not whole:
            columns, chosen = np.zeros_like(columns), tokens[first, columns][:, None]
            session.guess(chosen, np.ones((len(rows), 1, 1), np.bool_), goes.astype(np.int64))
        session.keep([[columns[i]] if goes[i] else [] for i in first])

    def _likeliest(self, row: Row, logits: Logits) -> tuple[Ints, Floats]:
        """The candidates [n] behind a row and their probabilities [n], the likeliest first."""
        scores = row.sampler.scores(logits, row.seen).astype(np.float64)
        likely = np.argsort(-scores, kind="stable")[: self.k]
        likely = likely[np.isfinite(scores[likely])]  # a request may ban tokens
        chances = np.exp(scores - scores.max())
        return likely, chances[likely] / chances.sum()


class _States(CallWatcher):
    """The hidden states of all tokens of each row, of length 1. `sizes`: most tokens of each."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes = sizes
        self._units: list[Floats] = []  # [S,E] of each row
        self._counts = np.zeros(len(sizes), np.int64)

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """See CallWatcher."""
        return (FINAL,)

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See CallWatcher."""
        states = extra[FINAL]
        if not self._units:
            self._units = [np.zeros((size, states.shape[2]), np.float32) for size in self._sizes]
        for i, places in enumerate(positions):
            real = places >= 0
            self._units[i][places[real]] = _unit(states[i, real])
        self._counts = np.maximum(self._counts, positions.max(1) + 1)

    def nearest(self, row: int, hidden: Floats) -> Floats:
        """The largest cosine of each of these states [n,E] with that of a token of the row, [n]."""
        found: Floats = (self._units[row][: self._counts[row]] @ _unit(hidden).T).max(0)
        return found


def _unit(states: Floats) -> Floats:
    length = np.linalg.norm(states, axis=1, keepdims=True)
    found: Floats = states / np.maximum(length, np.finfo(np.float32).tiny)
    return found


def _siblings(
    session: Session, tokens: Ints, counts: Ints, live: Sequence[int]
) -> tuple[Logits, Floats, bool]:
    """The logits [B,n,V] and hidden states [B,n,E] of tokens [B,n] that all come next, `counts` [B] of them real; and
    whether they were one call, which may be kept: near the end of the context they are several.
    """
    room = np.minimum(session.room, session.max_context - session.lengths)
    most = int(room[live].min())
    logits, hidden = list[Logits](), list[Floats]()
    for start in range(0, tokens.shape[1], most):
        part = tokens[:, start : start + most]
        alone = np.broadcast_to(np.eye(part.shape[1], dtype=np.bool_), (*part.shape, part.shape[1]))
        logits.append(session.guess(part, alone, np.clip(counts - start, 0, part.shape[1])))
        hidden.append(session.guessed[FINAL])
    return np.concatenate(logits, 1), np.concatenate(hidden, 1), len(logits) == 1
