"""k-centre: what the greedy choice must hold, beyond the laws of its axis."""

import itertools

import matrix
import pytest
import torch

from accel.ir.errors import RecipeError
from accel.ir.ops.centres import farthest_first

from ....kv_slots import build


def chosen(x, count, real=None):
    """The centres of points [S,D], in their order."""
    real = torch.ones(1, 1, len(x), dtype=torch.bool) if real is None else real
    far = torch.full((1, 1, len(x)), torch.inf)
    order = farthest_first(x[None, None], real, far, torch.tensor(count))[0, 0]
    return [int(i) for i in order.argsort(descending=True)[:count]]


def radius(x, centres):
    return float(torch.cdist(x, x[list(centres)]).amin(1).max())


def law(take):
    for seed in range(6):
        x = torch.randn(11, 3, generator=torch.Generator().manual_seed(seed))
        found = [radius(x, take(x, m)) for m in range(1, 9)]
        assert all(b <= a + 1e-6 for a, b in itertools.pairwise(found)), "a nested choice"
        for m in (2, 3):
            best = min(radius(x, c) for c in itertools.combinations(range(11), m))
            assert found[m - 1] <= 2 * best + 1e-5


def test_the_radius_is_at_most_twice_the_best():
    law(chosen)


@pytest.mark.parametrize("broken", ["nearest", "first"])
def test_another_choice_is_caught(broken):
    def take(x, m):
        if broken == "first":
            return range(m)
        return torch.cdist(x, x[:1])[:, 0].argsort()[:m].tolist()

    with pytest.raises(AssertionError):
        law(take)


def test_it_is_the_greedy_choice_of_the_paper():
    """Key 0 first, then by loops the farthest from its nearest centre."""
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    want = [0]
    while len(want) < 9:
        apart = torch.cdist(x, x[want]).amin(1)
        apart[want] = -1
        want.append(int(apart.argmax()))
    assert chosen(x, 9) == want
    far = torch.full((1, 1, 20), torch.inf)
    order = farthest_first(x[None, None], far > 0, far, torch.tensor(9))[0, 0]
    rest = [i for i in range(20) if i not in want]
    assert max(float(order[i]) for i in rest) < 1
    assert order[rest].argmax() == torch.cdist(x, x[want]).amin(1)[rest].argmax(), "the next one"


def test_clusters_are_covered_by_as_many_tokens():
    """Ten clusters of twenty keys each: ten tokens, one of each."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 8, generator=generator) * 10
    keys = centres.repeat(20, 1) + 0.05 * torch.randn(200, 8, generator=generator)
    positions = torch.arange(200)[None, None]
    scores = build("score", "k-centre", recent=0)(keys[None, None], positions, torch.tensor([10]))
    kept = scores[0, 0].topk(10).indices
    assert sorted((kept % 10).tolist()) == list(range(10))
    assert len(set((torch.randperm(200, generator=generator)[:10] % 10).tolist())) < 10


@pytest.mark.long
def test_onnx_equals_the_oracle():
    outcome = matrix.Matrix().run(matrix.Case("llama", (("kv.score", "k-centre"),)))
    assert outcome.kind == "equal", outcome.why


def test_bad_input_is_refused():
    with pytest.raises(RecipeError, match="recent"):
        build("score", "k-centre", recent=-1)
