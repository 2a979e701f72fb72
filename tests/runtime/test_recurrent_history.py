"""What a session knows of the tokens behind a recurrent state."""

import numpy as np
import pytest

from accel.runtime.session.state.recurrent_history import EVERY, SNAPSHOTS, RecurrentHistory


class Recorder:
    """A recurrent state that is the list of its tokens."""

    def __init__(self, batch: int):
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.copies = 0

    def snapshot(self):
        self.copies += 1
        return [list(row) for row in self.rows]

    def restore(self, snapshot, rows):
        for i in np.flatnonzero(rows):
            self.rows[i] = [] if snapshot is None else list(snapshot[i])

    def step(self, tokens, positions):
        for row, ids, places in zip(self.rows, tokens, positions, strict=True):
            row.extend(int(t) for t, p in zip(ids, places, strict=True) if p >= 0)


def drive(
    memory: RecurrentHistory, holder, seed: int, calls: int = 120
) -> tuple[list[list[int]], int]:
    """Random appends and rewinds, as a session does them; the tokens that each row should hold, and
    how many were run again.
    """
    rng = np.random.default_rng(seed)
    held: list[list[int]] = [[], [], []]
    replayed = 0

    def call(ids, counts, first):
        columns = np.arange(ids.shape[1])
        positions = np.where(columns < counts[:, None], first[:, None] + columns, -1)
        memory.before(holder, ids.shape[1])
        holder.step(ids, positions)
        memory.after(ids, positions, {})

    for _ in range(calls):
        if rng.random() < 0.3:
            held = [row[: rng.integers(max(0, len(row) - 40), len(row) + 1)] for row in held]
        lengths = np.array([len(row) for row in held])
        if again := memory.catch_up(holder, lengths):
            replayed += int(again[1].sum())
            call(*again)
        width = 1 if rng.random() < 0.6 else int(rng.integers(2, 9))
        counts = np.full(3, 1) if width == 1 else rng.integers(0, width + 1, 3)
        ids = rng.integers(0, 1000, (3, width))
        call(ids, counts, lengths)
        for row, new, n in zip(held, ids, counts, strict=True):
            row.extend(new[:n].tolist())
    return held, replayed


@pytest.mark.parametrize("seed", range(4))
def test_a_rewound_state_has_seen_its_own_tokens_only(seed):
    memory, holder = RecurrentHistory(3), Recorder(3)
    held, replayed = drive(memory, holder, seed)
    assert holder.rows == held
    assert replayed and len(memory._saved) <= SNAPSHOTS


def test_a_state_that_does_not_go_back_is_seen():
    class Forward(Recorder):
        def restore(self, snapshot, rows):
            pass

    holder = Forward(3)
    assert drive(RecurrentHistory(3), holder, 0)[0] != holder.rows


def test_single_tokens_pay_for_a_copy_now_and_then_only():
    memory, holder = RecurrentHistory(1), Recorder(1)
    for i in range(2 * EVERY):
        memory.before(holder, 1)
        memory.after(np.array([[i]]), np.array([[i]]), {})
    assert holder.copies == 1
