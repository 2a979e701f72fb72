"""Heads that keep unequal numbers: each layer stores what its heads keep, and sessions are as with every head padded to
the largest.
"""

import models
import numpy as np
import pytest

import accel
from accel.ir.errors import PassError
from accel.ir.tables import Tables
from accel.passes.trained import Trained
from accel.runtime.model.load import from_artifact

from .kv_case import conversation, evicting, kept, recipe, state
from .kv_slots import AXES, G, build, choose, constants, real, sets, slots
from .session_ways import close, singles
from .test_budget_tables import files

UNEQUAL = [n for n in AXES["budget"].names() if not AXES["budget"].method(n).level]
KEEPS = {n: AXES["keep"].method(n) for n in AXES["keep"].names()}
SCORES = {"ada-kv": "h2o", "threshold": "a2sf"}  # that carry values with their tokens
LENGTHS = [40, 23, 1]


def padded(monkeypatch, stateful, tables):
    """The same recipe with as many slots of each head."""
    method = AXES["budget"].method(tables["kv.budget"]["use"])
    with monkeypatch.context() as patch:
        patch.setattr(method, "level", True)
        return evicting(stateful("llama"), tables)


def recipe_of(stateful, folder, name):
    if issubclass(AXES["budget"].method(name), Tables):
        return files(stateful, name, folder)[0]
    small = AXES["budget"].small(name) | ({"threshold": 0.6} if name == "threshold" else {})
    return {**recipe(SCORES.get(name, "snapkv")), "kv.budget": {"use": name, **small}}


def ways(session, tokens):
    """All logits of prompts, an eviction after each, a fork, a rewind, and other rows."""
    found = conversation(session, tokens, LENGTHS)
    there = session.lengths
    other = session.fork()
    found += list(singles(other, tokens[:, :3]))
    if session.capabilities.back is None:
        session.rewind(np.maximum(session.held_from, there - 2))
    session.select([2, 0, 0])
    found += list(singles(session, tokens[:, 3:6]))
    session.rewind([0, *session.lengths[1:]])  # one row starts anew
    found += list(session.run(tokens[:, :9], [9, 1, 4]))
    session.end_prompt()
    return [*found, *singles(session, tokens[:, 9:11])]


def same(a, b, tolerance=0.0):
    return all(np.abs(x - y).max() <= tolerance for x, y in zip(a, b, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", UNEQUAL)
def test_sessions_are_as_with_padded_heads(stateful, monkeypatch, tmp_path, name):
    tables = recipe_of(stateful, tmp_path, name)
    plain = padded(monkeypatch, stateful, tables)
    case = evicting(stateful("llama"), tables)
    tokens = case.tokens(3, 88)
    want = ways(plain.session(3), tokens)
    # of other rows the largest head may be smaller, and sums in another order
    assert same(ways(case.session(3), tokens), want, 1e-5)

    one, two = case.session(3), plain.session(3)
    for session in (one, two):
        session.run(tokens[:, :40], LENGTHS)
        session.end_prompt()
    assert all(np.array_equal(x, kept(two)[i]) for i, x in kept(one).items())
    counts = {n: a for n, a in state(one).items() if n.endswith("counts")}
    assert len(counts) == 2 and any((a != a[:, :1]).any() for a in counts.values())
    assert one.stats["kv_bytes"] < two.stats["kv_bytes"]
    one._core.backend.put({n: a[:, ::-1].copy() for n, a in counts.items()})
    wrong = singles(one, tokens[:, 40:41])
    assert not same(wrong, singles(two, tokens[:, 40:41]), 1e-2), "the control"


@pytest.mark.few(2)
@pytest.mark.parametrize("keep", KEEPS)
def test_what_goes_is_kept_as_with_padded_heads(stateful, monkeypatch, keep):
    """What demotes keeps every token of every head, so its heads stay padded; what moves tokens, and what is trained
    for one model only, are not for this one.
    """
    tables = recipe("snapkv", budget="ada-kv", keep=keep)
    if KEEPS[keep].moves:
        with pytest.raises(PassError, match="heads would hold different numbers of tokens"):
            evicting(stateful("llama"), tables)
        return
    if issubclass(KEEPS[keep], Trained):
        pytest.skip("absorbing without training is subgen's")
    plain = padded(monkeypatch, stateful, tables)
    case = evicting(stateful("llama"), tables)
    assert bool(case.plan.ragged) != KEEPS[keep].demotes
    tokens = case.tokens(3, 88)
    assert same(
        conversation(case.session(3), tokens, LENGTHS),
        conversation(plain.session(3), tokens, LENGTHS),
    )


def test_a_streaming_head_takes_the_first_and_the_newest_tokens_alone(stateful, tmp_path):
    """Of S tokens a retrieval head's S, a streaming head's sinks + recent: keys, values and positions of these, and
    how many they are.
    """
    tables, parts = files(stateful, "duo-heads", tmp_path)
    case = evicting(stateful("llama"), tables)
    session, plan = case.session(1), case.plan
    session.run(case.tokens(1, 40))
    session.end_prompt()
    streaming = sum(int((one["place"] < plan.budget.share).sum()) for one in parts.values())
    full = G * len(parts) - streaming
    assert 0 < streaming < G * len(parts)
    width = case.program.facts.layers[0].head_dim
    each = 2 * 4 * width + 8
    slots = full * 40 + streaming * (plan.budget.sinks + plan.budget.recent)
    assert session.stats["kv_bytes"] == slots * each + 8 * G * len(parts)


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize("kept_", [1, 6, 11, 30])
def test_heads_keep_no_more_than_there_is_room_for(name, kept_):
    def most_of(budget):
        x, score = slots(kept_), build("score", "streaming-llm", sinks=1)
        told = {n: t.numpy() for n, t in constants(budget).items()}
        held = x["kept_pos"].shape[2] + x["recent_pos"].shape[1]
        found = sets(choose(x, kept_, score, budget, most=budget.most(kept_, G, **told)))
        return max(sum(map(len, row)) for row in found), budget.room(kept_, G, held, **told)

    keeps, room = most_of(build("budget", name))
    assert keeps <= room

    class Greedy(type(build("budget", "ada-kv"))):
        def heads(self, scores, keep):
            return (keep + 1)[:, None].expand(-1, scores.shape[1])

    keeps, room = most_of(Greedy(safeguard=0.0))
    assert keeps > room or kept_ == 30, "the control"


def law_level(budget):
    """Heads keep equally many tokens, but for those that have no more."""
    for seed, kept_ in ((0, 5), (1, 9), (2, 14)):
        x = slots(seed)
        found = sets(choose(x, kept_, build("score", "streaming-llm", sinks=1), budget))
        for row, there in zip(found, real(x), strict=True):
            most = max(map(len, row))
            assert all(len(h) == min(most, len(t)) for h, t in zip(row, there, strict=True))


@pytest.mark.parametrize("name", sorted({*AXES["budget"].names()} - {*UNEQUAL}))
def test_a_level_budget_is_level(name):
    law_level(build("budget", name))


def test_a_budget_that_is_not_level_is_caught():
    class Level(type(build("budget", "ada-kv"))):
        level = True

    with pytest.raises(AssertionError):
        law_level(Level(safeguard=0.0))


@pytest.mark.long
@pytest.mark.parametrize(
    "codec", ["", *(pytest.param(n, marks=pytest.mark.long) for n in ("kv-int8", "kv-adaquant"))]
)
def test_every_variant_reads_heads_of_unequal_numbers(codec):
    """Decoded turn by turn as on the eager target; with codes, too."""
    model, tables = (
        models.make("llama", 2),
        recipe("h2o" if not codec else "snapkv", budget="ada-kv"),
    )
    if codec:
        tables["kv.codec"] = {"use": codec}
    options = {"max_context": 128, "max_batch": 3, "verify": False}
    tokens = np.stack([np.random.default_rng(i).permutation(98)[:88] for i in range(3)])
    with accel.optimize(model, tables, target="eager", **options) as eager:
        want = conversation(eager.session(3), tokens, LENGTHS)
    with accel.optimize(model, tables, **options) as built:
        assert len(built.artifact.entries["step"].graphs) > 1
        for variant in built.artifact.entries["step"].graphs:
            with (
                from_artifact(built.artifact, kernels=variant) as compiled,
                compiled.session(3) as session,
            ):
                for _ in range(2):
                    found = conversation(session, tokens, LENGTHS)
                    for got, there in zip(found, want, strict=True):
                        close(got, there, 0.05 if codec else 2e-4)
                    session.rewind(0)
