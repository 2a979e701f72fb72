"""`critical-kv` against CriticalKVPress; with `ada-kv` against CriticalAdaKVPress."""

import pytest

from accel.passes.kv.refine.critical_kv import CriticalKV
from accel.passes.kv.score.snapkv import SnapKV
from accel.runtime.kv.budget.ada_kv import AdaKV

from ...kv_case import recipe
from ..presses import agree, agree_whole, kvpress

SNAP = SnapKV(window=8, kernel=5)


def snap(ratio):
    return kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_the_same_tokens_stay(share):
    def press(ratio):
        return kvpress.CriticalKVPress(snap(ratio), first_stage_ratio=share)

    agree(SNAP, press, refine=CriticalKV(share=share))


def test_the_same_tokens_stay_where_heads_share():
    """The press counts the heads' tokens over all rows, so a row alone."""
    agree(
        SNAP,
        lambda ratio: kvpress.CriticalAdaKVPress(snap(ratio)),
        budget=AdaKV(),
        refine=CriticalKV(),
        batch=1,
    )


@pytest.mark.long
def test_the_same_tokens_stay_in_every_layer(stateful):
    tables = recipe("snapkv") | {
        "kv.refine": {"use": "critical-kv"},
        "kv.budget": {"use": "uniform", "compression_ratio": 0.5},
    }
    press = kvpress.CriticalKVPress(kvpress.SnapKVPress(0.5, window_size=4, kernel_size=3))
    agree_whole(stateful, tables, press)
