"""`curdkv` against CURPress."""

import pytest

from accel.passes.kv.score.curdkv import CurDKV

from ..presses import agree, kvpress

TYPES = {"product": "kv_product", "mean": "kv_avg", "keys": "key", "values": "value"}


@pytest.mark.parametrize("by", TYPES)
def test_the_same_tokens_stay(by):
    agree(CurDKV(by=by), lambda ratio: kvpress.CURPress(ratio, leverage_type=TYPES[by]))
