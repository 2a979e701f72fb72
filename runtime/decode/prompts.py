"""The prompts of a group of rows."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import numpy.typing as npt

from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session


def prompted(session: Session, rows: list[Row]) -> npt.NDArray[np.float32]:
    """One call for the prompts of all rows that run, padded on the right: the logits after each, [B,1,V]. A prompt of
    several rows runs once, and they go on from copies of its state. What the session holds are the prompts' first
    tokens, which are not run again.
    """
    first, copies = distinct(rows)
    if len(first) == len(rows):
        return _run(session, rows)
    session.select(first)
    logits = _run(session, [rows[i] for i in first])
    session.select(copies)
    for row in rows:
        row.began = perf_counter()
    return logits[copies]


def distinct(rows: list[Row]) -> tuple[list[int], Ints]:
    """The first row of each prompt, and the place among these of each row's [B]: the prompts that `prompted` runs."""
    found = {id(row.prompt): i for i, row in reversed(list(enumerate(rows)))}
    first = sorted(found.values())
    return first, np.searchsorted(first, [found[id(row.prompt)] for row in rows])


def _run(session: Session, rows: list[Row]) -> npt.NDArray[np.float32]:
    held = session.lengths
    lengths = np.array([0 if row.finish else row.prompt.size for row in rows]) - held
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    for row, ids, start in zip(rows, tokens, held, strict=True):
        rest = row.prompt[start : start + ids.size]
        ids[: rest.size] = rest
    logits = session.prompt(tokens, lengths)
    for row in rows:
        row.began = perf_counter()
    return logits
