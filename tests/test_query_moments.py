"""The inputs of eviction that go by queries before their rotation, and by keys before theirs."""

import numpy as np
import pytest
import torch

from accel.ir.errors import InputError, PassError
from accel.ir.ops.rope import rope
from accel.passes.kv._shared.rotation import Rotation, rotated
from accel.passes.kv.inputs.query_moments import QueryMoments, future, moments
from accel.passes.kv.inputs.unrotated_keys import UnrotatedKeys
from accel.passes.kv.score.capkv import CapKV
from accel.passes.kv.score.expected_attention import ExpectedAttention

from .kv_case import evicting, ragged_is_alone, recipe, state
from .session_ways import close

B, H, T, D, M = 2, 3, 11, 8, 64


def queries(seed=0, mean=3.0):
    return mean + torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(seed))


def tables(half=D // 2, factor=1.0):
    angles = torch.arange(M)[:, None] * torch.linspace(1.0, 0.01, half)
    return angles.cos() * factor, angles.sin() * factor


def rotation(cos, sin, factor=1.0):
    return Rotation(None, cos, sin, False, factor, (None, None))


@pytest.mark.parametrize("cuts", [(T,), (1, 4, 6), (1,) * T])
@pytest.mark.parametrize("rows", [2, D + 2])
def test_moments_are_those_of_all_real_queries_however_they_come(cuts, rows):
    x, real = queries(), torch.ones(B, T, dtype=torch.bool)
    real[0, :4], real[1, 6:] = False, False
    x[~real[:, None].expand(B, H, T)] = 1e4
    found = torch.zeros(B, H, rows, D)
    for part, mask in zip(x.split(cuts, 2), real.split(cuts, 1), strict=True):
        found = moments(part, mask, found)
    for row, head in np.ndindex(B, H):
        want = x[row, head, real[row]].double().numpy()
        assert (found[row, head, 1] == len(want)).all()
        np.testing.assert_allclose(found[row, head, 0], want.mean(0), rtol=1e-5)
        if rows > 2:
            covariance = np.cov(want.T, bias=True)
            np.testing.assert_allclose(found[row, head, 2:] / len(want), covariance, atol=1e-4)
            other = np.cov(x[row, head].double().numpy().T, bias=True)
            assert not np.allclose(found[row, head, 2:] / len(want), other), "the control"


@pytest.mark.parametrize(
    "half, interleaved, factor", [(4, False, 1), (4, True, 1), (2, False, 1.3)]
)
def test_rotated_is_rope(half, interleaved, factor):
    x, where = queries(), torch.randint(0, M, (B, T), generator=torch.Generator().manual_seed(1))
    cos, sin = tables(half, factor)
    want = rope(x, where, cos, sin, interleaved)
    found = rotated(x, cos[where][:, None], sin[where][:, None], interleaved)
    torch.testing.assert_close(found, want)
    assert not torch.allclose(
        rotated(x, cos[where][:, None], -sin[where][:, None], interleaved), want
    )


@pytest.mark.parametrize("count", [1, 7, M, 3 * M])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_queries_to_come_are_under_the_mean_matrix(count, factor):
    cos, sin = tables(factor=factor)
    seen, angles = torch.tensor([5, 30]), torch.linspace(1.0, 0.01, D // 2).double()
    x = torch.zeros(B, H, D + 2, D)
    x = moments(queries(), torch.ones(B, T, dtype=torch.bool), x)
    mean, covariance = future(x, seen, (cos, sin, *rotation(cos, sin, factor).mean(count)), False)
    for row, n in enumerate(seen.tolist()):
        where = torch.arange(n, n + count)[:, None] * angles
        c, s = (torch.diag(f(where).mean(0)) * factor for f in (torch.cos, torch.sin))
        matrix = torch.cat((torch.cat((c, -s), 1), torch.cat((s, c), 1)))
        torch.testing.assert_close(
            mean[row].double(), x[row, :, 0].double() @ matrix.T, atol=2e-4, rtol=1e-3
        )
        want = matrix @ (x[row, :, 2:].double() / T) @ matrix.T
        torch.testing.assert_close(covariance[row].double(), want, atol=2e-3, rtol=1e-3)
        orthogonal = torch.allclose(matrix @ matrix.T, factor**2 * torch.eye(D).double(), atol=1e-6)
        assert orthogonal == (count == 1)


def test_rotations_that_do_not_compose_are_refused():
    cos, sin = tables()
    cos[M // 2 :], sin[M // 2 :] = cos[: M // 2].clone(), sin[: M // 2].clone()
    with pytest.raises(PassError, match="do not make one"):
        rotation(cos, sin).mean(4)


def test_keys_come_back_from_any_position():
    cos, sin = tables(factor=1.3)
    plain = torch.randn(B, H, 6, D, generator=torch.Generator().manual_seed(0))
    where = torch.tensor([3, 9, 40, 41, 50, -1]).expand(B, H, 6)
    keys = rotated(plain, cos[where.clamp(min=0)], sin[where.clamp(min=0)], False)
    x = {
        "kept_k": keys[:, :, :4], "recent_k": keys[:, :, 4:],
        "kept_pos": where[:, :, :4], "recent_pos": where[:, 0, 4:],
    }  # fmt: skip
    back = {"back_halves_cos": cos / 1.3**2, "back_halves_sin": -sin / 1.3**2}
    found = UnrotatedKeys().read(x | back)["unrotated_keys"]
    torch.testing.assert_close(found, plain)
    assert torch.equal(UnrotatedKeys().read(x)["unrotated_keys"], keys), "a model without rotation"


def test_two_methods_agree_on_what_they_read():
    from accel.passes.kv.inputs.query_moments import _wanted

    assert _wanted((CapKV(),)) == (CapKV(), False)
    assert _wanted((CapKV(), ExpectedAttention()))[1]
    with pytest.raises(PassError, match="two methods"):
        _wanted((CapKV(future=3), ExpectedAttention()))
    assert set(QueryMoments.names) & CapKV().reads == {"query_mean"}


@pytest.fixture(scope="module")
def case(stateful):
    return evicting(stateful("llama"), recipe("expected-attention"))


def test_padding_and_calls_leave_the_moments_of_a_row(case):
    tokens = case.tokens(2, 20)
    one, other = case.session(2), case.session(1)
    one.run(tokens, [20, 13])
    for cut in (tokens[[1], :5], tokens[[1], 5:6], tokens[[1], 6:13]):
        other.run(cut)
    name = "mass.1.query.recent"
    close(state(one)[name][[1]], state(other)[name], 1e-3)
    assert (state(other)[name][0, :, 1] == 13 - 2).all(), "the first two are sinks"
    with pytest.raises(InputError, match="cannot rewind"):
        other.rewind(5)
    other.rewind(0)
    assert not state(other)[name].any()


@pytest.mark.long
def test_rows_of_a_batch_are_alone(case):
    ragged_is_alone(case)


@pytest.mark.parametrize("score", ["expected-attention", "compactor"])
def test_a_latent_is_refused(stateful, score):
    with pytest.raises(PassError, match="changed after their rotation"):
        evicting(stateful("plain_latent"), recipe(score))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gemma2", "jamba"])
@pytest.mark.parametrize("score", ["expected-attention", "compactor"])
def test_models_of_other_kinds(stateful, kind, score):
    ragged_is_alone(evicting(stateful(kind), recipe(score, kept=8)))
