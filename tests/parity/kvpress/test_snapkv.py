"""`snapkv` against SnapKVPress; with `ada-kv` against AdaKVPress, with `value-merge` against MergingPress."""

import numpy as np
import pytest
import torch

from accel.ir.ops.attention import Form
from accel.passes.kv.keep.value_merge import ValueMerge
from accel.passes.kv.score.snapkv import SnapKV
from accel.runtime.kv.budget.ada_kv import AdaKV

from ...kv_case import recipe
from ...kv_slots import choose
from ..presses import Prompt, agree, agree_whole, kvpress

SNAP = SnapKV(window=8, kernel=5)


def snap(ratio):
    return kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5)


@pytest.mark.parametrize("attentions", [False, True])
def test_the_same_tokens_stay(attentions):
    agree(SNAP, snap, attentions=attentions)


@pytest.mark.parametrize("safeguard", [0.0, 0.2, 0.6, 1.0])
def test_heads_share_as_with_ada_kv(safeguard):
    agree(
        SNAP,
        lambda ratio: kvpress.AdaKVPress(snap(ratio), alpha_safeguard=safeguard),
        budget=AdaKV(safeguard=safeguard),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["uniform", "ada-kv"])
def test_the_same_tokens_stay_in_every_layer(stateful, budget):
    tables = recipe("snapkv") | {"kv.budget": {"use": budget, "compression_ratio": 0.5}}
    press = kvpress.SnapKVPress(0.5, window_size=4, kernel_size=3)
    agree_whole(stateful, tables, press if budget == "uniform" else kvpress.AdaKVPress(press))


def test_values_merge_alike():
    for length, ratio in ((40, 0.5), (97, 0.7)):
        prompt, count = Prompt.of(length), int(length * (1 - ratio))
        press = kvpress.MergingPress(snap(ratio), similarity_threshold=0.1)
        keys, values = prompt.compressed(press)
        keep = ValueMerge(threshold=0.1)
        scale = prompt.module.scaling
        ours = choose(
            prompt.slots(SNAP), count, SNAP, keep=keep, most=count, form=Form("causal", scale=scale)
        )
        for row, head in np.ndindex(2, 2):
            order, mine = keys[row, head, :, 0].argsort(), ours["k"][row, head, :, 0].argsort()
            torch.testing.assert_close(ours["k"][row, head, mine], keys[row, head, order])
            torch.testing.assert_close(ours["v"][row, head, mine], values[row, head, order])
