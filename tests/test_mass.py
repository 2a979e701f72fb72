"""Scores and keeps that go by accumulated attention: what each adds up, and what it does with it."""

import numpy as np
import pytest
import torch

from accel.ir.errors import RecipeError
from accel.ir.ops.mass import attention_weights, drawn_attention
from accel.ir.ops.noise import gumbel, uniform
from accel.passes.kv.inputs.entropy import own_entropy
from accel.passes.kv.score.a2sf import A2SF
from accel.passes.kv.score.critic import Critic
from accel.passes.kv.score.h2o import H2O
from accel.passes.kv.score.keyformer import Keyformer

from .kv_case import evicting, recipe, state
from .kv_slots import AXES, B, D, G, build, choose, slots
from .session_ways import close, singles

S, T, R = 7, 4, 2


def attention(seed=0, first=2):
    """`mass`, `weights`, `query_positions`, `positions` of rows that had `first` tokens before; the second row's
    last query is padding.
    """
    r = torch.Generator().manual_seed(seed)
    positions = torch.arange(S).masked_fill(torch.arange(S) >= first + T, -1).expand(B, G, S)
    query = (first + torch.arange(T)).expand(B, T).clone()
    query[1, -1] = -1
    logits = torch.randn(B, G, R, T, S, generator=r)
    hidden = (positions[:, :, None, None] > query[:, None, None, :, None]) | (
        positions[:, :, None, None] < 0
    )
    weights = logits.masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0)
    weights = weights * (query >= 0)[:, None, None, :, None]
    return torch.rand(B, G, S, generator=r), weights, query, positions


def drawn(weights):
    """What slots draw of these weights."""
    return lambda share=None: (
        weights * (1 if share is None else share[:, None, None, :, None])
    ).sum((2, 3))


def forgetful(decay, mass, weights, query):
    """a2sf, query by query."""
    mass = mass.clone()
    for row in range(B):
        for t in range(T):
            if query[row, t] >= 0:
                mass[row] = decay * mass[row] + weights[row, :, :, t].sum(1)
    return mass


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.95, 1.0])
def test_a2sf_forgets_query_by_query(decay):
    mass, weights, query, _ = attention()
    found = A2SF(decay=decay).accumulate(mass, drawn(weights), query)
    torch.testing.assert_close(found, forgetful(decay, mass, weights, query))
    assert not torch.allclose(found, forgetful(0.5, mass, weights, query)), "the control"
    alone = A2SF(decay=decay).accumulate(mass, drawn(weights[:, :, :, :0]), query[:, :0])
    assert torch.equal(alone, mass)


def computed(seed=0):
    """`mass`, what slots draw of computed attention, its weights, positions of queries and slots."""
    r = torch.Generator().manual_seed(seed)
    mass, _, query, positions = attention(seed)
    q = torch.randn(B, G * R, T, D, generator=r)
    k, v = torch.randn(B, G, S, D, generator=r), torch.randn(B, G, S, D, generator=r)
    operands = (q, k, v, query, positions[:, 0], None, 0.7, 0.0, "causal", 0)
    weights = attention_weights(*operands).unflatten(1, (G, R))

    def draw(share=None, **noisy):
        share = torch.ones(B, T) if share is None else share
        return drawn_attention(*operands, share=share, **noisy)

    return mass, draw, weights, query, positions


def test_without_forgetting_and_without_noise_both_are_h2o():
    mass, draw, weights, query, _ = computed()
    want = mass + weights.sum((2, 3))
    torch.testing.assert_close(H2O().accumulate(mass, draw), want)
    torch.testing.assert_close(A2SF(decay=1.0).accumulate(mass, draw, query), want)
    plain = Keyformer(noise=0.0, end=1.0)
    steps, layer = torch.zeros(B), torch.tensor(0)
    torch.testing.assert_close(plain.accumulate(mass, draw, steps, layer), want)
    noisy = Keyformer().accumulate(mass, draw, steps, layer)
    assert not torch.allclose(noisy, want), "the control"


def test_keyformer_is_a_softmax_with_noise_and_temperature():
    mass, draw, weights, query, positions = computed()
    method, steps = Keyformer(seed=3, rise=10), torch.tensor([0.0, 5.0, 40.0])
    found = method.accumulate(mass, draw, steps, torch.tensor(1))
    want = mass.double().clone()
    for row, head, t in np.ndindex(B, G * R, T):
        if query[row, t] < 0:
            continue
        own = weights[row, head // R, head % R, t].double()
        there = own > 0
        key = positions[row, head // R]
        g = gumbel(3, torch.tensor(1), torch.tensor(head + 1), query[row, t], key).double()
        logits = (own.log() + g) / min(1 + float(steps[row]) / 10, 2)
        want[row, head // R, there] += logits[there].softmax(0)
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-4)
    again = method.accumulate(mass, draw, steps, torch.tensor(1))
    other = method.accumulate(mass, draw, steps, torch.tensor(2))
    assert torch.equal(found, again) and not torch.allclose(found, other)


def test_noise_looks_uniform_and_is_no_function_of_one_number_alone():
    x = uniform(0, torch.arange(60)[:, None], torch.arange(1000)[None])
    assert 0 < float(x.min()) and float(x.max()) < 1
    counts = torch.histc(x, 20, 0, 1) / x.numel()
    assert float((counts - 0.05).abs().max()) < 0.004
    pairs = torch.corrcoef(torch.stack((x[:, :-1].flatten(), x[:, 1:].flatten())))[0, 1]
    rows = torch.corrcoef(torch.stack((x[:-1].flatten(), x[1:].flatten())))[0, 1]
    assert abs(float(pairs)) < 0.02 and abs(float(rows)) < 0.02
    assert abs(float(gumbel(1, torch.arange(50000)).mean()) - 0.5772) < 0.03


def test_the_entropy_of_a_token_is_that_of_its_own_query():
    _, weights, query, positions = attention()
    found = own_entropy(torch.zeros(B, G, S), weights, query, positions)
    for row, t in np.ndindex(B, T):
        if query[row, t] >= 0:
            p = weights[row, :, :, t].double()
            want = -(p * p.clamp(min=1e-300).log()).sum(-1).mean(1)
            torch.testing.assert_close(found[row, :, int(query[row, t])].double(), want)
    assert (
        (found[1, :, 5] == 0).all() and (found[..., :2] == 0).all() and (found[0, :, 3] > 0).all()
    )


def test_critic_mixes_two_terms_of_one_scale():
    mass, entropy = torch.rand(B, G, S) * 9, torch.rand(B, G, S)
    positions = torch.arange(S).expand(B, G, S).clone()
    positions[1, :, -2:] = -1
    found = Critic()(mass, entropy, positions)
    real = positions >= 0
    assert float(found[real].min()) >= 0 and float(found[real].max()) <= 1
    torch.testing.assert_close(found[:, 0], found[:, 1])
    only = Critic(attention=1.0, entropy=0.0)(mass, entropy, positions)[0, 0]
    assert torch.equal(only.argsort(), mass[0].mean(0).argsort()), "H2O over all heads"
    assert not torch.equal(found[0, 0].argsort(), mass[0].mean(0).argsort())


def test_cam_spreads_what_goes_over_the_next_that_stay():
    method, x = build("keep", "cam"), slots(0, base=(0, 0, 0), recent=(14, 11, 9))
    found = choose(x, 5, build("score", "h2o"), keep=method, most=5)
    plain = choose(x, 5, build("score", "h2o"), most=5)
    assert torch.equal(found["pos"], plain["pos"]) and torch.equal(found["k"], plain["k"])
    merged = 0
    for row, head in np.ndindex(B, G):
        kept = [int(p) for p in found["pos"][row, head] if p >= 0]
        drawn, values = x["kept_decode_mass.recent"][row, head], x["recent_v"][row, head]
        want = {p: values[p].clone() for p in kept}
        for p in range(int(x["seen"][row])):
            after = [k for k in kept if k > p][:3]
            if p in kept or not after:
                continue
            likely = float(drawn[p] / drawn[after].mean())
            if float(uniform(0, torch.tensor(head + 1), torch.tensor(p))) < likely:
                merged += 1
                for k in after:
                    want[k] += values[p] / len(after)
        torch.testing.assert_close(
            found["v"][row, head, : len(kept)], torch.stack([*want.values()])
        )
    assert merged > 5 and not torch.allclose(found["v"], plain["v"])
    silent = {**x, "kept_decode_mass.recent": torch.zeros_like(x["kept_mass.recent"])}
    nothing = choose(silent, 5, build("score", "knorm"), keep=method, most=5)
    base = choose(silent, 5, build("score", "knorm"), most=5)
    torch.testing.assert_close(nothing["v"], base["v"]), "attention of 0 merges nothing"
    assert found["v"].shape[3] == D


def test_sessions_accumulate_call_by_call_as_at_once(stateful):
    """A prompt in one call, or token by token: the same mass, where neither noise nor steps differ."""
    for name in ("a2sf", "critic"):
        tables = recipe(name, kept=1 << 20)
        case = evicting(stateful("llama"), tables)
        tokens = case.tokens(2, 12)
        whole, single = case.session(2), case.session(2)
        whole.run(tokens)
        singles(single, tokens)
        for key, value in state(whole).items():
            if key.startswith("mass"):
                close(state(single)[key][..., :12], value[..., :12])
    case = evicting(stateful("llama"), recipe("keyformer", kept=1 << 20))
    one, other = case.session(2), case.session(2)
    one.run(tokens)
    singles(one, tokens[:, :3])
    assert (state(one)["mass.0.steps.recent"] == 3).all()
    one.rewind(0)
    one.run(tokens)
    other.run(tokens)
    assert np.array_equal(state(one)["mass.0.recent"], state(other)["mass.0.recent"])


@pytest.mark.parametrize(
    "axis, name, options, message",
    [
        ("score", "a2sf", {"decay": 1.5}, "decay is 1.5; give 0 to 1"),
        ("score", "a2sf", {"recent": -1}, "recent is -1; give at least 0"),
        ("score", "keyformer", {"start": 0.0}, "start is 0.0; give more than 0"),
        ("score", "keyformer", {"noise": -1.0}, "noise is -1.0; give at least 0"),
        ("score", "keyformer", {"rise": 0}, "rise is 0; give 1 to 1048576"),
        (
            "score",
            "critic",
            {"attention": 0.0, "entropy": 0.0},
            "attention is 0.0 and entropy 0.0; give weights, one of them above 0",
        ),
        ("keep", "cam", {"window": 0}, "window is 0; give 1 to 4096"),
    ],
)
def test_options_out_of_range_are_refused(axis, name, options, message):
    with pytest.raises(RecipeError, match=message):
        AXES[axis].build(name, **options)
