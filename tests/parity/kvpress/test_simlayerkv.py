"""`simlayerkv` against SimLayerKVPress, which leaves the last query's own column out and keeps a token less."""

import pytest

from accel.ir.ops.attention import Form
from accel.passes.kv.score.streaming_llm import StreamingLlm
from accel.runtime.kv.budget.simlayerkv import SimLayerKV

from ...kv_slots import choose
from ..presses import Prompt, kvpress

SINKS, RECENT = 4, 10


def masses(prompt):
    """What their threshold is compared with, and ours: by the attention of the last query."""
    mean = prompt.probs[0, :, -1].mean(0)
    theirs = mean[:SINKS].sum() + mean[-RECENT - 1 : -1].sum()
    return float(theirs), float(mean[:SINKS].sum() + mean[1 - RECENT :].sum())


@pytest.mark.parametrize("seed", range(3))
def test_the_same_layers_are_lazy_and_keep_the_same(seed):
    prompt = Prompt.of(40, batch=1, seed=seed)
    both, seen = masses(prompt), set()
    for threshold in (min(both) - 0.01, max(both) + 0.01):
        press = kvpress.SimLayerKVPress(threshold, n_recent=RECENT, n_initial=SINKS)
        press.compression_ratios = []
        keys, _ = prompt.compressed(press)
        budget = SimLayerKV(threshold, sinks=SINKS, recent=RECENT - 1)
        score = StreamingLlm(sinks=SINKS)
        scale, count = prompt.module.scaling, SINKS + RECENT - 1
        ours = choose(prompt.slots(budget), count, score, budget, form=Form("causal", scale=scale))
        for head in range(keys.shape[1]):
            real = ours["pos"][0, head] >= 0
            assert (ours["k"][0, head, real] == keys[0, head]).all()
        seen.add(keys.shape[2])
    assert seen == {SINKS + RECENT - 1, 40}
