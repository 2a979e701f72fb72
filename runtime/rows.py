"""Rows of a session that go on as other rows: which of them hold the same, and what is copied where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.sizes import each
from accel.ir.state import StateValue
from accel.runtime.ints import Ints, as_ints

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Kin:
    """Rows of one `group` [B] hold the same tokens at all positions below their `upto` [B]: they began as
    copies of one row.
    """

    group: Ints
    upto: Ints

    @classmethod
    def copies(cls, rows: Ints, lengths: Ints) -> Kin:
        """Rows [n] that were just made of these, which held `lengths` [n] tokens."""
        return cls(rows, lengths)

    def rewound(self, lengths: Ints) -> Kin:
        """Rows now hold no more than `lengths` [B] tokens of those."""
        return replace(self, upto=np.minimum(self.upto, lengths))

    def slots(self, rows: Ints, lengths: Ints, base: Ints | int) -> Range | None:
        """The slots in which a row i may differ from row rows[i], where slot 0 has position `base`; None: no
        bounds are known, and what compression kept may differ too.
        """
        base = np.broadcast_to(base, lengths.shape)
        if (self.group != self.group[rows]).any() or (base != base[rows]).any():
            return None
        moved = np.flatnonzero(rows != np.arange(rows.size))
        both = np.concatenate([moved, rows[moved]])
        if (base > self.upto)[both].any():
            return None
        return int((self.upto - base)[both].min()), int((lengths - base)[both].max())


def wanted_rows(rows: Any, batch: int) -> Ints:
    """Which rows a session of `batch` rows shall go on with [n]. Raises InputError."""
    found = as_ints(rows, "rows")
    if found.ndim != 1 or not found.size:
        raise InputError(f"rows have shape {list(found.shape)}; give [n], each the row that row i goes on as")
    if (wrong := (found < 0) | (found >= batch)).any():
        raise InputError(f"rows: {found[wrong][0]} is no row; this session has rows 0..{batch - 1}")
    return found


def moving(state: Sequence[StateValue], slots: Range | None) -> Iterator[tuple[StateValue, tuple[slice, ...]]]:
    """The state values that rows have of their own, and where beside axis B rows may differ, if they do in
    `slots` alone.
    """
    for value in state:
        if value.pooled or (slots is not None and (value.kept or value.cross)):
            continue
        where = [slice(None)] * (len(value.shape) - 1)
        for axis, size in enumerate(value.shape[1:]):
            if slots is not None and isinstance(size, str) and size.partition("/")[0] == "C":
                where[axis] = slice(slots[0] // each(size), -(-slots[1] // each(size)))
        yield value, tuple(where)


def moved(
    state: Sequence[StateValue], buffers: Mapping[str, npt.NDArray[Any]], rows: Ints, slots: Range | None
) -> dict[str, npt.NDArray[Any]]:
    """Let row i of each buffer hold what row rows[i] does, in place; what forks may share is given anew."""
    found, there = {}, np.flatnonzero(rows != np.arange(rows.size))
    source = rows[there]
    for value, where in moving(state, slots):
        buffer = buffers.get(value.name)
        if buffer is None:
            continue
        if value.kept:
            found[value.name] = buffer[rows]
        else:
            part = buffer[(slice(None), *where)]
            part[there] = part[source]
    return found
