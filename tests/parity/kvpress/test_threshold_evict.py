"""`threshold-evict` with the budget `threshold` against DMSPress over KVzapPress, of the same random module."""

import numpy as np
import pytest
import torch

from accel.compiler.train.runs.soft import Soft
from accel.passes.kv.score.threshold_evict import ThresholdEvict
from accel.passes.trained import sample, write

from ...kv_case import evicting, kept
from ...kv_slots import sets
from ...session_ways import singles
from ..presses import agree_whole, kvpress, llama, tokens

WINDOW, INNER = 6, 5


@pytest.fixture
def both(stateful, tmp_path):
    """The file of a module for the Llama, and a press with the same one: both(threshold, decoding) -> press."""
    config, program, theirs = llama().config, stateful("llama"), kvpress.presses.kvzap_press
    torch.manual_seed(3)
    sizes = {"input_dim": config.hidden_size, "output_dim": config.num_key_value_heads}
    model = theirs.KVzapModel(
        theirs.KVzapConfig(n_modules=config.num_hidden_layers, hidden_dim=INNER, **sizes)
    )
    for one in model.parameters():
        one.data = torch.randn(one.shape).half().float()  # as a file holds them
    parts = {
        i: {"w1": m[0].weight, "b1": m[0].bias, "w2": m[2].weight, "b2": m[2].bias}
        for i, m in enumerate(model.layers)
    }
    soft, file = Soft(program, ThresholdEvict()), tmp_path / "part.safetensors"
    write(soft.method, file, parts, sample(program, soft.keys), {})

    def press(threshold, decoding=False):
        inner = kvpress.KVzapPress()
        inner.kvzap_model, inner.post_init_from_model = model, lambda model: None
        return kvpress.DMSPress(inner, threshold, WINDOW, decoding)

    return str(file), press


def tables(file, threshold, generated=1):
    return {
        "kv.score": {"use": "threshold-evict", "trained": file, "recent": WINDOW},
        "kv.budget": {"use": "threshold", "threshold": threshold},
        "kv.when": {"use": "generated", "tokens": generated},
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 1.0])
def test_the_same_tokens_of_a_prompt_stay(stateful, both, threshold):
    file, press = both
    agree_whole(stateful, tables(file, threshold, generated=1 << 20), press(threshold))


@pytest.mark.long
@pytest.mark.parametrize("threshold", [0.0])
def test_the_same_generated_tokens_stay(stateful, both, threshold):
    from transformers import DynamicCache

    file, press = both
    one, ids, length, more = press(threshold, decoding=True), tokens(2, 40), 25, 15
    past, plain = DynamicCache(), DynamicCache()
    logits = []
    with torch.no_grad():
        with one(llama()):
            llama()(ids[:, :length], past_key_values=past)
            for i in range(length, length + more):
                where = torch.full((2, 1), i)
                out = llama()(ids[:, [i]], position_ids=where, past_key_values=past)
                logits.append(out.logits.numpy())
            masked = [layer.self_attn.masked_key_indices for layer in llama().model.layers]
        llama()(ids, past_key_values=plain)
    case = evicting(stateful("llama"), tables(file, threshold))
    with case.session(2) as session:
        session.prompt(ids[:, :length].numpy())
        got = singles(session, ids[:, length:].numpy())
        np.testing.assert_allclose(got, np.concatenate(logits, 1), atol=2e-4)
        for layer, where in kept(session).items():
            found = sets({"pos": torch.from_numpy(where)})
            want = [[set(range(length + more)) for _ in range(2)] for _ in range(2)]
            for row, head, slot in zip(*(m.tolist() for m in masked[layer]), strict=True):
                want[row][head].discard(slot)
            assert found == want, f"layer {layer}"
    assert all(len(m[0]) for m in masked)
