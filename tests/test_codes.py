"""Weights that lie as codes are decoded once, and are what their codes say."""

import pytest
import torch

from accel.ir import codes as module
from accel.ir.codes import Coded, Codes, Made
from accel.ir.weights import Pages, Stacked

ROWS, COLUMNS, GROUP = 6, 64, 32


def some(seed: int, rows: int = ROWS, columns: int = COLUMNS, offsets: bool = True) -> Codes:
    made = torch.Generator().manual_seed(seed)
    groups = -(-columns // GROUP)
    return Codes(
        torch.randint(0, 16, (rows, columns), generator=made, dtype=torch.uint8),
        torch.rand(rows, groups, generator=made),
        torch.randint(0, 16, (rows, groups), generator=made, dtype=torch.uint8),
        4,
        GROUP,
        offsets=torch.rand(rows, groups, generator=made) if offsets else None,
    )


class Counted:
    """Pieces of a weight, and how often they were read."""

    def __init__(self) -> None:
        self.read = 0
        self.pieces = [some(0, 4), some(1, 2)]

    def __call__(self) -> list[Codes]:
        self.read += 1
        return self.pieces


def weight_of(pieces: Counted) -> Coded:
    return Coded.in_pieces((ROWS, COLUMNS), pieces, "form", Pages())


@pytest.mark.parametrize("columns", [64, 50])
@pytest.mark.parametrize("offsets", [True, False])
def test_a_number_is_its_code_less_zero_times_scale(columns, offsets):
    found = some(3, columns=columns, offsets=offsets)
    group = torch.arange(columns) // GROUP
    want = (found.q.float() - found.zeros[:, group].float()) * found.scales[:, group]
    if found.offsets is not None:
        want = want + found.offsets[:, group]
    assert torch.equal(found.weight(), want)


def test_a_weight_is_decoded_once_for_all_that_is_made_of_it():
    pieces = Counted()
    weight = weight_of(pieces)
    want = torch.cat([piece.weight() for piece in pieces.pieces])
    half = weight.changed(torch.Tensor.half)
    both = Stacked.rows([weight, weight])
    assert torch.equal(weight.read(), want) and torch.equal(weight.read(), want)
    assert torch.equal(half.read(), want.half())
    assert torch.equal(both.read(), torch.cat([want, want]))
    assert pieces.read == 1
    assert torch.equal(weight.codes().q, torch.cat([piece.q for piece in pieces.pieces]))


def test_it_survives_that_its_pages_are_given_back():
    pieces = Counted()
    weight = weight_of(pieces)
    before = weight.read().clone()
    weight.pages.release()
    assert torch.equal(weight.read(), before) and pieces.read == 1


def test_on_a_full_disk_it_is_decoded_at_each_reading(monkeypatch):
    monkeypatch.setattr(module, "spare", lambda size: False)
    pieces = Counted()
    weight = weight_of(pieces)
    assert torch.equal(weight.read(), weight.read()) and pieces.read == 2


def test_a_weight_that_is_computed_is_computed_once():
    calls = []
    made = Made.of_shape((2, 3), lambda: calls.append(1) or torch.ones(2, 3), Pages())
    assert torch.equal(made.read(), torch.ones(2, 3)) and torch.equal(made.read(), torch.ones(2, 3))
    assert len(calls) == 1
