"""ActQKV in prompts: the probe query and the lists of a segment, by number."""

import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError
from accel.passes.prefill.sparse._segment import chosen
from accel.passes.prefill.sparse.actqkv_prompt import ActqkvPrompt

SEGMENT, BLOCK, FIRST, SLOTS, H, G, D = 16, 4, 64, 83, 4, 2, 8
SIZES = {
    "segment": SEGMENT, "block": BLOCK, "budget": 28, "threshold": 32, "sinks": 8, "window": 4, "best": 2,
}  # fmt: skip


def tensors(seed=0):
    """Queries [1,H,T,D] of which two are unlike the others, keys [1,G,C,D], positions."""
    r = torch.Generator().manual_seed(seed)
    q, k = torch.randn(1, H, SEGMENT, D, generator=r), torch.randn(1, G, SLOTS, D, generator=r)
    q = q / 2 + torch.randn(1, H, 1, D, generator=r)
    q[:, :, [3, 9]] += 3 * torch.randn(1, H, 1, D, generator=r)
    number = torch.arange(SLOTS)[None]
    return q, k, number.where(number < FIRST + SEGMENT, -1)


def by_hand(q, k):
    """Block by block, in NumPy: the earlier slots that all heads read."""
    x = q[0].double().numpy().transpose(1, 0, 2).reshape(SEGMENT, -1)  # [T,HD]
    mean, variance = x.mean(0), x.var(0)
    delta = ((x - mean) ** 2 / (variance + variance.mean() / 100)).mean(1)
    probe = (delta[:, None] * x).sum(0) / delta.sum()
    blocks, like = FIRST // BLOCK, []
    for block in range(blocks):
        parts = []
        for head in range(H):
            group = head // (H // G)
            keys = k[0, group, block * BLOCK : (block + 1) * BLOCK].double().numpy()
            asked = mean.reshape(G, H // G, D)[group].mean(0)
            parts.append(keys[np.argsort(-(keys @ asked))[:2]].mean(0))
        vector = np.concatenate(parts)
        like.append(probe @ vector / np.linalg.norm(probe) / np.linalg.norm(vector))
    always = {0, 1, blocks - 1}
    best = [b for b in np.argsort(like)[::-1].tolist() if b not in always]
    return {b * BLOCK + i for b in [*always, *best[:4]] for i in range(BLOCK)}


def law_blocks(method):
    for seed in range(6):
        q, k, pos = tensors(seed)
        slots, _ = chosen(method, q, k, pos, torch.tensor([FIRST]), 0.5)
        for group in range(G):
            assert {*slots[0, group].tolist()} == by_hand(q, k)


def test_blocks_are_those_most_like_the_probe_query():
    law_blocks(ActqkvPrompt(**SIZES))


def unweighted(self, queries):
    return torch.ones_like(queries[:, :, 0, 0])


def of_all_keys(blocks, mean, best, width):
    return blocks.mean(3)


@pytest.mark.parametrize(
    ("name", "broken"), [("unusual", unweighted), ("vectors", staticmethod(of_all_keys))]
)
def test_another_probe_or_vector_is_caught(name, broken):
    other = type("Broken", (ActqkvPrompt,), {name: broken})
    with pytest.raises(AssertionError):
        law_blocks(other(**SIZES))


def test_equally_unusual_queries_have_their_mean_as_probe():
    method, r = ActqkvPrompt(**SIZES), torch.Generator().manual_seed(0)
    two = torch.randn(1, 2, H, D, generator=r)  # each as far from their mean as the other
    torch.testing.assert_close(method.probe(two), two.mean(1))
    one = two[:, :1]
    assert torch.equal(method.probe(one), one[:, 0])
    three = torch.cat((two, two[:, :1]), 1)
    assert not torch.allclose(method.probe(three), three.mean(1), atol=1e-3), "the control"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"best": 0}, "best is 0; give 1 to 1024"),
        ({"sinks": 6}, "sinks is 6; give a multiple of block = 4"),
        ({"window": -4}, "window is -4; give at least 0"),
        ({"window": 20}, r"sinks \+ window = 28; give less than budget = 28"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, why):
    with pytest.raises(RecipeError, match=why):
        ActqkvPrompt(**{**SIZES, **options})
