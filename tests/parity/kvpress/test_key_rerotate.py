"""`key-rerotate` against KeyRerotationPress: keys that stay, and what a session says after."""

import numpy as np
import pytest
import torch

from accel.ir.ops.attention import Form
from accel.passes.kv import moves
from accel.passes.kv.keep.drop import Drop
from accel.passes.kv.keep.key_rerotate import KeyRerotate
from accel.passes.kv.score.knorm import KNorm
from accel.passes.kv.score.streaming_llm import StreamingLlm

from ...kv_case import evicting, kept, recipe
from ...kv_slots import choose
from ...session_ways import singles
from ..presses import LENGTHS, RATIOS, Prompt, kvpress, llama, tokens


def tables(module, length):
    angles = torch.arange(1 - length, length)[:, None] * module.rotary_emb.inv_freq
    return {moves.COS: angles.cos(), moves.SIN: angles.sin()}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "score, inner", [(KNorm(), kvpress.KnormPress), (StreamingLlm(), kvpress.StreamingLLMPress)]
)
def test_the_same_keys_at_the_same_places(score, inner, length):
    prompt = Prompt.of(length, seed=length)
    x = prompt.slots(score) | tables(prompt.module, length)
    for ratio in RATIOS:
        keys, values = prompt.compressed(kvpress.KeyRerotationPress(inner(ratio)))
        count, scale = keys.shape[2], prompt.module.scaling
        mine = choose(
            x, count, score, keep=KeyRerotate(), most=count, form=Form("causal", scale=scale)
        )
        torch.testing.assert_close(mine["v"], values)
        torch.testing.assert_close(mine["k"], keys, atol=1e-4, rtol=1e-4)
        left = choose(x, count, score, keep=Drop(), most=count, form=Form("causal", scale=scale))
        assert not torch.allclose(left["k"], keys, atol=1e-2), "the control"


def test_the_same_logits_follow(stateful):
    from transformers import DynamicCache

    length, more = 40, 5
    ids, model, past = tokens(2, length + more), llama(), DynamicCache()
    with (
        torch.no_grad(),
        kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(0.5, n_sink=2))(model),
    ):
        model(ids[:, :length], past_key_values=past)
    case = evicting(
        stateful("llama"),
        recipe("streaming-llm", keep="key-rerotate")
        | {"kv.budget": {"use": "uniform", "compression_ratio": 0.5}},
    )
    session = case.session(2)
    session.run(ids[:, :length].numpy())
    session.end_prompt()
    assert all((where == np.arange(20)).all() for where in kept(session).values())
    got = singles(session, ids[:, length:].numpy())
    for i in range(more):
        with torch.no_grad():
            at = torch.full((2, 1), 20 + i)
            logits = model(ids[:, [length + i]], position_ids=at, past_key_values=past).logits
        np.testing.assert_allclose(got[:, [i]], logits.numpy(), atol=2e-4)
