"""`lagkv` against LagKVPress."""

import pytest

from accel.passes.kv.score.lagkv import LagKV

from ..presses import agree, kvpress


@pytest.mark.parametrize(
    "size, across", [(5, False), (5, True), (8, False), (8, True), (128, False)]
)
def test_the_same_tokens_stay(size, across):
    def press(ratio):
        return kvpress.LagKVPress(ratio, n_sink=4, lag_size=size, cross_scoring=across)

    agree(LagKV(sinks=4, partition=size, across=across), press)
