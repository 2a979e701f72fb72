"""What compares methods with presses notices a difference."""

import pytest
import torch

from accel.passes.kv.score.keydiff import KeyDiff
from accel.passes.kv.score.knorm import KNorm
from accel.passes.kv.score.snapkv import SnapKV

from ...kv_case import recipe
from ..presses import Prompt, agree, agree_whole, kvpress, ties


def test_another_score_another_window_and_another_count_are_caught():
    def snap(ratio):
        return kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5)

    with pytest.raises(AssertionError, match="row 0, head 0"):
        agree(KeyDiff(), kvpress.KnormPress)
    with pytest.raises(AssertionError, match="instead of"):
        agree(SnapKV(window=8, kernel=3), snap)
    with pytest.raises(AssertionError, match="tokens, not"):
        agree(KNorm(), lambda ratio: kvpress.KnormPress(ratio + 0.05))
    with pytest.raises(AssertionError, match="nothing went"):
        agree(KNorm(), kvpress.KnormPress, ratios=[0.0])
    with pytest.raises(AssertionError, match="!="):
        agree(SnapKV(window=8, kernel=5), lambda ratio: kvpress.AdaKVPress(snap(ratio)))


def test_another_ratio_of_a_whole_model_is_caught(stateful):
    tables = recipe("knorm") | {"kv.budget": {"use": "uniform", "compression_ratio": 0.5}}
    with pytest.raises(AssertionError, match="layer 0"):
        agree_whole(stateful, tables, kvpress.KnormPress(0.25), more=0)


def test_only_equal_scores_may_differ():
    scores = torch.tensor([[[3.0, 1.0, 1.0, 0.0]]])
    ties(scores, [[{0, 1}]], [[{0, 2}]], "")
    with pytest.raises(AssertionError, match=r"\[3\] instead of \[1\]"):
        ties(scores, [[{0, 3}]], [[{0, 1}]], "")


def test_queries_and_probs_are_the_layers():
    prompt = Prompt.of(20)
    groups = prompt.keys.shape[1]
    values = prompt.values.repeat_interleave(prompt.queries.shape[1] // groups, 1)
    out = prompt.module.o_proj((prompt.probs @ values).transpose(1, 2).flatten(2))
    kwargs = {**prompt.kwargs, "past_key_values": None}
    torch.testing.assert_close(out, prompt.module(**kwargs)[0], atol=1e-5, rtol=1e-5)
