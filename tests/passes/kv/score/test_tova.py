"""TOVA: against the attention of one query, and what it shares with other scores."""

import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError

from ....kv_slots import AXES, SCALE, G, build, choose, sets, slots

FULL = {"base": (0, 0, 0), "recent": (16, 12, 7)}


def drawn(x, row, n):
    """What the last query gives each token: a mean over all heads."""
    q = x["queries"][row, -1].view(G, 2, -1).double().numpy()
    k = x["recent_k"][row, :, :n].double().numpy()
    e = np.exp(q @ k.transpose(0, 2, 1) * SCALE)
    return (e / e.sum(-1, keepdims=True)).mean((0, 1))


@pytest.mark.parametrize("recent", [0, 1])
def test_is_the_attention_of_the_last_query(recent):
    for seed in range(3):
        x = slots(seed, **FULL)
        found = sets(choose(x, 5, build("score", "tova", recent=recent)))
        for row, n in enumerate((16, 12, 7)):
            worth = drawn(x, row, n)
            worth[n - recent :] = 9
            assert found[row] == [set(np.argsort(-worth)[:5].tolist())] * G


def test_all_heads_keep_the_same_and_other_queries_do_not_count():
    x, method = slots(5, **FULL), build("score", "tova")
    want = sets(choose(x, 5, method))
    assert all(row[0] == row[1] for row in want)
    x["queries"][:, :-1] = torch.randn(x["queries"][:, :-1].shape)
    assert sets(choose(x, 5, method)) == want
    x["queries"][:, -1] = torch.randn(x["queries"][:, -1].shape)
    assert sets(choose(x, 5, method)) != want, "the control"


def test_options_out_of_range_are_refused():
    with pytest.raises(RecipeError, match="kv.score.tova: recent is -1; give at least 0"):
        AXES["score"].build("tova", recent=-1)
