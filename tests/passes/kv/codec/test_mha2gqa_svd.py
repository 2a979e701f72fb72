"""mha2gqa-svd: heads in one head's width, on the directions of their activations."""

import numpy as np
import pytest
import torch

from accel.ir.axis import find_axes
from accel.ir.errors import PassError
from accel.ir.tables import Observed, Rows
from accel.passes.kv.codec import At

from ....select_case import Selecting
from ....session_ways import close, singles

AXIS = find_axes()["kv.codec"]


def test_what_is_lost_is_the_energy_of_the_directions_left_out():
    """Of the text that was measured: the smallest singular values; chance directions lose more."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(48, 48, generator=generator)
    x = (torch.randn(1, 300, 48, generator=generator) @ mixed).unflatten(2, (4, 12)).transpose(1, 2)
    method = AXIS.build("mha2gqa-svd", heads=2)
    layer = Observed(x, x.roll(1, 2), x, 1.0, x)
    rows = Rows(torch.zeros(1, 301), torch.ones(1, 300), {0: layer})
    constants = method.measure([rows])[0]
    joined = x.transpose(1, 2).flatten(2)[:, None]
    for role in "kv":
        at = At(role, 48, constants=constants)
        back = method.decode(at, method.encode(at, joined))
        lost = (back - joined).unflatten(-1, (2, 24)).square().sum((0, 1, 2, 4))
        for pair in range(2):
            flat = joined[0, 0, :, 24 * pair : 24 * pair + 24]
            tail = torch.linalg.svdvals(flat.double())[12:].square().sum()
            assert float(lost[pair]) == pytest.approx(float(tail), rel=1e-3)
    chance = torch.linalg.qr(torch.randn(2, 24, 12, generator=generator)).Q
    other = {"key_basis": chance, "value_basis": chance}
    at = At("v", 48, constants=other)
    worse = method.decode(at, method.encode(at, joined))
    assert (worse - joined).square().sum() > 1.2 * lost.sum()


def test_heads_that_are_alike_are_stored_as_one_without_loss():
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(1, 1, 200, 16, generator=generator)
    x = torch.cat((one, one @ torch.randn(16, 16, generator=generator)), dim=1)
    method = AXIS.build("mha2gqa-svd")
    rows = Rows(torch.zeros(1, 201), torch.ones(1, 200), {0: Observed(x, x, x, 1.0, x)})
    constants = method.measure([rows])[0]
    joined = x.transpose(1, 2).flatten(2)[:, None]
    at = At("k", 32, constants=constants)
    parts = method.encode(at, joined)
    assert parts[""].shape == (1, 1, 200, 16)
    back = method.decode(at, parts)
    assert torch.allclose(back, joined, atol=1e-3)


def test_a_basis_of_one_head_is_the_model_itself(stateful):
    whole, exact, two = (
        Selecting(stateful("llama"), AXIS.build("mha2gqa-svd", heads=n) if n else None)
        for n in (0, 1, 2)
    )
    tokens = whole.tokens(2, 20)
    found, taken = [], []
    for case in (whole, exact, two):
        with case.session(2) as session:
            found.append(singles(session, tokens))
            taken.append(session.stats["kv_bytes"])
    want, same, other = found
    close(same, want)
    assert np.abs(other - want).max() > 1e-2
    assert taken[0] == taken[1] > 1.5 * taken[2]


def test_heads_that_do_not_divide_are_refused(stateful):
    with pytest.raises(PassError, match="heads is 3, but a layer of this model has 2 KV heads"):
        Selecting(stateful("llama"), AXIS.build("mha2gqa-svd", heads=3))
