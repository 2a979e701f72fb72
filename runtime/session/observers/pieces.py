"""Prompts that have parts in common with earlier ones, wherever these lie: they are taken over, and what deviates most
is computed again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from accel.ir.axis import host_method
from accel.ir.entries.blend import EARLY, LATE, telling
from accel.ir.entries.shift import SHIFT, keys_of, turned_of
from accel.ir.state import POSITIONS, Part
from accel.runtime.backends.protocol import Arrays, BackendSession, Logits
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.inputs.token_log import Log
from accel.runtime.session.observers._store import Piece, Store
from accel.runtime.session.observers.observer import (
    Calls,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Reuse:
    """What a model reuses of prompts. names: the state values of each layer's keys and values. layer: the one that
    tells stale tokens.
    """

    method: Any
    store: Store
    names: Mapping[int, tuple[str, str]]
    layer: int

    @property
    def late(self) -> list[int]:
        """The layers that do not run every token."""
        return [layer for layer in self.names if layer > self.layer]


class PieceReuse(SessionObserver):
    """The tokens of the rows, and from which position on they hold what was not computed for them (`blended` [B]).

    A beginning that is stored is taken as it is. Other runs of tokens are turned to their new positions; the first
    layers run all the same, and the others run the tokens that are new or stale. Only what was computed without this is
    stored, so that errors do not add up. `reused`: tokens that were not run, or not by all layers.
    """

    order = 40

    def __init__(self, reuse: Reuse, batch: int):
        self.reuse = reuse
        self.log = Log(batch)
        self.blended: Ints = np.full(batch, _NEVER)
        self.reused = 0
        self._spaces = [0] * batch

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
        return ObserverFactory(lambda batch: cls(reuse, batch), shared=lambda: reuse.store.stats)

    @property
    def stats(self) -> dict[str, float]:
        """See SessionObserver."""
        return {"reused": self.reused}

    def adapted(self, numbers: Sequence[int]) -> None:
        """See SessionObserver. Rows of different adapters find nothing of one another."""
        self._spaces = list(numbers)

    def copy(self) -> Self:
        """See SessionObserver."""
        other = type(self)(self.reuse, 0)
        other.log, other.blended, other._spaces = self.log.copy(), self.blended, self._spaces
        return other

    def select(self, rows: Ints) -> None:
        """See SessionObserver."""
        self.log.select(rows)
        self.blended, self._spaces = self.blended[rows], [self._spaces[row] for row in rows]

    def numbers(self, backend: BackendSession) -> Arrays:
        """See SessionObserver."""
        return {"ids": self.log.ids, "blended": self.blended}

    def restore(self, backend: BackendSession, numbers: Arrays, lengths: Ints) -> None:
        """See SessionObserver."""
        self.log.ids, self.blended = numbers["ids"], numbers["blended"]

    def after(self, tokens: Ints, positions: Ints, queries: Arrays) -> None:
        """See SessionObserver."""
        self.log.note(tokens, positions)

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._forget(lengths)
        return False

    def rewind(self, backend: BackendSession, wanted: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._forget(wanted)
        return False

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> int | None:
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
        """See SessionObserver. Where the last logits are asked for of tokens that are stored elsewhere."""
        if not last_only:
            return None
        counts = np.full(len(tokens), tokens.shape[1]) if counts is None else counts
        method, found = self.reuse.method, {}
        for row in np.flatnonzero(counts > method.least).tolist():
            asked = tokens[row, : counts[row] - 1]
            if matches := self.reuse.store.matches(self._spaces[row], asked):
                found[row] = method.pieces(matches)
        if not found:
            return None
        call = _Blend(calls, self.reuse, tokens, counts, found)
        try:
            logits, stale = call.run()
        except BaseException:
            call.give_up()
            raise
        self.blended = np.minimum(self.blended, stale)
        self.reused += call.reused
        calls.heard(tokens, call.positions)
        return logits

    def _forget(self, lengths: Ints) -> None:
        """Rows go back to these lengths; where no token is left that was taken over, later ones are computed."""
        self.blended = np.where(lengths <= self.blended, _NEVER, self.blended)

    def _leave(self, backend: BackendSession, lengths: Ints) -> None:
        """Store the rows, as far as they were computed."""
        buffers = backend.buffers()
        names = [name for both in self.reuse.names.values() for name in both]
        for row, count in enumerate(np.minimum(lengths, self.blended).tolist()):
            tokens = self.log.ids[row, :count]

            def arrays(row: int = row, count: int = count) -> Arrays:
                return {name: buffers[name][row][:, :count].copy() for name in names}

            self.reuse.store.add(self._spaces[row], tokens, arrays)


class _Blend:
    """One call: tokens [B,T], `counts` [B] of them real, and the pieces of some rows."""

    def __init__(
        self,
        calls: Calls,
        reuse: Reuse,
        tokens: Ints,
        counts: Ints,
        pieces: Mapping[int, list[Piece]],
    ):
        self.calls, self.reuse, self.tokens, self.counts = calls, reuse, tokens, counts
        self.pieces = pieces
        self.first = calls.lengths
        self.total = self.first + counts
        every = np.arange(tokens.shape[1])
        self.positions = np.where(every < counts[:, None], self.first[:, None] + every, -1)
        self.columns = {  # of the reused tokens of a row
            row: np.concatenate([np.arange(p.start, p.start + p.count) for p in found])
            for row, found in pieces.items()
        }
        self.reused = self._made = 0

    def run(self) -> tuple[Logits, Ints]:
        """The logits [B,1,V] of the last tokens; from which position on rows hold what was taken over [B]."""
        start = time.perf_counter()
        self.calls.need([int(self.total.max())])
        old = self._turned()
        stream, drawn = self._early()
        kept, picked = self._choose(old, drawn)
        left = np.array([one.size for one in picked])
        self.calls.need([int((self.total + left.max()).max())])
        self._write(old, kept, picked)
        logits = self._late(stream, picked, left)
        self._settle(picked, left)
        self.reused = sum(int(one.sum()) for one in kept.values())
        self.calls.count(self._made, int(self.counts.sum()), start)
        blended = np.full(len(self.tokens), _NEVER)
        for row, one in kept.items():
            if one.any():
                blended[row] = self.first[row] + self.columns[row][one][0]
        return logits * (self.counts > 0)[:, None, None], blended

    def give_up(self) -> None:
        """Let nothing be seen of what was written."""
        positions = self.calls.backend.buffers()[POSITIONS]
        for row, start in enumerate(self.first.tolist()):
            positions[row, start:] = -1

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

    def _early(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """All tokens in the first layers: what leaves these [B,T,E], and the attention that the tokens which are not
        reused pay to each slot [B,C], where the method reads it.
        """
        new = self.positions >= 0
        for row, columns in self.columns.items():
            new[row, columns] = False
        stream: npt.NDArray[Any] | None = None
        drawn: npt.NDArray[Any] = np.zeros((len(self.tokens), 1), np.float32)
        chunk = self.calls.chunk
        for start in range(0, int(self.counts.max()), chunk):
            tokens = self.tokens[:, start : start + chunk]
            span = slice(start, start + tokens.shape[1])
            given = {
                "tokens": tokens,
                "positions": self.positions[:, span],
                "slots": self.first + np.minimum(start, self.counts),
                "rows": _places(new[:, span]),
            }
            out = self._part(EARLY, given)
            if stream is None:
                shape = *self.tokens.shape, out["stream_out"].shape[2]
                stream = np.zeros(shape, out["stream_out"].dtype)
            stream[:, span] = out["stream_out"]
            drawn = drawn + out.get("scores", 0)
        assert stream is not None
        return stream, drawn

    def _choose(
        self, old: Arrays, drawn: npt.NDArray[np.float32]
    ) -> tuple[dict[int, Bools], list[Ints]]:
        """Which of a row's reused tokens stay as they are; the columns [n] of each row that run on, in order."""
        buffers, method = self.calls.backend.buffers(), self.reuse.method
        kept: dict[int, Bools] = {}
        picked = []
        for row, count in enumerate(self.counts.tolist()):
            runs = np.ones(count, bool)
            if row in self.columns:
                columns = self.columns[row]
                slots = self.first[row] + columns
                deviation = np.zeros(columns.size, np.float32)
                for name in self.reuse.names[self.reuse.layer]:
                    gone = buffers[name][row][:, slots] - old[name][row, :, : columns.size]
                    deviation += np.square(gone, dtype=np.float32).sum((0, 2))
                paid = drawn[row, slots] if method.attention else np.zeros_like(deviation)
                kept[row] = ~method.stale(deviation, paid)
                runs[columns[kept[row]]] = False
            picked.append(np.flatnonzero(runs))
        return kept, picked

    def _write(self, old: Arrays, kept: Mapping[int, Bools], picked: Sequence[Ints]) -> None:
        """Let the later layers hold what stays as it is, and nothing in the slots of what they run."""
        buffers = self.calls.backend.buffers()
        for row, stays in kept.items():
            slots = self.first[row] + self.columns[row][stays]
            for layer in self.reuse.late:
                for name in self.reuse.names[layer]:
                    buffers[name][row][:, slots] = old[name][row, :, : stays.size][:, stays]
        for row, columns in enumerate(picked):
            buffers[POSITIONS][row, self.first[row] + columns] = -1

    def _late(self, stream: npt.NDArray[Any], picked: Sequence[Ints], left: Ints) -> Logits:
        """These columns in the layers behind, into slots behind all others: the logits [B,1,V] of the last."""
        chunk, rows = self.calls.chunk, np.arange(len(picked))[:, None]
        columns = np.zeros((len(picked), int(left.max())), np.int64)
        for row, one in enumerate(picked):
            columns[row, : one.size] = one
        logits: Logits | None = None
        for start in range(0, columns.shape[1], chunk):
            part = columns[:, start : start + chunk]
            real = start + np.arange(part.shape[1]) < left[:, None]
            last = left - 1 - start
            ends = (last >= 0) & (last < part.shape[1])
            given = {
                "stream": stream[rows, part],
                "positions": np.where(real, self.positions[rows, part], -1),
                "slots": self.total + np.minimum(start, left),
                "rows": np.where(ends, last, 0)[:, None],
            }
            out = self._part(LATE, given)["logits"]
            logits = np.zeros_like(out) if logits is None else logits
            logits[ends] = out[ends]
        assert logits is not None
        return logits

    def _settle(self, picked: Sequence[Ints], left: Ints) -> None:
        """Move what ran into its own slots."""
        buffers = self.calls.backend.buffers()
        for row, columns in enumerate(picked):
            slots, end = self.first[row] + columns, self.total[row]
            for layer in self.reuse.late:
                for name in self.reuse.names[layer]:
                    array = buffers[name][row]
                    array[:, slots] = array[:, end : end + left[row]]
            buffers[POSITIONS][row, slots] = slots
            buffers[POSITIONS][row, end:] = -1

    def _part(self, entry: str, given: Arrays) -> Arrays:
        self._made += 1
        return self.calls.backend.part(entry, given)


def _lay(backend: BackendSession, known: Mapping[int, Piece], lengths: Ints, found: Ints) -> None:
    """Let rows hold what is known of them, and others what they held."""
    buffers, ends = backend.buffers(), np.maximum(lengths, found)
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


def _places(real: Bools) -> Ints:
    """The columns [B,N] where it holds, at least one column wide; -1: no more."""
    most = max(1, int(real.sum(1).max()))
    found = np.full((len(real), most), -1, np.int64)
    for row, one in enumerate(real):
        places = np.flatnonzero(one)
        found[row, : places.size] = places
    return found
