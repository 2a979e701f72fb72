"""What stays of a prompt, against kvpress' presses on transformers' own model; where kvpress is installed."""

from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch

from accel.passes.kv.keep.value_merge import ValueMerge
from accel.passes.kv.score import Base
from accel.passes.kv.score.snapkv import SnapKV
from accel.runtime.kv.budget.ada_kv import AdaKV
from accel.runtime.kv.budget.pyramidkv import PyramidKV

from ..kv_case import decoded, evicting, kept, recipe, state
from ..kv_slots import SCALE, choose, sets

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress (with its dependencies) is not installed: pip install kvpress"
)
LENGTH, RATIO = 40, 0.5


@pytest.fixture(scope="module")
def llama():
    layers, models.LAYERS = models.LAYERS, 2
    try:
        return models.llama()
    finally:
        models.LAYERS = layers


def pressed(model, press, tokens):
    """The model's cache after a prompt, of what the press leaves."""
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(torch.from_numpy(tokens), past_key_values=cache)
    return cache


def test_a_prompt_leaves_what_presses_leave(stateful, llama):
    """Keys and values of every layer and head, and the logits of what comes next."""
    ours = {
        "snapkv": kvpress.SnapKVPress(RATIO, window_size=4, kernel_size=3),
        "knorm": kvpress.KnormPress(RATIO),
        "streaming-llm": kvpress.StreamingLLMPress(RATIO, n_sink=2),
    }
    for score, press in ours.items():
        tables = recipe(score) | {"kv.budget": {"use": "uniform", "compression_ratio": RATIO}}
        case = evicting(stateful("llama"), tables)
        tokens = case.tokens(2, LENGTH + 5)
        cache = pressed(llama, press, tokens[:, :LENGTH])
        session = case.session(2)
        session.run(tokens[:, :LENGTH])
        session.end_prompt()
        for layer, where in kept(session).items():
            assert where.shape[2] == LENGTH // 2
            for part, theirs in (
                ("k", cache.layers[layer].keys),
                ("v", cache.layers[layer].values),
            ):
                mine, theirs = state(session)[f"kept.{layer}.{part}"], theirs.numpy()
                for row, head in np.ndindex(mine.shape[:2]):
                    np.testing.assert_allclose(
                        in_order(mine[row, head]), in_order(theirs[row, head]), atol=1e-4
                    )
        more = decoded(session, tokens[:, LENGTH:])
        for i in range(5):
            with torch.no_grad():
                where = torch.full((2, 1), LENGTH + i)
                ids = torch.from_numpy(tokens[:, [LENGTH + i]])
                want = llama(ids, position_ids=where, past_key_values=cache).logits.numpy()
            np.testing.assert_allclose(more[:, [i]], want, atol=2e-4)


def in_order(rows):
    """Rows [N,D], sorted by their first number."""
    return rows[np.argsort(rows[:, 0])]


def tensors(seed, length, heads=4, groups=2, width=6):
    """Keys, values [2,G,S,D], queries [2,H,S,D], causal attention [2,H,S,S] over them, and `choose`'s names."""
    r = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, groups, length, width, generator=r) for _ in "kv")
    q = torch.randn(2, heads, length, width, generator=r)
    scores = q @ k.repeat_interleave(heads // groups, 1).transpose(2, 3) * SCALE
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    probs = scores.softmax(-1)
    x = {
        "seen": torch.full((2,), length),
        "recent_pos": torch.arange(length).repeat(2, 1),
        "recent_k": k,
        "recent_v": v,
        "kept_k": k[:, :, :0],
        "kept_v": v[:, :, :0],
        "kept_pos": torch.zeros(2, groups, 0).long(),
        "kept_mass": torch.zeros(2, groups, 0),
        "kept_mass.recent": probs.sum(2).unflatten(1, (groups, -1)).sum(2),
        "queries": q.transpose(1, 2)[:, -8:],
        "query_positions": torch.arange(length - 8, length).repeat(2, 1),
    }
    config = SimpleNamespace(
        num_attention_heads=heads, num_key_value_heads=groups, _attn_implementation="sdpa"
    )
    return x, SimpleNamespace(config=config, head_dim=width, layer_idx=0), k, v, q, probs


class Averaged(Base):
    """H2O's mass over how many queries see the token, as kvpress has it, which keeps no newest ones."""

    def __call__(self, mass, positions, seen):
        return mass / (seen[:, None, None] - positions).clamp(min=1)


@pytest.mark.parametrize("length", [40, 97])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.7])
def test_the_same_tensors_keep_the_same_tokens(length, ratio):
    x, module, k, v, q, probs = tensors(length, length)
    n = max(1, int(length * (1 - ratio)))
    hidden = torch.zeros(2, length, 1)
    snap = kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5)
    pairs = {
        SnapKV(window=8, kernel=5): snap,
        Averaged(): kvpress.ObservedAttentionPress(ratio),
    }
    for mine, theirs in pairs.items():
        found = sets(choose(x, n, mine))
        score = theirs.score(module, hidden, k, v, probs, {})
        want = score.topk(n, dim=-1).indices
        assert found == [[set(h.tolist()) for h in row] for row in want]
    for safeguard in (0.0, 0.2, 0.6, 1.0):
        ada = kvpress.AdaKVPress(snap, alpha_safeguard=safeguard)
        ada.compress(module, hidden, k, v, probs, {})
        gone = set(zip(*(i.tolist() for i in module.masked_key_indices), strict=True))
        budget = AdaKV(safeguard=safeguard)
        found = sets(choose(x, n, SnapKV(window=8, kernel=5), budget, most=budget.most(n, 2)))
        want = [
            [{p for p in range(length) if (b, g, p) not in gone} for g in range(2)]
            for b in range(2)
        ]
        assert found == want
    merged = kvpress.MergingPress(snap, similarity_threshold=0.1)
    keys, values = merged.compress(module, hidden, k, v, probs, {})
    ours = choose(x, n, SnapKV(window=8, kernel=5), keep=ValueMerge(threshold=0.1), most=n)
    for row, head in np.ndindex(2, 2):
        order, mine = keys[row, head, :, 0].argsort(), ours["k"][row, head, :, 0].argsort()
        torch.testing.assert_close(ours["k"][row, head, mine], keys[row, head, order])
        torch.testing.assert_close(ours["v"][row, head, mine], values[row, head, order])


def test_layers_get_what_pyramids_give():
    press = kvpress.PyramidKVPress()
    for length in (50, 300, 4096, 5000):
        for ratio in (0.1, 0.5, 0.8, 0.95):
            for beta, window, layers in ((20, 64, 32), (20, 8, 4), (2, 16, 3), (1, 4, 1)):
                press.beta, press.window_size, press.compression_ratio = beta, window, ratio
                mine = PyramidKV(compression_ratio=ratio, beta=float(beta), window=window)
                for i in range(layers):
                    module = SimpleNamespace(
                        config=SimpleNamespace(num_hidden_layers=layers), layer_idx=i
                    )
                    want = press.get_layer_budget(module, length)
                    assert mine.tokens(length, i, layers) == want, (length, ratio, beta, window, i)
