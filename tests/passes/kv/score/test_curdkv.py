"""CurDKV: against NumPy, and what its page says of windows and scales."""

import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError

from ....kv_slots import AXES, B, G, build, choose, named, sets, slots

BY = ["product", "mean", "keys", "values"]


def shares(x, window):
    """Rows [n,D] -> squared norms as a share of their window."""
    norms = (x**2).sum(-1)
    parts = [norms[i : i + window] for i in range(0, len(norms), window)]
    return np.concatenate([part / part.sum() for part in parts])


@pytest.mark.parametrize("by", BY)
def test_is_the_share_of_a_window(by):
    method = build("score", "curdkv", by=by, window=4)
    for seed in range(3):
        given = named(slots(seed))
        found = method(given["keys"], given["values"], given["positions"]).double().numpy()
        for row, head in np.ndindex(B, G):
            real = given["positions"][row, head].numpy() >= 0
            k, v = (given[n][row, head].double().numpy()[real] for n in ("keys", "values"))
            k, v = shares(k, 4), shares(v, 4)
            want = {"product": k * v, "mean": (k + v) / 2, "keys": k, "values": v}[by]
            np.testing.assert_allclose(found[row, head, real], want / want.sum(), rtol=1e-4)
            whole = shares(given["keys"][row, head].double().numpy()[real], 99)
            assert not np.allclose(found[row, head, real], whole), "the control"


def test_a_projection_is_one_for_keys_values_and_heads():
    """Equal rows have equal shares, wherever they lie; and not those without a projection."""
    x = named(slots(1))
    x["values"] = x["keys"][:, :1].expand_as(x["keys"])
    x["keys"] = x["values"]
    found = {
        channels: build("score", "curdkv", window=4, by="keys", channels=channels)
        for channels in (0, 2, 200)
    }
    found = {
        n: m(x["keys"], x["values"], x["positions"][:, :1].expand(-1, G, -1))
        for n, m in found.items()
    }
    for scores in found.values():
        torch.testing.assert_close(scores[:, 0], scores[:, 1])
    assert (found[0] - found[2]).abs().max() > 0.05
    torch.testing.assert_close(found[0], found[200], atol=0.05, rtol=0.3)  # many keep lengths


def test_scale_and_rotation_change_nothing():
    x, method = slots(2), build("score", "curdkv", window=4)
    want = sets(choose(x, 7, method))
    turn, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    moved = {n: v.clone() for n, v in x.items()}
    for part in ("kept", "recent"):
        moved[f"{part}_k"] = x[f"{part}_k"] @ turn * 3
        moved[f"{part}_v"] = x[f"{part}_v"] * 0.5
    assert sets(choose(moved, 7, method)) == want
    moved["recent_k"] = moved["recent_k"] * torch.linspace(0.1, 3, 16)[:, None]
    assert sets(choose(moved, 7, method)) != want, "the control"


def test_a_token_without_a_number_harms_no_other():
    x, method = slots(4, base=(0, 0, 0), recent=(16, 16, 16)), build("score", "curdkv")
    x["recent_v"][:, :, 9] = float("nan")
    found = sets(choose(x, 15, method))
    assert all(head == set(range(16)) - {9} for row in (found[0], found[2]) for head in row)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sinks": -1}, "sinks is -1; give at least 0"),
        ({"window": 0}, "window is 0; give 1 to 1048576"),
        ({"recent": -1}, "recent is -1; give at least 0"),
        ({"channels": -1}, "channels is -1; give 0 to 256"),
        ({"by": "key"}, r"by 'key' does not exist; did you mean 'keys'\?"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        AXES["score"].build("curdkv", **options)
