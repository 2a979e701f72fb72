"""`expected-attention` against ExpectedAttentionPress."""

import pytest

from accel.passes.kv.score.expected_attention import ExpectedAttention

from ..presses import agree, agree_whole, kvpress
from ..query_moments import to_come


@pytest.mark.parametrize("future, epsilon", [(512, 0.0), (7, 0.02)])
def test_the_same_tokens_stay(future, epsilon):
    method = ExpectedAttention(future=future, epsilon=epsilon)
    agree(
        method,
        lambda ratio: kvpress.ExpectedAttentionPress(ratio, future, epsilon=epsilon),
        operands=lambda prompt: to_come(method, prompt),
    )


@pytest.mark.long
def test_a_session_keeps_them(stateful):
    tables = {
        "kv.score": {"use": "expected-attention"},
        "kv.budget": {"use": "uniform", "tokens_kept": 20},
    }
    agree_whole(stateful, tables, kvpress.ExpectedAttentionPress(0.5))
