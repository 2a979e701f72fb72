"""Prompts that have parts in common with earlier ones, wherever these lie: they are taken over, and what deviates most
is computed again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import numpy as np

from accel.ir.axis import host_method
from accel.ir.entries.blend import EARLY, telling
from accel.ir.entries.shift import SHIFT, keys_of, turned_of
from accel.ir.state import POSITIONS, Part
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Logits
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.kv.reuse._store import Piece, Store
from accel.runtime.rows import ByRow, PerRow
from accel.runtime.session.observers.observer import (
    Calls,
    CallWatcher,
    Capabilities,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
    Settled,
)
from accel.runtime.session.observers.token_log import Log
from accel.runtime.session.prompt._two_parts import TwoParts, Values

_NEVER = np.iinfo(np.int64).max
_ASKED = 256  # prompts that wait, of which the last answer is held


@dataclass(frozen=True)
class Reuse:
    """What a model reuses of prompts. names: the state values of each layer's keys and values. layer: the one that
    tells stale tokens.
    """

    method: Any
    store: Store
    names: Mapping[int, tuple[str, str]]
    layer: int
    _seen: dict[tuple[int, bytes], tuple[int, int]] = field(default_factory=dict, compare=False)

    def known(self, tokens: Ints, space: int) -> int:
        """How many tokens of a prompt [n] would be taken over, of what is stored now."""
        asked, version = tokens[:-1], self.store.version
        key = space, asked.tobytes()
        if self._seen.get(key, (-1, 0))[0] != version:
            if len(self._seen) >= _ASKED:
                self._seen.clear()
            self._seen[key] = version, self._count(asked, space)
        return self._seen[key][1]

    def _count(self, asked: Ints, space: int) -> int:
        matches = self.store.matches(space, asked, use=False)
        first = self.store.prefix(space, asked, use=False)
        begin = 0 if first is None else first.count
        rest = [piece.within(begin, asked.size) for piece in matches]
        found: list[Piece] = self.method.pieces(
            [piece for piece in rest if piece.count >= self.store.least]
        )
        return begin + sum(piece.count for piece in found)

    @property
    def late(self) -> list[str]:
        """The state values of the layers that do not run every token."""
        return [n for layer, both in self.names.items() if layer > self.layer for n in both]


@dataclass(frozen=True)
class _Watched:
    """Tokens of a row that were taken over and may be computed again: positions [n], and what leaves the first part of
    the model [n,E].
    """

    at: Ints
    stream: Values

    def where(self, chosen: Bools) -> _Watched:
        """Some of them."""
        return _Watched(self.at[chosen], self.stream[chosen])

    def then(self, other: _Watched) -> _Watched:
        """These, and others at later positions."""
        if not (self.at.size and other.at.size):
            return self if self.at.size else other
        return _Watched(
            np.concatenate([self.at, other.at]), np.concatenate([self.stream, other.stream])
        )


_NOTHING = _Watched(np.zeros(0, np.int64), np.zeros((0, 0), np.float32))


class PieceReuse(SessionObserver, CallWatcher, PromptRunner):
    """The tokens of the rows, and from which position on they hold what was not computed for them (`blended` [B]).

    A beginning that is stored is taken as it is. Other runs of tokens are turned to their new positions; the first
    layers run all the same, and the others run the tokens that are new or stale. Only what was computed without this is
    stored, so that errors do not add up. Some of what was taken over may be computed again later, before a token that
    reads much of it. `reused`: tokens that were not run, or not by all layers; `repaired`: those that were later.
    """

    log: Annotated[Log, ByRow(name="")]
    blended: PerRow
    _spaces: Annotated[list[int], ByRow()]
    _watched: Annotated[list[_Watched], ByRow()]

    capabilities = Capabilities(chunks=False)

    order = 40

    def __init__(self, reuse: Reuse, batch: int):
        self.reuse = reuse
        self.log = Log(batch)
        self.blended = np.full(batch, _NEVER)
        self.reused = self.repaired = 0
        self._spaces = [0] * batch
        self._watched = [_NOTHING] * batch

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the step is cut for it; all sessions of the model share one store."""
        if EARLY not in model.entries:
            return None
        method = host_method(model.tables, "kv.reuse", "cacheblend")
        names: dict[int, dict[Part, str]] = {}
        for value in model.state:
            if value.part in (Part.KEYS, Part.VALUES) and value.layer is not None:
                names.setdefault(value.layer, {})[value.part] = value.name
        both = {layer: (found[Part.KEYS], found[Part.VALUES]) for layer, found in names.items()}
        layer = telling(method.layer, len(model.facts.layers))
        reuse = Reuse(method, Store(method.tokens, method.least), both, layer)
        return ObserverFactory(
            lambda batch: cls(reuse, batch), lambda: reuse.store.stats, reuse.known
        )

    def call_room(self, lengths: Ints) -> Ints:
        """See SessionObserver. One token where some are watched, because it may change them for the next."""
        return np.array([1 if one.at.size else _NEVER for one in self._watched])

    @property
    def stats(self) -> dict[str, float]:
        """See SessionObserver."""
        return {"reused": self.reused}

    def adapted(self, numbers: Sequence[int]) -> None:
        """See SessionObserver. Rows of different adapters find nothing of one another."""
        self._spaces = list(numbers)

    def copy(self) -> Self:
        """See SessionObserver."""
        other = super().copy()
        other.reused = other.repaired = 0
        return other

    def numbers(self, backend: BackendSession) -> Arrays:
        """See SessionObserver."""
        counts = np.array([one.at.size for one in self._watched])
        rows = {f"{row}": one for row, one in enumerate(self._watched) if one.at.size}
        watched = {f"at.{row}": one.at for row, one in rows.items()}
        watched |= {f"stream.{row}": one.stream for row, one in rows.items()}
        return {**super().numbers(backend), "watched": counts, **watched}

    def restore(self, backend: BackendSession, numbers: Arrays, lengths: Ints) -> None:
        """See SessionObserver."""
        super().restore(backend, numbers, lengths)
        self._watched = [
            _Watched(numbers[f"at.{row}"], numbers[f"stream.{row}"]) if count else _NOTHING
            for row, count in enumerate(numbers["watched"].tolist())
        ]

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See SessionObserver."""
        self.log.note(tokens, positions)

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._forget(lengths)
        return False

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._forget(new_lengths)
        return False

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """Store prompts when they are whole."""
        if moment == "prompt":
            self._leave(backend, lengths)
        return None

    def close(self, backend: BackendSession, lengths: Ints) -> None:
        """Store what was generated too."""
        self._leave(backend, lengths)

    def admit(
        self, backend: BackendSession, tokens: Ints, counts: Ints | None, lengths: Ints
    ) -> tuple[Ints, Ints | None, Ints] | None:
        """See SessionObserver. What need not run at all is a stored beginning, of rows that held nothing; the last
        token is always left.
        """
        counts = np.full(len(tokens), tokens.shape[1]) if counts is None else counts
        known: dict[int, Piece] = {}
        for row in np.flatnonzero((lengths == 0) & (counts > 1)).tolist():
            asked = tokens[row, : counts[row] - 1]
            if (piece := self.reuse.store.prefix(self._spaces[row], asked)) is not None:
                known[row] = piece
        if not known:
            return None
        found = np.array([known[row].count if row in known else 0 for row in range(len(tokens))])
        _lay(backend, known, lengths, found)
        columns = np.arange(int(found.max()))
        self.log.note(tokens[:, : columns.size], np.where(columns < found[:, None], columns, -1))
        self.reused += int(found.sum())
        left = counts - found
        places = np.minimum(found[:, None] + np.arange(int(left.max())), tokens.shape[1] - 1)
        return np.take_along_axis(tokens, places, 1), left, found

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits | None:
        """See SessionObserver. Where the last logits are asked for of tokens that are stored elsewhere, or where single
        tokens may read some that are watched.
        """
        counts = np.full(len(tokens), tokens.shape[1]) if counts is None else counts
        if tokens.shape[1] == 1 and any(one.at.size for one in self._watched):
            return self._repair(calls, tokens, counts)
        found = self._found(tokens, counts) if last_only else {}
        if not found:
            return None
        start = time.perf_counter()
        call = _Blend(calls, self.reuse, tokens, counts, found)
        try:
            logits, blended, watched = call.run()
        except BaseException:
            call.give_up()
            raise
        self.blended = np.minimum(self.blended, blended)
        self.reused += call.reused
        self._watched = [
            one.then(watched[row]) if row in watched else one
            for row, one in enumerate(self._watched)
        ]
        calls.count(call.made, int(counts.sum()), start)
        calls.heard(tokens, call.positions)
        return logits

    def _found(self, tokens: Ints, counts: Ints) -> dict[int, list[Piece]]:
        """The pieces of rows that have some; the last token is never of one."""
        method, found = self.reuse.method, {}
        for row in np.flatnonzero(counts > method.least).tolist():
            asked = tokens[row, : counts[row] - 1]
            if matches := self.reuse.store.matches(self._spaces[row], asked):
                found[row] = method.pieces(matches)
        return found

    def _repair(self, calls: Calls, tokens: Ints, counts: Ints) -> Logits:
        """Run a token [B,1], and before it those watched ones that it reads most, as the method says."""
        start = time.perf_counter()
        call = TwoParts(calls, self.reuse.late, tokens, counts)
        try:
            stream, drawn = call.early(call.positions >= 0)
            share = drawn / np.maximum(drawn.sum(1, keepdims=True), 1e-9)
            chosen = [
                self.reuse.method.repaired(share[row, one.at] * (counts[row] > 0))
                for row, one in enumerate(self._watched)
            ]
            again = [one.where(which) for one, which in zip(self._watched, chosen, strict=True)]
            for row, one in enumerate(again):
                if one.at.size:  # rows that were copies are no longer, from there on
                    calls.set_length(row, int(one.at[0]))
                    calls.set_length(row, int(call.first[row]))
            own = [
                _Watched(p[: int(n)], s[: int(n)])
                for p, s, n in zip(call.positions, stream, counts, strict=True)
            ]
            both = [one.then(new) for one, new in zip(again, own, strict=True)]
            logits = call.late([one.at for one in both], [one.stream for one in both])
        except BaseException:
            call.give_up()
            raise
        self.repaired += sum(one.at.size for one in again)
        self._watched = [
            one.where(~which) for one, which in zip(self._watched, chosen, strict=True)
        ]
        calls.count(call.made, int(counts.sum()), start)
        calls.heard(tokens, call.positions)
        return logits

    def _forget(self, lengths: Ints) -> None:
        """Rows go back to these lengths; where no token is left that was taken over, later ones are computed."""
        self.blended = np.where(lengths <= self.blended, _NEVER, self.blended)
        pairs = zip(self._watched, lengths, strict=True)
        self._watched = [one.where(one.at < length) for one, length in pairs]

    def _leave(self, backend: BackendSession, lengths: Ints) -> None:
        """Store the rows, as far as they were computed."""
        buffers = backend.buffers()
        names = [name for both in self.reuse.names.values() for name in both]
        for row, count in enumerate(np.minimum(lengths, self.blended).tolist()):
            tokens = self.log.ids[row, :count]

            def arrays(row: int = row, count: int = count) -> Arrays:
                return {name: buffers[name][row][:, :count].copy() for name in names}

            self.reuse.store.add(self._spaces[row], tokens, arrays)


class _Blend(TwoParts):
    """One call in which some rows have pieces."""

    def __init__(
        self,
        calls: Calls,
        reuse: Reuse,
        tokens: Ints,
        counts: Ints,
        pieces: Mapping[int, list[Piece]],
    ):
        super().__init__(calls, reuse.late, tokens, counts)
        self.reuse, self.pieces = reuse, pieces
        self.columns = {  # of the reused tokens of a row
            row: np.concatenate([np.arange(p.start, p.start + p.count) for p in found])
            for row, found in pieces.items()
        }
        self.reused = 0

    def run(self) -> tuple[Logits, Ints, dict[int, _Watched]]:
        """The logits [B,1,V] of the last tokens; from which position on rows hold what was taken over [B]; and what of
        that is watched.
        """
        old = self._turned()
        new = self.positions >= 0
        for row, columns in self.columns.items():
            new[row, columns] = False
        stream, drawn = self.early(new)
        blended = np.full(len(self.tokens), _NEVER)
        watched: dict[int, _Watched] = {}
        runs = self.positions >= 0
        for row, columns in self.columns.items():
            deviation = self._deviation(old, row)
            stays = ~self.reuse.method.stale(deviation, drawn[row, self.first[row] + columns])
            runs[row, columns[stays]] = False
            self._keep(old, row, stays)
            if stays.any():
                blended[row] = self.first[row] + columns[stays][0]
            self.reused += int(stays.sum())
            later = columns[stays][self.reuse.method.watched(deviation[stays])]
            watched[row] = _Watched(self.first[row] + later, stream[row, later])
        picked = [np.flatnonzero(one) for one in runs]
        at = [start + columns for start, columns in zip(self.first, picked, strict=True)]
        return self.late(at, [s[c] for s, c in zip(stream, picked, strict=True)]), blended, watched

    def _turned(self) -> Arrays:
        """Keys, turned to their new positions, and values of the reused tokens [B,G,S,D], by their names."""
        batch, most = len(self.tokens), max(c.size for c in self.columns.values())
        delta = np.zeros((batch, most), np.int64)
        found: Arrays = {}
        for row, pieces in self.pieces.items():
            end = 0
            for piece in pieces:
                span = slice(end, end := end + piece.count)
                delta[row, span] = self.first[row] + piece.start - piece.offset
                for name, array in piece.stored.arrays.items():
                    if name not in found:
                        shape = (batch, array.shape[0], most, array.shape[2])
                        found[name] = np.zeros(shape, array.dtype)
                    found[name][row, :, span] = array[:, piece.offset : piece.offset + piece.count]
        given: Arrays = {"delta": delta}
        given |= {keys_of(layer): found[keys] for layer, (keys, _) in self.reuse.names.items()}
        out = self.calls.backend.part(SHIFT.name, given)
        turned = {k: out[turned_of(layer)] for layer, (k, _) in self.reuse.names.items()}
        return {**found, **turned}

    def _deviation(self, old: Arrays, row: int) -> Values:
        """The squared distance [n] of fresh keys and values of a row's reused tokens from the old ones."""
        buffers, columns = self.calls.backend.buffers(), self.columns[row]
        found = np.zeros(columns.size, np.float32)
        for name in self.reuse.names[self.reuse.layer]:
            new = buffers[name][row][:, self.first[row] + columns]
            found += np.square(new - old[name][row, :, : columns.size]).sum((0, 2))
        return found

    def _keep(self, old: Arrays, row: int, stays: Bools) -> None:
        """Let the later layers hold what stays as it is."""
        buffers, slots = self.calls.backend.buffers(), self.first[row] + self.columns[row][stays]
        for name in self.reuse.late:
            buffers[name][row][:, slots] = old[name][row, :, : stays.size][:, stays]


def _lay(
    backend: BackendSession, known: Mapping[int, Piece], lengths: Ints, matched_lengths: Ints
) -> None:
    """Let rows hold what is known of them, and others what they held."""
    buffers, ends = backend.buffers(), np.maximum(lengths, matched_lengths)
    columns = np.arange(int(ends.max()))
    new: Arrays = {POSITIONS: np.where(columns < ends[:, None], columns, -1)}
    example = next(iter(known.values()))
    for name, array in example.stored.arrays.items():
        shape = (len(lengths), array.shape[0], columns.size, array.shape[2])
        new[name] = np.zeros(shape, array.dtype)
        for row, end in enumerate(ends.tolist()):
            if row in known:
                new[name][row, :, :end] = known[row].stored.arrays[name][:, :end]
            elif end:
                new[name][row, :, :end] = buffers[name][row][:, :end]
    backend.put(new)
