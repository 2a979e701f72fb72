"""State by row: what is declared goes with its row, whatever a session does to rows."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.runtime.call import Arrays, Call
from accel.runtime.inputs.ints import Ints
from accel.runtime.rows import ByRow, PerRow, PerSession, Rows, by_row


def growing(before: Ints, after: Ints) -> Call:
    """A call in which rows grow so, of any tokens."""
    counts = after - before
    return Call(np.zeros((len(counts), int(counts.max())), np.int64), counts, before)


@dataclass(eq=False)
class Inner(Rows):
    ids: PerRow


@dataclass(eq=False)
class Everything(Rows):
    """Of rows that are numbers: all of it says which row it is."""

    one: PerRow
    layers: Annotated[Ints, ByRow(axis=1)]
    ragged: Annotated[Ints, ByRow(fill=-1)]
    newest: Annotated[Arrays, ByRow(right=(1,), name="q/")]
    _stages: Annotated[dict[int, Ints], ByRow()]
    items: Annotated[list[str], ByRow()]
    pairs: Annotated[tuple[int, ...], ByRow()]
    inner: Annotated[Inner, ByRow(name="in.")]
    once: Annotated[Ints, ByRow(saved=False)]
    single: Annotated[int, PerSession()]
    other: str = "not by row"


def of(rows: list[int], width: int = 2) -> Everything:
    one = np.array(rows)
    wide = np.tile(one[:, None], width)
    return Everything(
        one, np.stack([one, one + 100]), wide, {"a": np.tile(wide[..., None], 3)}, {0: one * 2, 1: one * 3},
        [str(row) for row in rows], tuple(rows), Inner(one * 5), one, len(rows),
    )  # fmt: skip


def rows_of(state: Everything) -> list[int]:
    """The rows, of which every attribute says the same."""
    rows = state.one.tolist()
    assert state.layers.tolist() == [rows, [row + 100 for row in rows]]
    assert [max(line) for line in state.ragged.tolist()] == rows
    assert [int(line.max()) for line in state.newest["a"]] == rows
    for times, stage in zip((2, 3), state._stages.values(), strict=True):
        assert stage.tolist() == [times * row for row in rows]
    assert state.items == [str(row) for row in rows] and state.pairs == tuple(rows)
    assert state.inner.ids.tolist() == [5 * row for row in rows]
    return rows


ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(ROWS, ROWS, st.data())
def test_rows_go_where_they_are_sent(first, second, data):
    both = of(first, 2).join(of(second, 4))
    assert rows_of(both) == first + second
    picked = data.draw(st.lists(st.integers(0, len(first + second) - 1), min_size=1, max_size=6))
    assert rows_of(both.select(np.array(picked))) == [(first + second)[i] for i in picked]


def test_the_smaller_is_padded_as_it_says():
    both = of([1], 1).join(of([2], 3))
    assert both.ragged.tolist() == [[1, -1, -1], [2, 2, 2]]
    assert both.newest["a"][0, :, 0].tolist() == [0, 0, 1], "in front"


def test_names_that_one_lacks_are_empty_there():
    mine, its = of([1]), of([2])
    its.newest = {}
    assert mine.join(its).newest["a"][1].max() == 0 and its.join(mine).newest["a"][0].max() == 0


def test_a_copy_is_independent():
    state = of([1, 2])
    other = state.copy()
    for array in (other.one, other.layers, other.newest["a"], other.inner.ids, other._stages[0]):
        array[...] = 0
    other.items[0] = "gone"
    assert rows_of(state) == [1, 2]


def test_a_file_gives_it_back():
    state, fresh = of([3, 4]), of([0, 0])
    numbers = state.numbers()
    names = "in.ids layers one q/a ragged single stages/0 stages/1"
    assert sorted(numbers) == names.split()
    again = fresh.restored(numbers)
    again.items, again.pairs = state.items, state.pairs  # lists are for who declares them
    assert rows_of(again) == [3, 4] and again.single == 2 and again.once.tolist() == [0, 0]
    for name in numbers:
        if not name.startswith(("q/", "stages/")):
            with pytest.raises(KeyError):
                fresh.restored({n: a for n, a in numbers.items() if n != name})


def test_an_attribute_that_is_not_declared_stays_behind():
    """The control of the laws above."""

    @dataclass(eq=False)
    class Forgets(Rows):
        one: PerRow
        two: Ints

    state = Forgets(np.array([1, 2]), np.array([1, 2])).select(np.array([1]))
    assert state.one.tolist() == [2] and state.two.tolist() == [1, 2]
    assert list(by_row(Forgets)) == ["one"] and len(fields(Forgets)) == 2


def hidden(state: Any, batch: int) -> list[str]:
    """Its arrays with an axis of `batch` that are not declared."""
    return [
        name
        for name, value in vars(state).items()
        if isinstance(value, np.ndarray) and batch in value.shape and name not in by_row(type(state))
    ]  # fmt: skip


def test_what_is_hidden_is_found():
    @dataclass(eq=False)
    class Forgets(Rows):
        one: PerRow
        two: Ints

    assert hidden(Forgets(np.zeros(7), np.zeros((2, 7))), 7) == ["two"]
