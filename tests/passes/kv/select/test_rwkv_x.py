"""rwkv-x: chunks by their mean key, all heads together, by number; what is refused."""

import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError
from accel.ir.ops.attention import Form
from accel.passes.kv.select._pages import Pages, chosen
from accel.passes.kv.select.rwkv_x import RwkvX

from ....select_case import built

PAGE, PAGES, G, R, D = 4, 6, 3, 2, 5


def lists(method, seed):
    """What the token behind full pages chooses [G,K]; its queries [G,R,D], keys [G,slots,D]."""
    r = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, G, (PAGES + 1) * PAGE, D, generator=r)
    q = torch.randn(1, 1, G * R, D, generator=r)
    slots = PAGES * PAGE
    parts = method.summary(keys.unflatten(2, (-1, PAGE)))
    where = torch.arange(keys.shape[2])[None].where(torch.arange(keys.shape[2]) <= slots, -1)
    asked = {
        "queries": q,
        "positions": torch.tensor([[slots]]),
        "k_pos": where,
        "slots": torch.tensor([slots]),
    }
    found = chosen(method, Form("causal"), G, list(parts), asked | parts)
    return found[0, :, 0], q[0, 0].unflatten(0, (G, R)).numpy(), keys[0].numpy()


def law_choice(method, seed):
    """The newest chunk, then the three of the largest q · mean over the concatenated heads, the same for all."""
    found, q, keys = lists(method, seed)
    means = keys.reshape(G, PAGES + 1, PAGE, D).mean(2)[:, :PAGES]
    wide = np.repeat(means, R, 0).transpose(1, 0, 2).reshape(PAGES, -1)
    best = np.argsort(wide @ q.reshape(-1))[::-1][:3]
    assert found[:, 0].tolist() == [PAGES] * G
    assert [set(row) for row in found[:, 1:].tolist()] == [set(best.tolist())] * G


@pytest.mark.parametrize("seed", range(3))
def test_all_heads_choose_together_by_the_mean_key(seed):
    law_choice(built("rwkv-x", tokens_read=16), seed)


class Alone(RwkvX):
    """Each head by itself."""

    vote = Pages.vote


class Highest(RwkvX):
    """By the largest of each channel."""

    def summary(self, keys):
        return {"mean": keys.float().amax(3)}


@pytest.mark.parametrize("broken", [Alone, Highest])
def test_another_rule_is_caught(broken):
    with pytest.raises(AssertionError):
        for seed in range(3):
            law_choice(broken(**RwkvX.small | {"tokens_read": 16}), seed)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"page": 2048}, "kv.select.rwkv-x: page is 2048; give 1, 2, 4, 8, 16, 32, 64 or 128"),
        ({"tokens_read": 0}, "kv.select.rwkv-x: tokens_read is 0; give at least 1"),
    ],
)
def test_what_it_cannot_do_is_refused(options, reason):
    with pytest.raises(RecipeError, match=reason):
        built("rwkv-x", **options)
