"""Superposed decoding (arXiv:2405.18400): several drafts of a text from one row of calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import Base
from accel.runtime.loop._branches import leave, refuse_samples
from accel.runtime.session.session import Session
from accel.runtime.speculation.datastore import Datastore
from accel.runtime.speculation.texts import GAP

Floats = npt.NDArray[np.float64]
ORDERS = (0.01, 0.04, 0.15, 0.18, 0.12)  # weights of what followed a draft's last 1, 2, … tokens
HITS = 5000  # places of each shard that are looked at
UNKNOWN = -200.0  # log-probability of a draft whose last token the datastore does not know


@dataclass(frozen=True)
class Superposed(Base):
    """`drafts` texts go on from a prompt, and a request gets the most likely `n` of them. Each call takes one embedding
    for all: that of each draft's last token, weighted by the draft's probability among them. Of its logits, at a
    `temperature` that makes up for the mixture, the `most` likeliest tokens may follow any draft; the `drafts` best
    texts go on, and those that end are set aside.

    `datastore`: a folder from `tools/datastore.py`, which a build copies into the artifact. What followed a draft's
    last one to five tokens there then has a share `alpha` in the score of a token, which tells drafts apart; without
    one they get the same scores. One draft without a datastore is greedy decoding. Requests that sample are refused.
    """

    drafts: int = option(3, least=1, most=64)
    most: int = option(9, least=1, most=4096)
    temperature: float = option(0.06, above=0)
    alpha: float = option(0.54, least=0, below=1)
    datastore: str = ""

    grade = "approximate"
    searches = True
    embeds = gives_embeds = True
    takes = frozenset({"n"})
    files = ("datastore",)
    relies = frozenset({Invariant.EVERY_TOKEN_RUNS})

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> Datastore | None:
        if not self.datastore:
            return None
        digest = "" if tokenizer is None else tokenizer.digest
        folder = Path(self.datastore).expanduser()
        return Datastore.open(folder, "loop.superposed: datastore", facts.vocab_size, digest)

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        refuse_samples(rows, "superposed", "takes the most likely texts")
        of_prompt: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            of_prompt.setdefault(id(row.prompt), []).append(i)
        groups = [
            _Drafts(self, [rows[i] for i in places], context.store) for places in of_prompt.values()
        ]
        firsts = [places[0] for places in of_prompt.values()]
        session.select(firsts)
        session.rewind(0)  # what it holds may be no text
        sizes = np.array([group.row.prompt.size for group in groups])
        try:
            if any(group.alive for group in groups):
                self._decode(session, groups)
                for places, group in zip(of_prompt.values(), groups, strict=True):
                    best = group.best(len(places)) if group.ended else ()
                    for i, draft in zip(places, best, strict=False):
                        rows[i].follow(draft)
                        yield from ((i, token) for token in draft.tokens)
        finally:
            with suppress(InputError):  # of a session that a failed call closed
                held = session.lengths
                leave(session, np.ones(len(groups), np.int64), np.minimum(sizes, held))
                order = np.empty(len(rows), np.int64)
                for n, places in enumerate(of_prompt.values()):
                    order[places] = n
                session.select(order)

    def _decode(self, session: Session, groups: Sequence[_Drafts]) -> None:
        """Run prompts, and then a row of calls for each until its drafts have ended."""
        counts = np.array([group.row.prompt.size if group.alive else 0 for group in groups])
        prompts = np.zeros((len(groups), int(counts.max())), np.int64)
        for ids, group, count in zip(prompts, groups, counts, strict=True):
            ids[:count] = group.row.prompt[:count]
        logits = session.prompt(prompts, counts)[:, 0]
        for group in groups:
            for row in group.rows:
                row.began = perf_counter()
        while True:
            for group, line in zip(groups, logits, strict=True):
                if group.alive:
                    group.step(line)
            live = np.array([bool(group.alive) for group in groups])
            if not live.any():
                return
            widest = max(len(group.alive) for group in groups)
            last, weights = np.zeros((2, len(groups), widest))
            for n in np.flatnonzero(live).tolist():
                alive = groups[n].alive
                last[n, : len(alive)] = [draft.tokens[-1] for draft in alive]
                weights[n, : len(alive)] = groups[n].weights
            ids = last.astype(np.int64)
            mixed = np.einsum("gd,gde->ge", weights, session.embed(ids))[:, None]
            logits = session.run(ids[:, :1], live.astype(np.int64), embeds=mixed)[:, 0]


@dataclass(eq=False)
class _Drafts:
    """The drafts of one prompt. `alive`: those that go on, the most likely first, and `scores` of them; `ended`."""

    method: Superposed
    rows: list[Row]
    store: Datastore | None
    scores: Floats = field(default_factory=lambda: np.zeros(1))
    ended: list[tuple[float, Row]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.alive = [row.branch() for row in self.rows[:1] if not row.finish]
        self.count = max(self.method.drafts, len(self.rows))

    @property
    def row(self) -> Row:
        """Any of its rows: they have one prompt."""
        return self.rows[0]

    @property
    def weights(self) -> Floats:
        """What each draft has in the next embedding, [n]; their sum is 1."""
        found = np.exp(self.scores - self.scores.max())
        weights: Floats = found / found.sum()
        return weights

    def step(self, logits: Logits) -> None:
        """Take the logits [V] behind all drafts."""
        choices: list[tuple[float, int, int]] = []
        for n, (draft, score) in enumerate(zip(self.alive, self.scores, strict=True)):
            tokens, logs = self._continued(draft, logits)
            choices += [
                (float(score + log), n, int(t)) for t, log in zip(tokens, logs, strict=True)
            ]
        choices.sort(key=lambda one: (-one[0], one[1]))
        alive, scores = list[Row](), list[float]()
        for score, n, token in choices[: 2 * self.count]:
            draft = self.alive[n].branch()
            draft.accept(token, logits)
            if draft.finish:
                self.ended.append((score, draft))
            elif len(alive) < self.count:
                alive.append(draft)
                scores.append(score)
        self.ended = sorted(self.ended, key=lambda one: -one[0])[: self.count]
        self.alive, self.scores = alive, np.array(scores)
        if len(self.ended) == self.count and alive and scores[0] <= self.ended[-1][0]:
            self.alive = []  # scores only fall

    def best(self, count: int) -> list[Row]:
        """The most likely texts; where a request lets fewer be, some of them again."""
        return [self.ended[n % len(self.ended)][1] for n in range(count)]

    def _continued(self, draft: Row, logits: Logits) -> tuple[Ints, Floats]:
        """Tokens [n] that may follow a draft, and the log-probability [n] of each behind it."""
        method = self.method
        scores = draft.sampler.scores(logits, draft.seen).astype(np.float64) / method.temperature
        tokens = np.argsort(-scores, kind="stable")[: max(method.most, 2 * self.count)]
        tokens = tokens[np.isfinite(scores[tokens])]  # a request may ban tokens
        logs = scores[tokens] - scores[tokens[0]]
        logs -= np.log(np.exp(logs).sum())
        if self.store is None:
            return tokens, logs
        follows = self._followed(draft.text, tokens)
        if not follows.any():
            return tokens, (1 - method.alpha) * logs + UNKNOWN
        there = follows > 0
        mixed = (1 - method.alpha) * logs[there] + method.alpha * np.log(follows[there])
        return tokens[there], mixed

    def _followed(self, seen: Ints, tokens: Ints) -> Floats:
        """How often each token [n] followed the last tokens of a text in the datastore, [n]: shares, weighted."""
        assert self.store is not None
        found = np.zeros(tokens.size)
        for size, weight in enumerate(ORDERS, start=1):
            length, places = self.store.find(seen[-size:], HITS) if seen.size >= size else (0, seen)
            if length < size:
                break
            after = self.store.tokens[places[places < self.store.tokens.size]]
            after = after[after != GAP]
            if after.size:
                found += weight * (after[:, None] == tokens).mean(0)
        return found
