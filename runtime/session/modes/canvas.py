"""What a session knows of a model that sees both ways: tokens are written over while those around them stay."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from accel.ir.diffusion import Diffusion
from accel.ir.errors import InputError
from accel.ir.paths import Paths
from accel.ir.picks import CHOSEN, NONE, Picks
from accel.runtime.backends.layer_inputs import every_row, some_rows
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Logits
from accel.runtime.inputs.calls import call_tokens
from accel.runtime.inputs.ints import Ints, as_ints
from accel.runtime.rows import ByRow, PerRow
from accel.runtime.session.observers.observer import (
    Calls,
    Capabilities,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
)


class CanvasState(SessionObserver, PromptRunner):
    """Slots that may be in sight. Slot i of a row holds token `places[i]`, and its tokens see those after them too.

    What a token is to others, its keys and values, is of when it was last written: `write` tells those of a call
    what the row holds at that time, and those outside of it nothing. A call is never cut, so that its tokens see
    each other.

    A call writes slots side by side, and attention goes by positions. So tokens that lie apart are brought together
    first: they get slots next to each other, and tokens that lay there go where those were.
    """

    filled: PerRow  # tokens, and those forgotten since
    places: Annotated[Ints, ByRow(fill=-1)]  # [B,W], as far as a row holds tokens

    rewrites = True
    capabilities = Capabilities(width=1, chunks=False)  # rows of a call see each other

    def __init__(
        self,
        diffusion: Diffusion | None,
        batch: int,
        paths: Paths | None = None,
        leaves_out: Picks | None = None,
    ):
        self.diffusion, self.paths, self.leaves_out = diffusion, paths, leaves_out
        self.filled = np.zeros(batch, np.int64)
        self.places = np.zeros((batch, 0), np.int64)

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Of models that fill masks, and of those that embed and see both ways."""
        facts = model.facts
        if not facts.both_ways:
            return None
        return ObserverFactory(lambda n: cls(facts.diffusion, n, facts.paths, facts.picks))

    @property
    def mask(self) -> int | None:
        """The id that stands where a token is not known; None: there is none."""
        return None if self.diffusion is None else self.diffusion.mask

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver: what stays goes into the first slots."""
        moves = _Moves()
        for row in np.flatnonzero(new_lengths < lengths).tolist():
            stay = int(new_lengths[row])
            held = self.places[row, : lengths[row]]
            moves.add(
                row,
                held,
                np.flatnonzero(held[:stay] >= stay),
                stay + np.flatnonzero(held[stay:] < stay),
            )
        moves.make(backend)
        return False

    def write(
        self, calls: Calls, tokens: Any, at: Any, lengths: Any, rows: Any, picks: Any = None
    ) -> Logits:
        """See `Session.write`."""
        before, where = calls.lengths, as_ints(at, "at")
        if where.ndim < 2:
            first = np.broadcast_to(where, before.shape)
            if (bad := (first < 0) | (first > before)).any():
                row = int(bad.argmax())
                raise InputError(
                    f"token {first[row]} of row {row} is written first, but the row holds {before[row]} tokens; give "
                    f"0..{before[row]}"
                )
            ids, real = call_tokens(tokens, lengths, first, calls.vocab_size, calls.max_context)
            places = first[:, None] + np.arange(ids.shape[1])
        else:
            none = np.zeros_like(before)
            ids, real = call_tokens(tokens, lengths, none, calls.vocab_size, calls.max_context)
            places = where
        counts = np.full(calls.batch, ids.shape[1], np.int64) if real is None else real
        if where.ndim > 1:
            _check_places(places, ids.shape, counts, before, calls.max_context)
        last = np.take_along_axis(places, np.maximum(counts - 1, 0)[:, None], 1)[:, 0]
        after = np.where(counts > 0, np.maximum(before, last + 1), before)
        if picks is None:
            return self._written(calls, ids, places, counts, after, rows)
        picked = self._picked(picks, places, counts, before)
        return self._written(calls, ids, places, counts, after, rows, picked)

    def _picked(self, picks: Any, places: Ints, counts: Ints, before: Ints) -> Ints:
        """The rows of a call that layers compute, checked, [B,K]: of `counts` [B] columns at these places."""
        found = as_ints(picks, "picks")
        if self.leaves_out is None:
            raise InputError(
                "every layer of this model computes all rows of a call; leave picks out, or build with a method of "
                "canvas that computes some of them, such as dllm-featcache"
            )
        if found.ndim != 2 or len(found) != len(counts) or not found.size:
            raise InputError(
                f"picks have shape {list(found.shape)}; give [{len(counts)}, K] columns"
            )
        for row, (own, count) in enumerate(zip(found, counts, strict=True)):
            chosen, named = int((own == CHOSEN).sum()), own[own >= 0]
            order = np.concatenate([np.full(chosen, CHOSEN), named])
            if not np.array_equal(
                own, np.pad(order, (0, own.size - order.size), constant_values=NONE)
            ):
                raise InputError(
                    f"the picks of row {row}, {own.tolist()}, must be -1, then columns, then -2"
                )
            if np.unique(named).size < named.size or (named >= count).any() or order.size > count:
                raise InputError(
                    f"the picks of row {row}, {own.tolist()}, must be some of its {count} columns, each once"
                )
            new = np.flatnonzero(places[row, :count] >= before[row])
            if (missing := np.setdiff1d(new, named)).size:
                raise InputError(
                    f"token {places[row, missing[0]]} of row {row} is new, and must be among its picks "
                    f"{own.tolist()}: column {missing[0]}"
                )
        return found

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits:
        """See SessionObserver: tokens behind those that each row holds; padding gets logits 0."""
        width, before = tokens.shape[1], calls.lengths
        full = np.full(calls.batch, width, np.int64) if counts is None else counts
        rows = np.maximum(full - 1, 0)[:, None] if last_only else None
        places = before[:, None] + np.arange(width)
        logits = self._written(calls, tokens, places, full, before + full, rows)
        if counts is not None:
            empty = counts[:, None] == 0 if last_only else np.arange(width) >= counts[:, None]
            logits[np.broadcast_to(empty, logits.shape[:2])] = 0
        return logits

    def _written(
        self,
        calls: Calls,
        ids: Ints,
        places: Ints,
        counts: Ints,
        after: Ints,
        rows: Any,
        picks: Ints | None = None,
    ) -> Logits:
        """One graph call, after one of padding where what rows have forgotten would stay in sight. Row i writes the
        first counts[i] of its tokens, whose places rise, and then holds after[i]. Layers compute `picks` [B,K].
        """
        width, before = ids.shape[1], calls.lengths
        columns = np.arange(width)
        if rows is None:
            rows = np.broadcast_to(columns, ids.shape)
        else:
            rows = _columns(rows, calls.batch, width)
        first = self._together(calls, places, counts, after)
        if (self.filled > np.maximum(after, first + width)).any():
            blank = np.zeros((calls.batch, int((self.filled - before).max())), np.int64)
            calls.step(blank, blank - 1, before, blank[:, :1], 0)
        positions = np.where(columns < counts[:, None], places, -1)
        real = int(counts.sum())
        if picks is None:
            logits = calls.step(ids, positions, first, rows, real)
        else:
            calls.backend.control(some_rows(picks))
            try:
                logits = calls.step(ids, positions, first, rows, real)
            finally:
                calls.backend.control(every_row())
        calls.lengths = self.filled = after
        return logits

    def _together(self, calls: Calls, places: Ints, counts: Ints, after: Ints) -> Ints:
        """Give the tokens of a call slots side by side, in their order: the first ones [B]. Those of a padded row are
        its last, because padding is written behind them.
        """
        more = max(0, int(after.max()) - self.places.shape[1])
        self.places = np.pad(self.places, ((0, 0), (0, more)), constant_values=-1)
        moves, first = _Moves(), np.zeros_like(counts)
        for row, (held, count, end) in enumerate(zip(calls.lengths, counts, after, strict=True)):
            own, its = places[row, :count], self.places[row, :end]
            inside = np.concatenate([np.isin(its[:held], own), np.ones(end - held, np.bool_)])
            last = end > held or count < places.shape[1]
            start = int(end - count) if last else _fullest(inside, int(count))
            stop = start + int(count)
            vacant = np.flatnonzero(inside)
            vacant = vacant[(vacant < start) | (vacant >= stop)]
            moves.add(row, its, vacant, start + np.flatnonzero(~inside[start:stop]))
            its[start:stop] = own
            first[row] = start
        moves.make(calls.backend)
        return first


class _Moves:
    """Tokens that go to other slots."""

    def __init__(self) -> None:
        self._moves: list[tuple[Ints, Ints, Ints]] = []

    def add(self, row: int, places: Ints, to: Ints, source: Ints) -> None:
        """What slots `source` [n] of a row hold goes to slots `to` [n]; `places`: its places by slot, which follow."""
        if to.size:
            places[to] = places[source]
            self._moves.append((np.full(to.size, row), to, source))

    def make(self, backend: BackendSession) -> None:
        """All of them at once."""
        if self._moves:
            rows, to, source = map(np.concatenate, zip(*self._moves, strict=True))
            backend.rearrange(rows, to, source)


def _fullest(inside: Any, count: int) -> int:
    """Where so many slots begin that hold the most of those that are `inside` [n]."""
    sums = np.concatenate([[0], np.cumsum(inside)])
    return int((sums[count:] - sums[: sums.size - count]).argmax())


def _check_places(
    places: Ints, shape: tuple[int, ...], counts: Ints, before: Ints, max_context: int
) -> None:
    """Raise InputError unless the places of each row rise and leave none out behind the tokens that it holds."""
    if places.shape != shape:
        raise InputError(
            f"at has shape {list(places.shape)}; give {list(shape)}, as tokens have, or [{len(shape)}]"
        )
    for row, (its, count, held) in enumerate(zip(places, counts, before, strict=True)):
        own = its[:count]
        if count and own[0] < 0 or (np.diff(own) <= 0).any():
            raise InputError(
                f"the places of row {row}, at {own.tolist()}, must rise from 0 or more; sort its tokens by place"
            )
        new = own[own >= held]
        if (bad := new != held + np.arange(new.size)).any():
            raise InputError(
                f"row {row} holds {held} tokens, so token {new[bad][0]} cannot be written without token "
                f"{held + int(bad.argmax())}; write that one too"
            )
        if new.size and int(new[-1]) >= max_context:
            raise InputError(
                f"row {row} would hold {int(new[-1]) + 1} tokens; max_context is {max_context}. "
                "Give fewer tokens, rewind, or build with more: max_context=…"
            )


def _columns(rows: Any, batch: int, width: int) -> Ints:
    """Which columns get logits, checked, [B,N]."""
    found = as_ints(rows, "rows")
    if found.ndim != 2 or len(found) != batch or not found.size:
        raise InputError(
            f"rows have shape {list(found.shape)}; give [{batch}, N] columns of the call"
        )
    if int(found.min()) < 0 or int(found.max()) >= width:
        raise InputError(
            f"rows name columns {found.min()}..{found.max()} of a call of {width}; give 0..{width - 1}"
        )
    return found
