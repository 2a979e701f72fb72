"""`compactor` against CompactorPress, at lengths whose last chunk is whole (it reads padding in others)."""

import pytest
import torch

from accel.passes.kv.score.compactor import Compactor, sketch

from ..presses import agree, agree_whole, kvpress
from ..query_moments import back

BLENDING = 0.4


def press(monkeypatch, method, **options):
    """The press, whose random matrix is the method's."""
    randn = torch.randn

    def same(*size, **more):
        if len(size) != 4 or size[-1] != method.sketch:
            return randn(*size, **more)
        _, heads, width, columns = size
        return sketch(heads, width, columns, method.seed, torch.zeros(1)) * columns**0.5

    monkeypatch.setattr("kvpress.presses.leverage_press.torch.randn", same)
    return lambda ratio: kvpress.CompactorPress(ratio, blending=BLENDING, **options)


def test_the_same_tokens_stay(monkeypatch):
    for chunk, lengths in ((256, (268,)), (16, (44, 92))):
        method = Compactor(blending=BLENDING, chunk=chunk)
        other = press(monkeypatch, method, chunk_size=chunk)
        agree(method, other, operands=back, batch=1, lengths=lengths)


@pytest.mark.long
def test_a_session_keeps_them(stateful, monkeypatch):
    method = Compactor(blending=BLENDING, chunk=8)
    score = {"use": "compactor", "blending": BLENDING, "chunk": 8}
    tables = {"kv.score": score, "kv.budget": {"use": "uniform", "tokens_kept": 22}}
    other = press(monkeypatch, method, chunk_size=8)(0.5)
    agree_whole(stateful, tables, other, length=44, batch=1)
