"""Any-subset speculative decoding (ASSD, arXiv:2504.20456): an any-order model drafts several masks apart from each
other, and says in a second call what each is given those before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant
from accel.runtime.call import Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import begin_figures
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.loop import Base, check_rows
from accel.runtime.sample import Distribution
from accel.runtime.session.core import CHUNK
from accel.runtime.session.session import Session
from accel.runtime.verify import Chance
from accel.runtime.verify._residual import excess, ratio, residual


@dataclass(frozen=True)
class Assd(Base):
    """Masks of a prompt (`mask`) are filled from left to right, then tokens behind it: the new tokens of a row are
    those of its masks, in order, and those that follow. The tokens of a prompt see each other, a filled one sees the
    prompt and those filled before it.

    A call draws the next `drafts` tokens, each from what is known alone. In a second call each drafted token is a token
    for those after it, and a mask at each of their places says what it is by those before it. Drafts are accepted by
    the rule of speculative sampling; the first always is. So the tokens have the distribution of one token per call,
    and there are no more calls than tokens. `drafts` = 1 is one token per call.

    For models that were trained to predict a masked token from any set of others, its place in the text being that of
    the mask (`accel.ir.capture.arch.any_order` is one). Nothing is cached: a call takes the whole text, of which it
    has room for 512 tokens with the drafts.
    """

    drafts: int = option(15, least=1, most=256)
    mask: int = option(-1, least=-1)

    trees = True
    lacks = "a table of bigrams that drafts"
    relies = frozenset({Invariant.DECODE_WIDTH})
    searches = True  # plain decoding has a token see none behind it
    grade = "distribution-exact"
    small: ClassVar[Mapping[str, Any]] = {"drafts": 4, "mask": 3}

    def unfit(self, facts: Facts) -> str:
        if 0 <= self.mask < facts.vocab_size:
            return ""
        return (
            f"has tokens 0 to {facts.vocab_size - 1}, and loop.mask is {self.mask}; give the token that stands for "
            "what is to be filled"
        )

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        if not session.capabilities.trees:
            raise InputError(
                "loop = assd says what tokens see of each other, and this model's calls cannot "
                "(capabilities.trees); build it with this loop"
            )
        texts = [_Text.of(row, self.mask) for row in rows]
        for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
            most = min(CHUNK, session.max_context)
            if not row.finish and text.ids.size >= most:
                raise InputError(
                    f"loop = assd: row {i} has {text.ids.size} tokens with its answer, and a call has room for {most} "
                    "with a draft; give fewer"
                )
        begin_figures(rows)
        try:
            while live := [i for i, row in enumerate(rows) if not row.finish]:
                before = {i: len(rows[i].tokens) for i in live}
                self._round(session, {i: texts[i] for i in live}, rows)
                for i in live:
                    texts[i].known += len(rows[i].tokens) - before[i]
                    yield from ((i, token) for token in rows[i].tokens[before[i] :])
                check_rows(rows)
        finally:
            with suppress(InputError):  # of a session that a failed call closed
                session.rewind(0)

    def _round(self, session: Session, texts: Mapping[int, _Text], rows: Sequence[Row]) -> None:
        """A draft of each row, and what of it stands."""
        start, most = perf_counter(), min(CHUNK, session.max_context)
        counts = {
            i: min(self.drafts, text.places.size - text.known, most - text.ids.size)
            for i, text in texts.items()
        }
        said = _called(session, {i: text.draft(counts[i]) for i, text in texts.items()})
        drafts = dict[int, _Draft]()
        for i, text in texts.items():
            try:
                drafts[i] = self._drawn(rows[i], said[i])
                text.fill(drafts[i].tokens)
            except Exception as error:
                rows[i].fail(error)
        drafted = perf_counter()
        asks = {i: texts[i].oracle(counts[i]) for i in drafts if counts[i] > 1}
        lines = _called(session, asks) if asks else {}
        checked = perf_counter()
        for i, draft in drafts.items():
            row = rows[i]
            try:
                found = self._judged(row, draft, lines.get(i, said[i]))
                row.drafting.update(
                    rounds=1, drafted=len(draft.tokens), accepted=sum(stood for *_, stood in found)
                )
                row.accept_all((token, line) for token, line, _ in found)
            except Exception as error:
                row.fail(error)
            texts[i].fill(row.tokens[texts[i].known :])
        rows[0].clock(drafted - start, checked - drafted, perf_counter() - start)  # for all

    def _drawn(self, row: Row, logits: Logits) -> _Draft:
        """Tokens drawn apart from each other from logits [K,V]."""
        logits[:, self.mask] = -np.inf
        chance, seen = Chance(row.rng), row.seen
        laws = [row.sampler.distribution(line, seen) for line in logits]
        return _Draft([chance.draw(law) for law in laws], laws, logits[0].copy())

    def _judged(self, row: Row, draft: _Draft, logits: Logits) -> list[tuple[int, Logits, bool]]:
        """The tokens that come of a draft by logits [K,V] of each token after those before it: with these, and whether
        it was drafted.
        """
        logits[:, self.mask] = -np.inf
        found, chance, seen = [(draft.tokens[0], draft.first, True)], Chance(row.rng), row.seen
        for count in range(1, len(draft.tokens)):
            token, line = draft.tokens[count], logits[count]
            law = row.sampler.distribution(line, np.append(seen, draft.tokens[:count]))
            if not chance.accept(ratio(law, draft.laws[count], token)):
                found.append((chance.draw(rest(law, draft.laws[count])), line, False))
                break
            found.append((token, line, True))
        return found


def rest(law: Distribution, drafted: Distribution) -> Distribution:
    """What a rejected token is drawn from anew."""
    return residual(law, excess(law, drafted))


@dataclass
class _Draft:
    """Tokens, what each was drawn from, and the logits [V] of the first."""

    tokens: list[int]
    laws: list[Distribution]
    first: Logits


@dataclass(frozen=True, eq=False)
class _Call:
    """Tokens [T] of a row, their places, which of each other they see [T,T], and the columns [K] that are asked."""

    ids: Ints
    places: Ints
    sees: Any
    asked: Ints


@dataclass
class _Text:
    """A row's tokens with its masks. `places` [n]: of the masks that are to be filled, in order; `known`: how many of
    them are. `rank` [N]: the order of tokens, those of the prompt 0; masks that nothing fills have the last.
    """

    mask: int
    ids: Ints
    places: Ints
    rank: Ints
    known: int = field(default=0)

    @classmethod
    def of(cls, row: Row, mask: int) -> _Text:
        gaps = np.flatnonzero(row.prompt == mask)
        behind = row.prompt.size + np.arange(max(0, row.left - gaps.size))
        ids = np.append(row.prompt, np.full(behind.size, mask))
        places = np.append(gaps, behind)[: row.left]
        rank = np.where(ids == mask, ids.size + 1, 0)
        rank[places] = 1 + np.arange(places.size)
        return cls(mask, ids, places, rank)

    def fill(self, tokens: Sequence[int]) -> None:
        """Let the next masks hold these tokens, and those behind none."""
        self.ids[self.places[self.known :]] = self.mask
        self.ids[self.places[self.known : self.known + len(tokens)]] = tokens

    def _content(self, known: int) -> Any:
        """What the tokens see of each other [N,N] where so many masks are filled; a mask sees what is known, and
        itself.
        """
        filled = self.rank <= known
        sees = filled & (np.where(filled, self.rank, known)[:, None] >= self.rank)
        np.fill_diagonal(sees, True)
        return sees

    def draft(self, count: int) -> _Call:
        """The text; asked are the next `count` masks, each by what is known alone."""
        asked = self.places[self.known : self.known + count]
        return _Call(self.ids, np.arange(self.ids.size), self._content(self.known), asked)

    def oracle(self, count: int) -> _Call:
        """The text with `count` drafted tokens, and behind it a mask for each of these, which sees those before it."""
        size, places = self.ids.size, self.places[self.known : self.known + count]
        sees = np.eye(size + count, dtype=np.bool_)
        sees[:size, :size] = self._content(self.known + count)
        sees[size:, :size] = self.rank < self.rank[places][:, None]
        ids = np.append(self.ids, np.full(count, self.mask))
        return _Call(ids, np.append(np.arange(size), places), sees, size + np.arange(count))


def _called(session: Session, calls: Mapping[int, _Call]) -> dict[int, Logits]:
    """The logits [K,V] that each row asks for, by one call."""
    counts = np.zeros(session.batch, np.int64)
    for i, call in calls.items():
        counts[i] = call.ids.size
    width, most = int(counts.max()), max(call.asked.size for call in calls.values())
    ids, places = np.zeros((2, session.batch, width), np.int64)
    columns = np.zeros((session.batch, most), np.int64)
    sees = np.tile(np.eye(width, dtype=np.bool_), (session.batch, 1, 1))
    for i, call in calls.items():
        size = call.ids.size
        ids[i, :size], places[i, :size], sees[i, :size, :size] = call.ids, call.places, call.sees
        columns[i, : call.asked.size] = call.asked
    logits = session.guess(ids, sees, counts, columns, places)
    return {i: logits[i, : call.asked.size] for i, call in calls.items()}
