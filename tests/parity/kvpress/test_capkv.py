"""`capkv` against CapPress."""

import pytest

from accel.passes.kv.score.capkv import CapKV

from ..presses import agree, agree_whole, kvpress
from ..query_moments import to_come


@pytest.mark.parametrize("tau", [5.0, 0.0])
def test_the_same_tokens_stay(tau):
    method = CapKV(tau=tau)
    agree(
        method,
        lambda ratio: kvpress.CapPress(ratio, tau=tau),
        operands=lambda prompt: to_come(method, prompt),
    )


@pytest.mark.long
def test_a_session_keeps_them(stateful):
    tables = {"kv.score": {"use": "capkv"}, "kv.budget": {"use": "uniform", "tokens_kept": 20}}
    agree_whole(stateful, tables, kvpress.CapPress(0.5))
