"""Calls of rows that have very different numbers of tokens: one row of all their tokens, without padding."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from accel.ir.entries.flat import FLAT, OWNER
from accel.ir.entries.step import LOGITS
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Logits
from accel.runtime.inputs.ints import Ints

SHARE = 0.75  # of a padded call's tokens: with fewer real ones a flat call takes less time


def pays(real: int, computed: int) -> bool:
    """Whether a call of so many real tokens is worth a flat one, where padded it computes so many."""
    return 0 < real <= SHARE * computed


def flat_call(
    backend: BackendSession,
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    rows: Ints,
    width: int,
    want: Collection[str] = (),
) -> tuple[Logits, Arrays]:
    """What a step gives (`BackendSession.step`), logits [B,N,V] (V: `width`) and the outputs `want` of its tokens
    [B,T,…], 0 for padding, of a call that is padded on the right.
    """
    real = positions >= 0
    owner = np.argwhere(real)  # row by row
    number = np.where(real, np.cumsum(real).reshape(real.shape) - 1, -1)
    wanted = np.take_along_axis(
        number, rows, axis=1
    )  # [B,N], -1: padding, whose logits nobody reads
    some = wanted >= 0
    given = {
        "tokens": tokens[real][None],
        "positions": positions[real][None],
        "slots": slots,
        "rows": wanted[some][None] if some.any() else np.zeros((1, 1), np.int64),
        OWNER: owner,
    }
    found = backend.part(FLAT.name, given)
    logits = np.zeros((*rows.shape, width), np.float32)
    if some.any():
        logits[some] = found[LOGITS][0]
    extra: Arrays = {}
    for name in want:
        extra[name] = np.zeros((*real.shape, *found[name].shape[2:]), found[name].dtype)
        extra[name][real] = found[name][0]
    return logits, extra
