"""Rows of a session that go on as other rows: which of them hold the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.backends.buffers import Range
from accel.runtime.inputs.ints import Ints, as_ints


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

    def of(self, rows: Ints) -> Kin:
        """Row i holds what row rows[i] did [n]."""
        return Kin(self.group[rows], self.upto[rows])

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
        raise InputError(
            f"rows have shape {list(found.shape)}; give [n], where row i continues from row rows[i]"
        )
    if (wrong := (found < 0) | (found >= batch)).any():
        raise InputError(
            f"rows: {found[wrong][0]} is not a row; this session has rows 0..{batch - 1}"
        )
    return found
