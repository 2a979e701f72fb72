"""`cam` against CAMPress, which evicts the same tokens in every head, so over a score that says the same of each.

The press draws from a generator; here it draws what the method does.
"""

import pytest
import torch

from accel.ir.ops.noise import uniform
from accel.passes.kv.keep.cam import CaM
from accel.passes.kv.score import Base

from ...kv_slots import choose
from ..presses import Prompt, kvpress

GROUPS, WINDOW = 2, 5


class Scattered(Base):
    """Tokens that stay lie among those that go."""

    def __call__(self, positions):
        return (positions * 37 % 101).float()


class ScatteredPress(kvpress.ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        positions = torch.arange(keys.shape[2]).expand(keys.shape[:3])
        return Scattered()(positions)


def merged(prompt, mass, count, seed, monkeypatch):
    """Keys and values that the press leaves of a prompt, where every evicted token may merge."""
    length = prompt.length
    gone = Scattered()(torch.arange(length)).argsort()[: length - count].sort().values
    heads = torch.arange(1, GROUPS + 1)[None, :, None]
    drawn = uniform(seed, heads, gone.expand(2, GROUPS, -1))
    monkeypatch.setattr(torch, "bernoulli", lambda p: (drawn < p).to(p.dtype))
    press = kvpress.CAMPress(ScatteredPress(), target_size=count, merge_budget=WINDOW)
    layer = prompt.module.layer_idx
    press.layer_step_counts[layer], press._running_attn_sum[layer] = length, mass
    return press.compress(
        prompt.module, prompt.hidden, prompt.keys, prompt.values.clone(), mass, prompt.kwargs
    )


@pytest.mark.parametrize("length, count, seed", [(40, 20, 0), (40, 9, 1), (97, 30, 2)])
def test_values_merge_alike(length, count, seed, monkeypatch):
    prompt = Prompt.of(length)
    mass = prompt.probs[:, :, -6:].sum(2).unflatten(1, (GROUPS, -1)).sum(2)
    keys, values = merged(prompt, mass / GROUPS, count, seed, monkeypatch)
    x = prompt.slots(Scattered()) | {
        "kept_decode_mass": mass[..., :0],
        "kept_decode_mass.recent": mass,
    }
    for keep, alike in (
        (CaM(window=WINDOW, seed=seed), True),
        (CaM(window=WINDOW, seed=seed + 1), False),
        (CaM(window=WINDOW - 1, seed=seed), False),
    ):
        ours = choose(x, count, Scattered(), keep=keep, most=count)
        assert torch.equal(ours["k"], keys)
        assert torch.allclose(ours["v"], values, atol=1e-5) == alike
