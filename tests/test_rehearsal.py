"""Scores of tokens that a session runs aside, guesses (laq) or the prompt again (kvzip); budgets that scores decide."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from accel.ir.errors import InputError, RecipeError
from accel.ir.ops.attention import Form
from accel.passes.kv.inputs.attends import attention_over
from accel.passes.kv.score import laq
from accel.passes.kv.score.kvzip import KVzip
from accel.passes.kv.score.laq import LAQ
from accel.runtime.kv.budget.simlayerkv import SimLayerKV
from accel.runtime.session.state.eviction import EvictionState

from .kv_case import evicting, kept, recipe, state
from .kv_slots import AXES, SCALE, B, G, build, choose, sets, slots
from .session_ways import close, singles


def tables(score, kept=12, **options):
    found = recipe("snapkv", kept)
    return {**found, "kv.score": {"use": score, **AXES["score"].small(score), **options}}


@pytest.fixture
def case(stateful):
    return lambda *args, **options: evicting(stateful("llama"), tables(*args, **options))


def spied(monkeypatch):
    """The inputs of each compression, the copy's among them."""
    seen, whole = [], EvictionState.compress_inputs

    def listening(self, *args):
        seen.append(whole(self, *args))
        return seen[-1]

    monkeypatch.setattr(EvictionState, "compress_inputs", listening)
    return seen


# laq


def test_guesses_are_the_greedy_tokens_of_a_copy(case, monkeypatch):
    """The queries that vote are those of tokens which the compressed copy would decode."""
    one, seen = case("laq"), spied(monkeypatch)
    tokens, lengths = one.tokens(2, 30), [30, 21]
    session = one.session(2)
    logits = session.run(tokens, lengths)
    session.end_prompt()
    first, last = seen
    assert (first["query_positions"] < np.array([[30], [21]])).all(), "the copy's own prompt"
    assert (last["query_positions"][:, -3:] == [[30, 31, 32], [21, 22, 23]]).all()
    plain = one.session(2, wrap=None)
    plain.run(tokens, lengths)
    state_ = next(o for o in plain._core.observers if hasattr(o, "_guesses"))
    state_._guesses = True  # compress by the prompt's own queries alone, and go on observing
    plain.end_prompt()
    step = np.stack([logits[row, n - 1].argmax() for row, n in enumerate(lengths)])[:, None]
    for _ in range(3):
        step = plain.run(step)[:, -1].argmax(-1)[:, None]
    for name, queries in state_._queries.items():
        np.testing.assert_allclose(last[name][:, -3:], queries[:, -3:], atol=1e-4)
    assert session.lengths.tolist() == lengths
    assert all(int(p.max()) < 30 and (p[1] < 21).all() for p in kept(session).values())


def test_the_last_token_of_a_later_prompt_votes(case, monkeypatch):
    """The copy runs it again by itself, as one token; the third prompt is one."""
    one, seen = case("laq"), spied(monkeypatch)
    tokens, session = one.tokens(1, 49), one.session(1)
    for end in (30, 48, 49):
        seen.clear()
        session.run(tokens[:, session.lengths[0] : end])
        session.end_prompt()
        own, last = (x["query_positions"][0] for x in seen)
        assert (own[-4:] == np.arange(end - 4, end)).all()
        assert (last == np.arange(end - 4, end + 3)).all()


def test_a_row_without_new_tokens_stays_as_it_is(case):
    """While others have a prompt, and are guessed for."""
    one = case("laq")
    tokens, session, alone = one.tokens(2, 49), one.session(2), one.session(1)
    for given, rows in ((session, slice(0, 2)), (alone, slice(1, 2))):
        given.prompt(tokens[rows, :30])
    before = {layer: where[0] for layer, where in kept(session).items()}
    session.prompt(tokens[:, 30:], [0, 19])
    alone.prompt(tokens[1:, 30:])
    for layer, where in kept(session).items():
        assert np.array_equal(where[0], before[layer])
        assert np.array_equal(where[1:], kept(alone)[layer])


def test_generated_tokens_are_not_repeated(case):
    """Nor kept in the log, which would be copied with each."""
    one = case("kvzip")
    tokens, session = one.tokens(1, 40), one.session(1)
    session.prompt(tokens[:, :30])
    singles(session, tokens[:, 30:35])
    assert session.observer(EvictionState)._prompt.tokens.size == 0


@pytest.mark.long
def law_max_of_neighbours(score):
    """By loops: votes of guessed queries and of the prompt's last, their mean, the largest of three neighbours, then
    the mean over the heads of a group; the voting prompt tokens are worth more than any other.
    """
    r = torch.Generator().manual_seed(2)
    n, late, guesses = 12, 2, 3
    q, k = torch.randn(1, 4, 5, 6, generator=r), torch.randn(1, 2, n, 6, generator=r)
    asked = torch.tensor([[10, 11, 12, 13, 14]])
    places = torch.arange(n).expand(1, 2, n)
    attends = attention_over(Form("causal", scale=0.7), {}, k, places)["attends"]
    found = score(q, asked, places, torch.tensor([n]), attends)[0]
    for group, place in np.ndindex(2, n):
        if place >= n - late:
            assert found[group, place] > 1
            continue
        votes = []
        for head in (2 * group, 2 * group + 1):
            near = [s for s in (place - 1, place, place + 1) if 0 <= s < n - late]
            drawn = []
            for s in near:
                weights = [
                    float((k[0, group, : min(at + 1, n)] @ q[0, head, w] * 0.7).softmax(0)[s])
                    for w, at in enumerate(asked[0].tolist())
                ]
                drawn.append(sum(weights) / (late + guesses))
            votes.append(max(drawn))
        assert abs(float(found[group, place]) - sum(votes) / 2) < 1e-5


def test_laq_is_worth_the_largest_of_its_neighbours(monkeypatch):
    method = LAQ(window=4, recent=2, lookahead=3, kernel=3)
    law_max_of_neighbours(method)
    with pytest.raises(AssertionError):
        law_max_of_neighbours(replace(method, kernel=5))
    whole = laq.pooled
    monkeypatch.setattr(laq, "pooled", lambda *args: whole(*args[:3], "mean"))
    with pytest.raises(AssertionError):
        law_max_of_neighbours(method)


@pytest.mark.long
def test_without_guesses_laq_is_snapkv(case):
    found = {}
    options = {"window": 4, "recent": 4, "kernel": 3}
    for name, more in (
        ("laq", {**options, "lookahead": 0}),
        ("snapkv", {"window": 4, "kernel": 3, "pooling": "max"}),
        ("control", {**options, "lookahead": 3}),
    ):
        one = case(name if name != "control" else "laq", **more)
        session = one.session(2)
        session.run(one.tokens(2, 40))
        session.end_prompt()
        found[name] = kept(session)
    for layer, where in found["snapkv"].items():
        assert np.array_equal(found["laq"][layer], where)
    assert any(not np.array_equal(found["control"][n], w) for n, w in found["snapkv"].items())


def test_laq_scores_by_guesses_and_the_newest_queries():
    """Against a sum by hand; queries before the newest do not count."""
    x = slots(1, base=(0, 0, 0), recent=(14, 11, 9))
    x["query_positions"] = x["seen"][:, None] + torch.arange(-2, 2)
    method = LAQ(window=4, recent=1, lookahead=2, kernel=1)
    found = sets(choose(x, 5, method))
    for row in range(B):
        n = int(x["seen"][row])
        for head in range(G):
            keys, total = x["recent_k"][row, head, :n], torch.zeros(n)
            for w in range(1, 4):
                upto = min(n, int(x["query_positions"][row, w]) + 1)
                for q in x["queries"][row, w, 2 * head : 2 * head + 2]:
                    total[:upto] += (keys[:upto] @ q * SCALE).softmax(0)
            best = total[: n - 1].argsort(descending=True)[:4].tolist()
            assert found[row][head] == {*best, n - 1}
    assert found != sets(choose(x, 5, LAQ(window=4, recent=2, lookahead=2, kernel=1)))


def test_a_failed_guess_leaves_the_session_usable(case, monkeypatch):
    one = case("laq")
    tokens, session = one.tokens(1, 30), one.session(1)
    session.run(tokens)
    backend = type(session._core.backend)
    whole = backend.compress
    monkeypatch.setattr(backend, "compress", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.end_prompt()
    monkeypatch.setattr(backend, "compress", whole)
    session.end_prompt()
    other = one.session(1)
    other.run(tokens)
    other.end_prompt()
    close(singles(session, tokens[:, :4]), singles(other, tokens[:, :4]))


# kvzip


def test_kvzip_scores_are_the_most_attention_of_the_repeat(case, monkeypatch):
    """Against a second run of the prompt behind itself, whose weights are taken one by one."""
    one, seen = case("kvzip", kept=1 << 20), {}
    tokens = one.tokens(1, 20)
    session = one.session(1)
    session.run(tokens)
    plan = next(o for o in session._core.observers if hasattr(o, "_guesses"))
    monkeypatch.setattr(plan, "due", lambda *a: True)
    monkeypatch.setattr(plan, "settle", lambda *a: None)
    session.end_prompt()
    mass = {n: v.copy() for n, v in state(session).items() if n.startswith("mass")}
    plain, total = one.session(1), {}
    plain.run(tokens)
    plain._core.backend.put(
        {n: np.zeros_like(v) for n, v in state(plain).items() if n.startswith("mass")}
    )
    singles(plain, tokens)
    seen = {n: v for n, v in state(plain).items() if n.startswith("mass")}
    for name, value in mass.items():
        if value.size:
            close(value[..., :20], seen[name][..., :20])
            total[name] = value[..., :20]
    assert total and session.lengths.tolist() == [20]
    once = one.session(1)
    once.run(tokens)
    assert not np.allclose(state(once)["mass.0.recent"][..., :20], total["mass.0.recent"])


@pytest.mark.long
def test_one_budget_for_all_layers(stateful):
    """The highest scores of the model stay, so many as the mean says; a head may lose all but its sinks."""
    found = {**tables("kvzip", kept=12), "kv.budget": {"use": "kvzip", "tokens_kept": 12}}
    one = evicting(stateful("llama"), found)
    session, tokens = one.session(2), one.tokens(2, 40)
    session.run(tokens, [40, 25])
    session.end_prompt()
    counts = {n: (w >= 0).sum(2) for n, w in kept(session).items()}  # [B,G]
    assert (sum(c.sum(1) for c in counts.values()) == 12 * 2 * len(counts)).all()
    assert len({int(n) for c in counts.values() for n in c.flatten()}) > 1, "no even split"
    assert all(set(range(4)) <= set(h[h >= 0]) for w in kept(session).values() for h in w[0])
    alone = one.session(1)
    alone.run(tokens[[1], :25])
    alone.end_prompt()
    for layer, where in kept(alone).items():
        width = where.shape[2]
        assert np.array_equal(kept(session)[layer][1][:, :width], where[0])


def test_all_layers_by_brute_force():
    r = torch.Generator().manual_seed(0)
    scores = [torch.randn(B, G, n, generator=r) for n in (9, 6)]
    positions = [torch.arange(n).expand(B, G, n) for n in (9, 6)]
    flat = [torch.cat([x.flatten(1) for x in some], dim=1) for some in (scores, positions)]
    budget = AXES["budget"].build("kvzip")
    stays = budget.across(flat[0], torch.tensor([3, 1, 7]), flat[1], 2 * G)
    found = [x.unflatten(1, (G, -1)).sum(2) for x in stays.split([9 * G, 6 * G], dim=1)]
    for row, keep in enumerate((3, 1, 7)):
        flat = torch.cat([s[row].flatten() for s in scores])
        least = flat.sort(descending=True).values[min(2 * G * keep, flat.numel()) - 1]
        for score, counts in zip(scores, found, strict=True):
            assert counts[row].tolist() == (score[row] >= least).sum(1).tolist()


def test_a_prompt_that_cannot_be_repeated_is_refused_and_the_session_goes_on(case):
    one = case("kvzip")
    tokens, session = one.tokens(1, 40), one.session(1)
    session.run(tokens)
    session._core.max_context = 50
    with pytest.raises(InputError, match="leaves 10 of 50"):
        session.end_prompt()
    session._core.max_context = 1 << 20
    session.end_prompt()
    assert all((w >= 0).sum(2).max() == 12 for w in kept(session).values())


def test_kvzip_is_a_maximum():
    weights = torch.rand(B, G, 2, 4, 7)
    found = KVzip().accumulate(torch.zeros(B, G, 7), weights)
    assert torch.equal(found, weights.flatten(2, 3).amax(2))


# simlayerkv


def lazy_mass(x, row):
    """The last query's attention to the first 2 and the newest 4 tokens, a mean over the heads."""
    n, mass = int(x["seen"][row]), []
    for head in range(G * 2):
        keys = x["recent_k"][row, head // 2, :n]
        weights = (keys @ x["queries"][row, 0, head] * SCALE).softmax(0)
        mass.append(float(weights[[*range(2), *range(max(2, n - 4), n)]].sum()))
    return float(np.mean(mass))


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_lazy_layers_keep_the_first_and_the_newest(place):
    """The threshold lies below all rows' attention, among them, or above."""
    x = slots(2, base=(0, 0, 0), recent=(16, 12, 7))
    x["query_positions"] = x["seen"][:, None] - 1
    x["queries"] = x["queries"][:, -1:]
    masses = [lazy_mass(x, row) for row in range(B)]
    threshold = {0.0: 0.0, 0.5: (min(masses) + max(masses)) / 2, 1.0: 1.0}[place]
    budget = SimLayerKV(threshold=threshold, sinks=2, recent=4)
    found = sets(choose(x, 6, build("score", "streaming-llm", sinks=2), budget))
    for row, mass in enumerate(masses):
        n = int(x["seen"][row])
        want = {0, 1, *range(n - 4, n)} if mass > threshold else set(range(n))
        assert found[row] == [want] * G
    lazy = [mass > threshold for mass in masses]
    assert any(lazy) == (place < 1) and all(lazy) == (place == 0)


def test_sessions_of_lazy_layers_hold_less(stateful):
    found = recipe("streaming-llm")
    found["kv.budget"] = {"use": "simlayerkv", "sinks": 2, "recent": 6, "threshold": 0.0}
    one = evicting(stateful("llama"), found)
    session, tokens = one.session(1), one.tokens(1, 40)
    session.run(tokens)
    session.end_prompt()
    assert all((w >= 0).sum(2).max() == 8 for w in kept(session).values())
    whole = one.session(1, budget={"use": "simlayerkv", "sinks": 2, "recent": 60})
    whole.run(tokens)
    whole.end_prompt()
    assert not any((w >= 0).any() for w in kept(whole).values())


@pytest.mark.parametrize(
    "axis, name, options, message",
    [
        (
            "score",
            "laq",
            {"recent": 40},
            "recent is 40, more than window = 32; give at most that many",
        ),
        ("score", "laq", {"kernel": 4}, "kernel is 4; give an odd number, 1 to 63"),
        ("budget", "simlayerkv", {"threshold": 1.5}, "threshold is 1.5; give 0 to 1"),
        ("budget", "simlayerkv", {"recent": 0}, "recent is 0; give at least 1"),
    ],
)
def test_options_out_of_range_are_refused(axis, name, options, message):
    with pytest.raises(RecipeError, match=message):
        AXES[axis].build(name, **options)
