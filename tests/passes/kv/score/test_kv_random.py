"""Random scores: the same for a token whenever it is asked for, unlike in other layers and heads."""

import pytest
import torch

from accel.ir.errors import RecipeError

from ....kv_case import evicting, kept, recipe
from ....kv_slots import AXES, build, choose, sets, slots

BARE = {"sinks": 0, "recent": 0}


def test_a_token_has_one_score_per_layer_and_head():
    method, where = build("score", "kv-random"), torch.arange(500).expand(2, 3, 500)
    found = method(where, torch.tensor(1))
    assert torch.equal(found[0], found[1]) and 0 < float(found.min()) < float(found.max()) < 1
    assert torch.equal(method(where[:, :, 100:], torch.tensor(1)), found[:, :, 100:])
    others = [found[0, 1], method(where, torch.tensor(2))[0, 0]]
    others.append(build("score", "kv-random", seed=1)(where, torch.tensor(1))[0, 0])
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack((found[0, 0], other)))[0, 1])) < 0.15
    assert abs(float(found.mean()) - 0.5) < 0.05


def test_kept_sets_are_spread_and_do_not_see_keys():
    x, method = slots(0, base=(0, 0, 0), recent=(16, 16, 16)), build("score", "kv-random", **BARE)
    found = sets(choose(x, 8, method))
    louder = {n: v * 3 if v.is_floating_point() else v for n, v in x.items()}
    assert sets(choose(louder, 8, method)) == found
    assert found[0][0] != found[0][1] and found[0] == found[2]


def test_layers_of_a_session_keep_their_own(stateful):
    case = evicting(stateful("llama"), recipe("kv-random", kept=12))
    session = case.session()
    session.run(case.tokens(1, 40))
    session.end_prompt()
    first, second = (where[0, 0].tolist() for where in kept(session).values())
    assert first != second and 0 in first and {38, 39} <= set(first)


def test_options_out_of_range_are_refused():
    with pytest.raises(RecipeError, match="seed is -1; give at least 0"):
        AXES["score"].build("kv-random", seed=-1)
