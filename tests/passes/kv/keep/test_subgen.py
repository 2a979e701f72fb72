"""subgen: the sketch of evicted tokens estimates, in the mean, what they add to attention."""

import matrix
import numpy as np
import pytest
import torch

from accel.ir.errors import PassError, RecipeError
from accel.passes.kv.keep.subgen import SubGen

from ....kv_case import FOREVER, evicting, recipe, state
from ....kv_slots import build
from ....session_ways import close

TOKENS, D, SCALE = 24, 5, 0.6


def evicted():
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(4, D, generator=generator)
    keys = centres[torch.arange(TOKENS) % 4] + 0.4 * torch.randn(TOKENS, D, generator=generator)
    values = torch.randn(TOKENS, D, generator=generator) * torch.rand(
        TOKENS, 1, generator=generator
    )
    return keys[None, None], values[None, None], torch.randn(1, 2, 3, D, generator=generator)


def sketch(keep, cuts=(9, 15)):
    """The state after three evictions of one head."""
    keys, values, _ = evicted()
    held = {n: torch.zeros(1, 1, *size) for n, size in keep.absorbed(D, D).items()}
    positions = torch.arange(TOKENS)[None, None]
    for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        gone = (positions >= start) & (positions < end)
        held = keep.absorb(**held, keys=keys, values=values, positions=positions, gone=gone)
    return held


def sums(keep):
    """Estimates of the sum of weights [1,2,3] and of the weighted sum of values [1,2,3,D]."""
    held = {n: t for n, t in sketch(keep).items() if n != "centres"}
    value, lse = keep.read(evicted()[2], SCALE, 0.0, **held)
    return lse.exp(), value * lse.exp()[..., None]


def exact():
    keys, values, queries = evicted()
    weights = (queries @ keys.transpose(2, 3) * SCALE).exp()
    return weights.sum(3), weights @ values


def law_mean(kind, seeds=150):
    found = [sums(kind(clusters=3, samples=2, slots=6, seed=37 * i)) for i in range(seeds)]
    for part, want in zip(zip(*found, strict=True), exact(), strict=True):
        every = torch.stack(part)
        error = every.std(0) / seeds**0.5
        assert ((every.mean(0) - want).abs() <= 4.5 * error + 1e-4).all()


@pytest.mark.long
def test_both_sums_are_right_in_the_mean():
    law_mean(SubGen)


class Stays(SubGen):
    """What was drawn first is never drawn anew."""

    def absorb(self, members, drawn, **rest):
        found = super().absorb(members=members, drawn=drawn, **rest)
        later = rest["norms"][..., None] > 0
        return found | {"drawn": torch.where(later, drawn, found["drawn"])}


class Alike(SubGen):
    """Clusters count as equally large."""

    def read(self, queries, scale, softcap, sizes, **rest):
        return super().read(
            queries, scale, softcap, sizes=torch.full_like(sizes, TOKENS / 3), **rest
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("broken", [Stays, Alike])
def test_a_biased_sketch_is_caught(broken):
    with pytest.raises(AssertionError):
        law_mean(broken)


def test_a_cluster_for_each_token_makes_the_sum_of_weights_exact():
    want = exact()[0]
    torch.testing.assert_close(sums(SubGen(clusters=TOKENS, samples=1, slots=2))[0], want)
    assert not torch.allclose(sums(SubGen(clusters=3, samples=1, slots=2))[0], want, rtol=0.01)


def test_the_sketch_is_of_fixed_size_and_counts_every_token():
    held = sketch(SubGen(clusters=3, samples=2, slots=6))
    assert held["sizes"].sum() == TOKENS
    torch.testing.assert_close(held["norms"].sum(), evicted()[1].square().sum())
    keys, values, _ = evicted()
    pairs = {tuple(torch.cat(p).tolist()) for p in zip(keys[0, 0], values[0, 0], strict=True)}
    assert all(tuple(d.tolist()) in pairs for d in held["drawn"][0, 0])
    for i, size in enumerate(held["sizes"][0, 0]):
        members = held["members"][0, 0, :, i]
        assert size > 0 and all((keys[0, 0] == m).all(1).any() for m in members)


@pytest.mark.long
def test_more_samples_are_nearer():
    off = []
    for size in (4, 16):
        found = [sums(SubGen(clusters=size, samples=2, slots=4 * size, seed=i)) for i in range(30)]
        off.append(sum(float((x[1] - exact()[1]).square().mean()) for x in found))
    assert off[1] < 0.6 * off[0]


# Sessions


def tables(kept=12):
    small = {"use": "subgen", "clusters": 6, "samples": 2, "slots": 12}
    return {**recipe("streaming-llm", kept), "kv.keep": small}


@pytest.mark.long
def test_a_session_reads_the_sketch_and_takes_it_back(stateful):
    case = evicting(stateful("llama"), tables())
    tokens, ours = case.tokens(2, 50), case.session(2)
    ours.run(tokens[:, :40])
    ours.end_prompt()
    held = state(ours)["absorbed.0.sizes"].copy()
    assert (held.sum(2) == 28).all()
    other = ours.fork()
    want = other.run(tokens[:, 40:44])
    ours.run(tokens[:, 46:50])
    ours.rewind(40)
    close(ours.run(tokens[:, 40:44]), want)
    dropped = evicting(stateful("llama"), recipe("streaming-llm")).session(2)
    dropped.run(tokens[:, :40])
    dropped.end_prompt()
    with pytest.raises(AssertionError):
        close(dropped.run(tokens[:, 40:44]), want)
    other.rewind(0)
    assert not state(other)["absorbed.0.sizes"].any()
    whole = [
        evicting(stateful("llama"), t).session(2, budget=FOREVER)
        for t in (tables(), recipe("streaming-llm"))
    ]
    for one in whole:
        one.run(tokens[:, :40])
        one.end_prompt()
    a, b = (one.run(tokens[:, 40:44]) for one in whole)
    assert (a == b).all(), "nothing evicted"


@pytest.mark.long
def test_layers_with_a_window_leave_nothing_and_a_soft_cap_is_kept(stateful):
    """Every second layer of this model has a window, and all cap their scores."""
    program = stateful("gemma2")
    case = evicting(program, tables())
    layers = {int(s.name.split(".")[1]) for s in program.state if s.name.startswith("absorbed.")}
    windows = {i for i, layer in enumerate(program.facts.layers) if layer.window}
    assert layers and windows and not layers & windows
    session, tokens = case.session(), case.tokens(1, 50)
    session.run(tokens[:, :40])
    session.end_prompt()
    assert np.isfinite(session.run(tokens[:, 40:44])).all()
    keys, _, queries = evicted()
    keep = SubGen(clusters=TOKENS, samples=1, slots=2)
    held = {n: t for n, t in sketch(keep).items() if n != "centres"}
    want = (torch.tanh(queries @ keys.transpose(2, 3) * SCALE / 0.7) * 0.7).exp().sum(3)
    torch.testing.assert_close(keep.read(queries, SCALE, 0.7, **held)[1].exp(), want)


@pytest.mark.long
def test_onnx_equals_the_oracle():
    outcome = matrix.Matrix().run(matrix.Case("llama", (("kv.keep", "subgen"),)))
    assert outcome.kind == "equal", outcome.why


def test_bad_input_is_refused(stateful):
    with pytest.raises(PassError, match="every layer attends to a window"):
        evicting(stateful("mistral"), tables())
    for options in ({"clusters": 0}, {"samples": 0}, {"slots": 0}, {"seed": -1}):
        with pytest.raises(RecipeError, match="subgen"):
            build("keep", "subgen", **options)
