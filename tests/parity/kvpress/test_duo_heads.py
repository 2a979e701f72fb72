"""`duo-heads` against DuoAttentionPress, of the same values per head."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accel.ir.ops.attention import Form
from accel.passes.kv.score.streaming_llm import StreamingLlm
from accel.runtime.kv.budget.duo_heads import DuoHeads

from ...kv_slots import choose, sets
from ..presses import Prompt, kvpress

VALUES = np.array([[0.4, 0.1], [0.2, 0.9]])  # of each layer's heads


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("length", [9, 40])
def test_the_same_tokens_stay(monkeypatch, share, length):
    press = kvpress.DuoAttentionPress(share)
    monkeypatch.setattr(press, "load_attention_pattern", lambda model: (4, 8, VALUES))
    press.post_init_from_model(SimpleNamespace(device="cpu"))
    places = (VALUES.argsort(axis=None).argsort().reshape(VALUES.shape) + 0.5) / VALUES.size
    for layer in (0, 1):
        prompt = Prompt.of(length, layer=layer)
        monkeypatch.setattr(prompt.module.config, "_attn_implementation", "sdpa")
        table = {"table.place": torch.tensor(places[layer])}
        score, budget = StreamingLlm(4), DuoHeads(share=share, sinks=4, recent=8)
        x = prompt.slots(score) | table
        mine = sets(
            choose(
                x, min(length, 12), score, budget, form=Form("causal", scale=prompt.module.scaling)
            )
        )
        assert mine == prompt.left(press)
