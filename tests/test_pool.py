"""The pool of blocks as a state machine: rows find, fill, share and release blocks in any order."""

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from accel.runtime.session.prompt._pool import ROOT, Pool

SIZE, TOTAL = 2, 4


def numbers(tokens):
    """What a model would store of a row's last block: it depends on all tokens before."""
    return float(hash(tuple(tokens)) % 9973)


class Machine(RuleBasedStateMachine):
    """Rows as a session has them: tokens of 0 and 1, so that prefixes meet often."""

    Tested = Pool

    def __init__(self):
        super().__init__()
        self.pool = self.Tested(SIZE, {"k": np.zeros((TOTAL, 1, SIZE, 1), np.float32)}, {}, TOTAL)
        self.rows: list[tuple[list[int], list[int]]] = []  # tokens, blocks
        self.whole: dict[int, list[int]] = {}  # block -> all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), max_size=3 * SIZE))
    def begin(self, tokens):
        blocks = self.pool.find(np.array(tokens, np.int64))
        assert len(blocks) * SIZE <= len(tokens)
        self.rows.append((tokens[: len(blocks) * SIZE], blocks))

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0), tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=SIZE))
    def extend(self, pick, tokens):
        held, blocks = self.rows[pick % len(self.rows)]
        value = numbers(held + tokens)
        parts = {"k": np.full((1, SIZE, 1), value, np.float32)}
        used = {b for _, row in self.rows for b in row}
        block = self.pool.add(blocks[-1] if blocks else ROOT, np.array(tokens, np.int64), parts)
        if block is None:
            assert len(used) == TOTAL, "refused though there was room"
            return
        assert block not in blocks
        held.extend(tokens)
        blocks.append(block)
        self.whole[block] = list(held)

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0))
    def fork(self, pick):
        held, blocks = self.rows[pick % len(self.rows)]
        self.pool.share(blocks)
        self.rows.append((list(held), list(blocks)))

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0), keep=st.integers(0, 3))
    def rewind(self, pick, keep):
        held, blocks = self.rows[pick % len(self.rows)]
        self.pool.release(blocks[keep:])
        del held[keep * SIZE :], blocks[keep:]

    @invariant()
    def rows_hold_what_they_mean(self):
        for held, blocks in self.rows:
            for i, block in enumerate(blocks):
                want = numbers(held[: (i + 1) * SIZE])
                assert (self.pool.arrays["k"][block] == want).all(), "a block of other tokens"

    @invariant()
    def uses_are_counted(self):
        used: dict[int, int] = {}
        for _, blocks in self.rows:
            for block in blocks:
                used[block] = used.get(block, 0) + 1
        assert self.pool._uses == used
        assert self.pool.stats["used"] == len(used)

    @invariant()
    def every_block_is_somewhere_once(self):
        parts = [*self.pool._empty, *self.pool._uses, *self.pool._idle]
        assert sorted(parts) == list(range(TOTAL))

    @invariant()
    def a_block_outlives_those_after_it(self):
        for block, (before, _) in self.pool._keys.items():
            head = [] if before == ROOT else self.whole[before]
            assert before == ROOT or before in self.pool._keys
            assert self.whole[block][:-SIZE] == head

    def teardown(self):
        for _, blocks in self.rows:
            self.pool.release(blocks)
        assert not self.pool._uses


def machine(tested):
    return type("Tried", (Machine,), {"Tested": tested})


CHECKED = settings(max_examples=50, stateful_step_count=30, deadline=None, database=None)


def test_blocks_are_what_rows_hold_whatever_happens():
    run_state_machine_as_test(machine(Pool), settings=CHECKED)


class Forgets(Pool):
    """Knows a block by its tokens alone, as if what comes before did not matter."""

    def find(self, tokens):
        with pytest.MonkeyPatch().context() as patch:
            patch.setattr(self, "_known", _Anywhere(self._known))
            return super().find(tokens)

    def add(self, before, tokens, parts):
        return super().add(ROOT, tokens, parts)


class _Anywhere(dict):
    def __contains__(self, key):
        return super().__contains__((ROOT, key[1]))

    def __getitem__(self, key):
        return super().__getitem__((ROOT, key[1]))


def test_a_broken_pool_is_caught():
    first = settings(CHECKED, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine(Forgets), settings=first)


def oldest_first(pool):
    """The block that went unused for longest makes room, a row's tail before its head."""

    def fill(*tokens):
        row: list[int] = []
        for token in tokens:
            parts = {"k": np.full((1, 1, 1), token, np.float32)}
            row.append(pool.add(row[-1] if row else ROOT, np.array([token]), parts))
        return row

    old, new = fill(1, 2), fill(5)
    pool.release(old)
    pool.release(new)
    third = fill(7)
    assert third == [old[1]], "the tail of the oldest row"
    assert pool.find(np.array([1, 2])) == [old[0]] and pool.find(np.array([5])) == new
    assert pool.add(ROOT, np.array([9]), {}) is None, "all are in use"


class HeadsFirst(Pool):
    def release(self, blocks):
        super().release(blocks[::-1])


def test_the_block_unused_for_longest_goes_first_and_tails_before_heads():
    arrays = {"k": np.zeros((3, 1, 1, 1), np.float32)}
    oldest_first(Pool(1, arrays, {}, 3))
    with pytest.raises(AssertionError, match="tail"):
        oldest_first(HeadsFirst(1, arrays, {}, 3))
