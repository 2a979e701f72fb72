"""Sizes of state in letters."""

import pytest

from accel.ir.program import State
from accel.ir.sizes import LETTER, grows, in_numbers, per_slot
from accel.ir.state import Part


@pytest.mark.parametrize(("slots", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (256, 16)])
def test_a_part_of_the_slots_counts_what_is_begun(slots, pages):
    assert in_numbers(("B", 4, "C/16", 8), {"B": 2, "C": slots}) == (2, 4, pages, 8)
    state = State(Part.PAGES, 0, "float32", ("B", 4, "C/16", 8), detail="high")
    assert state.allocate(B=2, C=slots).shape == (2, 4, pages, 8)


def test_letters_that_are_not_given_are_nothing():
    assert in_numbers(("B", "P3", "C", 5), {"B": 2}) == (2, 0, 0, 5)
    assert in_numbers(("C", "C1", "P1"), {"C": 3, "P": 4}) == (
        3,
        3,
        0,
    )  # what layers have of their own


def test_what_grows_with_the_slots():
    assert grows(("B", "C")) and grows(("B", 2, "C/8")) and not grows(("B", 2, "P0", "X"))
    assert per_slot(("B", 4, "C", 8)) == 32 and per_slot(("B", 4, "C/16", 8)) == 2


@pytest.mark.parametrize(
    "size", ["C", "C/16", "B", "X", "P12", "P", "C1", "C2/16", "Q3", "Q3_1", "E0"]
)
def test_letters(size):
    assert LETTER.fullmatch(size)


@pytest.mark.parametrize("size", ["C/", "C/0", "C/016", "B/2", "CC", "PP", "c", "Q", "Q0_0", "E_1"])
def test_what_is_no_letter(size):
    assert not LETTER.fullmatch(size)
