"""Tokens of all rows in one row: each attends to its row's slots and goes into one of them."""

import itertools

import numpy as np
import pytest
import torch

from accel.ir.ops import attention, flat
from accel.lowering.onnx import native

from ...op_cases import CASES, append_flat
from ...test_ops import onnx_session

NAMES = [n for n, c in CASES.items() if c.op is flat.flat_attention]
SIZES = ((1, 3, 5), (3, 7, 11), (5, 4, 9), (2, 11, 11))


def alone(operands):
    """Attention of each row by itself, and whether a query sees a key [1,H,F,1]."""
    x = flat.Flat(*operands)
    out, lse = torch.full_like(x.q[..., : x.v.shape[3]], torch.nan), torch.zeros(x.q.shape[:3])
    for b in x.owner[:, 0].unique().tolist():
        mine = x.owner[:, 0] == b
        own = {n: v for n, v in flat.attends(x).items() if isinstance(v, torch.Tensor)}
        shared = {n: own.pop(n) for n in ("bias", "sink") if n in own}
        row = {n: v[b : b + 1] for n, v in own.items()}
        row |= {"q": x.q[:, :, mine], "q_pos": x.q_pos[:, mine]}
        given = {**flat.attends(x), **row, **shared}
        out[:, :, mine], lse[:, :, mine] = attention.partial_attention.reference(**given)
    return out, (lse > torch.finfo(torch.float32).min / 2)[..., None]


def law(name, run):
    for sizes in SIZES:
        operands = CASES[name].operands(sizes)
        want, seen = alone(operands)
        got = run(operands)
        assert got.isfinite().all()
        torch.testing.assert_close(got * seen, want * seen, atol=2e-5, rtol=2e-5)


def off_by_one(owner, rows):
    """The last token of the first row that has any is given to the row after it, where there is one."""
    wrong, row = owner.clone(), int(owner[0, 0])
    if row < rows - 1:
        wrong[owner[:, 0] == row + 1, 1] += 1
        wrong[int((owner[:, 0] == row).sum()) - 1] = torch.tensor([row + 1, 0])
    return wrong


def given_away(operands):
    return [*operands[:-1], off_by_one(operands[-1], operands[1].shape[0])]


@pytest.mark.parametrize("name", NAMES)
def test_a_token_attends_to_its_rows_slots(name):
    run = flat.flat_attention.reference
    law(name, lambda operands: run(*operands))
    with pytest.raises(AssertionError):
        law(name, lambda operands: run(*given_away(operands)))


@pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_attention_reads_the_tokens_as_they_lie(name, tmp_path):
    run = onnx_session(CASES[name], tmp_path, "step.native.onnx")
    law(name, run)
    with pytest.raises(AssertionError):
        law(name, lambda operands: run(given_away(operands)))
    operands = CASES[name].operands((3, 7, 11))
    for wrong in (operands[-1].flip(0), operands[-1] + torch.tensor([3, 0]), operands[-1][:-1]):
        with pytest.raises(Exception, match="owners do not fit"):
            run([*operands[:-1], wrong.contiguous()])


@pytest.mark.parametrize("inner", [(), (2,), (2, 6)])
def test_appending_equals_a_loop(inner):
    buffer, new, slots, owner = append_flat(*inner)(3, 7, 11, np.random.default_rng(2))
    before, want = buffer.clone(), buffer.clone()
    for i, g in itertools.product(range(len(owner)), range(inner[0] if inner else 1)):
        row, number = owner[i].tolist()
        at = (row, g, int(slots[row]) + number) if inner else (row, int(slots[row]) + number)
        want[at] = new[0, g, i] if inner else new[0, i]
    assert torch.equal(flat.flat_append(buffer, new, slots, owner), want)
    assert torch.equal(buffer, before), "the reference does not write in place"
    assert not torch.equal(flat.flat_append(buffer, new, slots, off_by_one(owner, 3)), want)
