"""`q-filter` against QFilterPress, whose filters point the other way."""

import torch

from accel.passes.kv.score.q_filter import QFilter

from ..presses import LAYERS, agree, kvpress, llama


def test_the_same_tokens_stay():
    config = llama().config
    filters = torch.randn(config.num_key_value_heads, config.head_dim)

    def press(ratio):
        made = kvpress.QFilterPress(ratio)
        made.q_filters = -filters.expand(LAYERS, -1, -1)
        return made

    agree(QFilter(), press, operands=lambda prompt: {"table.filter": filters})
