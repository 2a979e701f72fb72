"""`knorm` against KnormPress."""

from accel.passes.kv.score.knorm import KNorm

from ...kv_case import recipe
from ..presses import agree, agree_whole, kvpress


def test_the_same_tokens_stay():
    agree(KNorm(), kvpress.KnormPress)


def test_the_same_tokens_stay_in_every_layer(stateful):
    tables = recipe("knorm") | {"kv.budget": {"use": "uniform", "compression_ratio": 0.5}}
    agree_whole(stateful, tables, kvpress.KnormPress(0.5))
