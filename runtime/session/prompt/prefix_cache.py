"""What one session does with a pool of blocks: begins behind a prefix that is known, leaves its own for others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Self

import numpy as np

from accel.ir.axis import host_method
from accel.ir.errors import InputError
from accel.ir.state import POSITIONS, CacheRegion, Part, name_of
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, copies
from accel.runtime.session.observers.observer import (
    CallWatcher,
    ModelParts,
    ObserverFactory,
    PromptRunner,
    SessionObserver,
    Settled,
)
from accel.runtime.session.observers.token_log import Log
from accel.runtime.session.prompt._pool import ROOT, Arrays, Pool, Snapshot

EVERY = 1024  # tokens from one snapshot of recurrent state to the next
MOST = 8  # snapshots that a row has before its tokens are filed
_NONE: Mapping[int, Snapshot] = MappingProxyType({})


class PrefixCache(SessionObserver, CallWatcher, PromptRunner):
    """The blocks that each row's first tokens lie in; the tokens from `base` [B] on lie in its own slots.

    Blocks are full and nobody writes them: a row that is rewound into one takes the tokens before into
    its slots. `reused`: tokens that were not run again.

    Recurrent state is that of one number of tokens only. So snapshots of it are left in the pool, where prompts and
    rows end, every EVERY tokens, and where a prompt parts from what is known: other prompts may part there, too. A row
    begins behind the last snapshot in what is known of its prompt.
    """

    base: Annotated[Ints, ByRow(saved=False)]
    log: Annotated[Log, ByRow(name="")]
    _roots: Annotated[list[int], ByRow()]
    _parting: Annotated[
        Ints, ByRow(saved=False)
    ]  # tokens behind which a snapshot is to be taken; 0: none
    _behind: Annotated[
        Ints, ByRow(saved=False)
    ]  # tokens behind which the recurrent state was as a call ended
    _last: Annotated[Ints, ByRow(saved=False)]  # tokens behind the last snapshot
    _states: Annotated[list[dict[int, Arrays]], ByRow()]  # not yet in the pool, by tokens

    order = 40

    def __init__(self, pool: Pool, batch: int, recurrent: Mapping[str, float] | None = None):
        """`recurrent`: state values that each call replaces, and what empty ones are filled with."""
        self.pool = pool
        self.base = np.zeros(batch, np.int64)
        self.log = Log(batch)
        self.reused = 0
        self._recurrent = dict(recurrent or {})
        self._parting, self._behind, self._last = np.zeros((3, batch), np.int64)
        self._states = [{} for _ in range(batch)]
        self._roots = [ROOT] * batch
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        weakref.finalize(
            self, _release, pool, self._rows
        ).atexit = False  # of sessions never closed

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the step reads blocks; all sessions of the model share one pool of them."""
        pool = pool_of(model.tables, model.state, model.pool)
        if pool is None:
            return None
        values = {v.name: v.fill for v in model.state if v.part is Part.RECURRENT}

        def known(tokens: Ints, adapter: int) -> int:
            return len(pool.look(tokens[:-1], ROOT - adapter)) * pool.block

        return ObserverFactory(lambda batch: cls(pool, batch, values), lambda: pool.stats, known)

    @property
    def stats(self) -> dict[str, float]:
        """See SessionObserver."""
        return {"reused": self.reused}

    def adapted(self, numbers: Sequence[int]) -> None:
        """See SessionObserver. Rows of different adapters share no block."""
        self._roots = [ROOT - number for number in numbers]

    def copy(self) -> Self:
        """Of a fork: it uses the same blocks."""
        other = type(self)(self.pool, len(self._rows), self._recurrent)
        for mine, theirs in zip(self._rows, other._rows, strict=True):
            self.pool.share(mine)
            theirs.extend(mine)
        vars(other).update(copies(self))
        return other

    def select(self, rows: Ints) -> None:
        """See SessionObserver."""
        found = [list(self._rows[row]) for row in rows]
        for blocks in found:
            self.pool.share(blocks)
        _release(self.pool, self._rows)
        self._rows[:] = found
        super().select(rows)

    def join(self, backend: BackendSession, other: Self) -> None:
        """See SessionObserver. The blocks that its rows use, this one lets go of later."""
        self._rows.extend(list(blocks) for blocks in other._rows)
        other._rows.clear()
        super().join(backend, other)
        self._put_table(backend)

    def admit(
        self, backend: BackendSession, tokens: Ints, counts: Ints | None, lengths: Ints
    ) -> tuple[Ints, Ints | None, Ints] | None:
        """See SessionObserver. What need not run are full blocks that are known, of rows that held nothing, or what is
        before a snapshot; the last token is always left.
        """
        found, snapshots = np.zeros_like(lengths), dict[int, Snapshot]()
        counts = np.full(len(tokens), tokens.shape[1]) if counts is None else counts
        blocks = [list(row) for row in self._rows]
        for row in np.flatnonzero((lengths == 0) & (counts > 1)).tolist():
            asked = tokens[row, : counts[row] - 1]
            blocks[row] = self.pool.find(asked, self._roots[row])
            if self._recurrent:
                found[row] = self._latest(row, asked, blocks[row], snapshots)
            else:
                found[row] = len(blocks[row]) * self.pool.block
        if not found.any():
            return None
        self._lay(backend, blocks, lengths + found, snapshots)
        self._behind = np.where(found > 0, found, self._behind)
        self._last = np.where(found > 0, found, self._last)
        columns = np.arange(int(found.max()))
        self.log.note(tokens[:, : columns.size], np.where(columns < found[:, None], columns, -1))
        self.reused += int(found.sum())
        left = counts - found
        places = np.minimum(found[:, None] + np.arange(int(left.max())), tokens.shape[1] - 1)
        return np.take_along_axis(tokens, places, 1), left, found

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """See SessionObserver."""
        self.log.note(tokens, positions)

    def stops(self, first: Ints, counts: Ints) -> Ints | None:
        """See PromptRunner. Where prompts part from what is known."""
        if not self._parting.any():
            return None
        stops = self._parting - first
        stops[(stops < 0) | (stops >= counts)] = 0
        return stops if stops.any() else None

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """When a prompt is whole, leave full blocks in the pool, as far as it has room."""
        if self._recurrent:
            due = (lengths == self._parting) | (lengths - self._last >= EVERY)
            self._behind = lengths.copy()
            self._take(backend, np.flatnonzero(due | (moment == "prompt")), lengths)
        if moment != "prompt":
            return None
        if (blocks := self._filed(backend, lengths, np.arange(lengths.size))) == self._rows:
            return None
        self._lay(backend, blocks, lengths)
        return Settled(0, moved=True)

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """See SessionObserver."""
        self._behind = np.full_like(lengths, -1)
        return self._back(backend, lengths)

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """See SessionObserver."""
        return self._back(backend, new_lengths)

    def reopen(self, backend: BackendSession, first: Ints) -> bool:
        """See PromptRunner."""
        return self._cut(backend, first)

    def numbers(self, backend: BackendSession) -> Arrays:
        """See SessionObserver. Blocks that several rows use are there once."""
        used = sorted({block for row in self._rows for block in row})
        table = _table([np.searchsorted(used, row).tolist() for row in self._rows])
        held = {f"block/{name}": array[used] for name, array in self.pool.arrays.items()}
        return {**super().numbers(backend), "table": table, **held}

    def restore(self, backend: BackendSession, numbers: Arrays, lengths: Ints) -> None:
        """See SessionObserver. Blocks that the pool knows are used as they are."""
        super().restore(backend, numbers, lengths)
        size = self.pool.block
        for row, blocks in enumerate(self._rows):
            for place, which in enumerate(index for index in numbers["table"][row] if index >= 0):
                ids = self.log.ids[row, place * size : (place + 1) * size]
                parts = {name: numbers[f"block/{name}"][which] for name in self.pool.arrays}
                found = self.pool.add(blocks[-1] if blocks else self._roots[row], ids, parts)
                if found is None:
                    _release(self.pool, self._rows)
                    raise InputError(
                        f"the pool of {self.pool.total} blocks has no room for the saved ones; close sessions, or "
                        "build with more blocks"
                    )
                blocks.append(found)
        self.base = np.array([len(row) * size for row in self._rows], np.int64)
        self._put_table(backend)

    def _put_table(self, backend: BackendSession) -> None:
        """Let the step know where the blocks are."""
        if self.base.any() and self.pool.arrays:
            backend.put({**self.pool.arrays, name_of(Part.TABLE): _table(self._rows)})

    def _latest(
        self, row: int, tokens: Ints, blocks: list[int], snapshots: dict[int, Snapshot]
    ) -> int:
        """Of a row's tokens [n], which begin with these blocks, the last snapshot: behind how many it is. Of `blocks`
        those before it stay. Where more is known, there is to be one.
        """
        size = self.pool.block
        known, behind, count = len(blocks) * size, 0, 0
        if found := self.pool.latest(tokens, blocks, self._roots[row]):
            count, snapshots[row] = found
            behind = count * size + snapshots[row].tokens.size
        self.pool.release(blocks[count:])
        del blocks[count:]
        self._parting[row] = known if known > behind else 0
        return behind

    def _take(self, backend: BackendSession, rows: Ints, lengths: Ints) -> None:
        """Keep the recurrent state of these rows [n], which is as behind `lengths` [B] tokens."""
        rows = rows[lengths[rows] > 0]
        if not rows.size:
            return
        buffers = backend.buffers()
        for row in rows.tolist():
            held = {name: np.array(buffers[name][row]) for name in self._recurrent}
            states = {**self._states[row], int(lengths[row]): held}
            self._states[row] = {n: states[n] for n in sorted(states)[-MOST:]}
        self._last = self._last.copy()
        self._last[rows] = lengths[rows]

    def _filed(self, backend: BackendSession, lengths: Ints, rows: Ints) -> list[list[int]]:
        """The blocks of each row, with those of `rows` [n] that were filled now; all are in use."""
        size, buffers = self.pool.block, backend.buffers()
        blocks = [list(row) for row in self._rows]
        for row in rows.tolist():
            mine = blocks[row]
            for start in range(int(self.base[row]), int(lengths[row]) - size + 1, size):
                slots = slice(start - int(self.base[row]), start - int(self.base[row]) + size)
                parts = {
                    n: buffers[self.pool.state_names[n]][row][:, slots] for n in self.pool.arrays
                }
                ids = self.log.ids[row, start : start + size]
                block = self.pool.add(mine[-1] if mine else self._roots[row], ids, parts)
                if block is None:
                    break
                mine.append(block)
            self._file_states(buffers, row, mine)
        return blocks

    def _file_states(self, buffers: Mapping[str, Any], row: int, blocks: list[int]) -> None:
        """Leave what was taken of a row's recurrent state in the pool, behind these blocks of its tokens."""
        size = self.pool.block
        for end, state in self._states[row].items():
            if (count := end // size) > len(blocks):
                break  # the pool is full
            start = count * size
            parts = {
                n: _slots(pool, self._rows[row], buffers[self.pool.state_names[n]][row], start, end)
                for n, pool in self.pool.arrays.items()
            }
            snapshot = Snapshot(self.log.ids[row, start:end].copy(), parts, state)
            self.pool.keep(blocks[count - 1] if count else self._roots[row], snapshot)
        self._states[row] = {}

    def _back(self, backend: BackendSession, lengths: Ints) -> bool:
        """Rows hold no more than `lengths` [B] tokens."""
        if self._recurrent:
            self._last = np.minimum(self._last, lengths)
            self._states = [
                {n: state for n, state in states.items() if n <= length}
                for states, length in zip(self._states, lengths, strict=True)
            ]
        return self._cut(backend, lengths)

    def _cut(self, backend: BackendSession, lengths: Ints) -> bool:
        """Rows go back to `lengths` [B]; whether one of them ends within its blocks."""
        if not (lengths < self.base).any():
            return False
        keep = [int(n) // self.pool.block for n in np.minimum(lengths, self.base)]
        gone = [row[n:] for row, n in zip(self._rows, keep, strict=True)]
        self._lay(backend, [row[:n] for row, n in zip(self._rows, keep, strict=True)], lengths)
        for blocks in gone:
            self.pool.release(blocks)
        return True

    def close(self, backend: BackendSession, lengths: Ints) -> None:
        """Leave what is whole to others, and let go of all blocks."""
        self.leaving(backend, np.arange(lengths.size), lengths)
        _release(self.pool, self._rows)

    def leaving(self, backend: BackendSession, rows: Ints, lengths: Ints) -> None:
        """See SessionObserver. What is whole of them is left to others."""
        if self._recurrent:
            self._take(backend, rows[self._behind[rows] == lengths[rows]], lengths)
        self._rows[:] = self._filed(backend, lengths, rows)

    def _lay(
        self,
        backend: BackendSession,
        blocks: Sequence[list[int]],
        lengths: Ints,
        snapshots: Mapping[int, Snapshot] = _NONE,
    ) -> None:
        """Let each row's first tokens lie in these blocks, and those up to its length in slots; of the rows that have
        `snapshots` as these say.
        """
        buffers, size = backend.buffers(), self.pool.block
        base = np.array([len(row) * size for row in blocks], np.int64)
        own = np.maximum(lengths - base, 0)
        columns = np.arange(int(own.max(initial=0)))
        new: Arrays = {}
        if self.pool.arrays:
            new[POSITIONS] = np.where(columns < own[:, None], base[:, None] + columns, -1)
            new[name_of(Part.TABLE)] = _table(blocks)
        for name, pool in self.pool.arrays.items():
            old = buffers.get(self.pool.state_names[name])
            shape = (len(blocks), pool.shape[1], columns.size, *pool.shape[3:])
            new[self.pool.state_names[name]] = np.zeros(shape, pool.dtype)
            for row in np.flatnonzero(own).tolist():
                if row in snapshots:
                    new[self.pool.state_names[name]][row, :, : own[row]] = snapshots[row].parts[
                        name
                    ]
                    continue
                assert old is not None
                mine = _slots(pool, self._rows[row], old[row], int(base[row]), int(lengths[row]))
                new[self.pool.state_names[name]][row, :, : own[row]] = mine
        for name, fill in self._recurrent.items() if snapshots else ():
            any_state = next(iter(snapshots.values())).state[name]
            array = np.full((len(blocks), *any_state.shape), fill, any_state.dtype)
            if name in buffers:
                array[:] = buffers[name]
            for row, snapshot in snapshots.items():
                array[row] = snapshot.state[name]
            new[name] = array
        backend.put({**self.pool.arrays, **new})
        for mine, ids in zip(self._rows, blocks, strict=True):
            mine[:] = ids
        self.base = base


def _table(blocks: Sequence[Sequence[int]]) -> Ints:
    """The blocks of each row [B,M]; -1: none."""
    table = np.full((len(blocks), max(map(len, blocks))), -1, np.int64)
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = ids
    return table


def _slots(pool: Any, blocks: Sequence[int], row_slots: Any, start: int, end: int) -> Any:
    """What the tokens from `start` to `end` of one row have, [G,n,..]: of its blocks, then of its slots."""
    size = pool.shape[2]
    base = len(blocks) * size
    parts = [row_slots[:, max(start - base, 0) : max(end - base, 0)]]
    if start < base:
        first = start // size
        stored = np.concatenate([pool[i] for i in blocks[first:]], axis=1)
        parts.insert(0, stored[:, start - first * size : end - first * size])
    return np.concatenate(parts, axis=1)


def _release(pool: Pool, rows: Sequence[list[int]]) -> None:
    for row in rows:
        pool.release(row)
        row.clear()


def pool_of(
    tables: Any, state: Sequence[Any], memory: Callable[[Sequence[int], str], Any]
) -> Pool | None:
    """The pool that a model's sessions share, where its step reads one. `memory`: see `Backend.pool`; on the host it is
    taken as it fills.
    """
    parts = [v for v in state if v.pooled]
    recurrent = any(v.part is Part.RECURRENT for v in state)
    used = tables.get("kv.reuse", {}).get("use")
    if not parts and not (recurrent and used == "paged-prefix"):
        return None
    method = host_method(tables, "kv.reuse", "paged-prefix")
    try:
        arrays = {v.name: memory((method.blocks, *v.shape[1:]), v.dtype) for v in parts}
    except MemoryError as error:
        raise InputError(
            f"kv.reuse.paged-prefix: there is no memory for blocks = {method.blocks}, of {method.block} tokens each; "
            "build with fewer"
        ) from error
    own = {v.name: replace(v, region=CacheRegion.RECENT).name for v in parts}
    return Pool(method.block, arrays, own, method.blocks, method.state_mb << 20)
