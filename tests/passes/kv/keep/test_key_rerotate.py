"""Tokens that stay take positions from 0 on: key-rerotate, finch, and streaming-llm's positions in the cache."""

from functools import cache

import models
import numpy as np
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError, InputError, PassError, RecipeError
from accel.passes.kv import moves
from accel.passes.kv.keep.drop import Drop
from accel.passes.kv.keep.key_rerotate import KeyRerotate
from accel.passes.kv.score.finch import Finch
from accel.runtime.session import core

from ....kv_case import evicting, kept, recipe
from ....kv_slots import AXES, SCALE, B, D, G, build, choose, sets, slots, turns
from ....session_ways import close, singles


@pytest.fixture(scope="module")
def case(stateful):
    @cache
    def made(score="streaming-llm", kept=12, model="llama", every=0, **axes):
        tables = recipe(score, kept, **{"keep": "key-rerotate", **axes})
        if every:
            tables["kv.when"] = {"use": "every", "tokens": every}
        return evicting(stateful(model), tables)

    return made


def rotated(x, positions):
    """Keys [B,G,S,D] as they are at positions [B,G,S]."""
    tables = turns(D)
    return moves.turn(x, positions, tables["turn.cos"], tables["turn.sin"], False)


def fresh(seed, back=1):
    """Slots whose keys were rotated by their positions, and the keys [B,G,S,D] before."""
    x = slots(seed, base=(0, 0, 0), recent=(16, 12, 7))
    where = torch.arange(16).expand(B, G, -1)
    plain = x["recent_k"].clone()
    x["recent_k"] = rotated(plain, back * where)
    return x, plain


def law_fresh(turned, seed=0, back=1):
    """A key that stays is that of a token at its new position; its norm is as before."""
    x, plain = fresh(seed, back)
    score = build("score", "h2o", recent=2)
    moved, left = (choose(x, 7, score, keep=keep, most=7) for keep in (turned, Drop()))
    real = left["pos"] >= 0
    assert torch.equal(moved["pos"] >= 0, real) and torch.equal(moved["v"], left["v"])
    assert all(h == set(range(len(h))) for row in sets(moved) for h in row)
    some = plain.gather(2, left["pos"].clamp(min=0)[..., None].expand(-1, -1, -1, D))
    want = rotated(some, moved["pos"].clamp(min=0))
    torch.testing.assert_close(moved["k"][real], want[real], atol=2e-5, rtol=1e-5)
    norms = moved["k"][real].norm(dim=-1), left["k"][real].norm(dim=-1)
    torch.testing.assert_close(*norms)
    assert not torch.allclose(moved["k"][real], left["k"][real], atol=1e-2), "nothing moved"


@pytest.mark.parametrize("seed", range(3))
def test_keys_are_those_of_the_new_positions(seed):
    law_fresh(KeyRerotate(), seed)
    with pytest.raises(AssertionError):
        law_fresh(KeyRerotate(), seed, back=-1)  # the other way round
    with pytest.raises(AssertionError):
        law_fresh(Drop(), seed)


def test_nothing_goes_and_nothing_turns():
    x, _ = fresh(1)
    a, b = (choose(x, 99, build("score", "h2o"), keep=keep) for keep in (KeyRerotate(), Drop()))
    real = a["pos"] >= 0
    assert torch.equal(a["pos"], b["pos"]) and torch.equal(a["k"][real], b["k"][real])


def test_twice_is_once_by_the_sum():
    x, _ = fresh(2)
    a, b = torch.randint(-20, 20, (2, B, G, 16), generator=torch.Generator().manual_seed(0))
    twice = rotated(rotated(x["recent_k"], a), b)
    torch.testing.assert_close(twice, rotated(x["recent_k"], a + b), atol=1e-5, rtol=1e-5)


def test_pairs_of_channels_turn_as_the_model_has_them():
    x, _ = fresh(0)
    t = turns(D)
    halves, pairs = (
        moves.turn(x["recent_k"], torch.full((B, G, 16), 3), t["turn.cos"], t["turn.sin"], i)
        for i in (False, True)
    )
    swap = [0, 3, 1, 4, 2, 5]  # channels i and i + 3 side by side
    assert not torch.allclose(halves, pairs)
    again = moves.turn(
        x["recent_k"][..., swap], torch.full((B, G, 16), 3), t["turn.cos"], t["turn.sin"], True
    )
    torch.testing.assert_close(again, halves[..., swap])


# Sessions


def test_a_session_goes_on_at_the_slots_that_it_holds(case):
    one = case()
    session, tokens = one.session(2), one.tokens(2, 60)
    session.run(tokens[:, :40], [40, 9])
    session.end_prompt()
    assert session.lengths.tolist() == [12, 9] == session.held_from.tolist()
    for where in kept(session).values():
        assert (where[0] == np.arange(12)).all() and (where[1, :, :9] == np.arange(9)).all()
    singles(session, tokens[:, 40:43])
    assert session.lengths.tolist() == [15, 12]
    session.rewind([13, 10])
    with pytest.raises(InputError, match="cannot rewind row 0 to 5"):
        session.rewind([5, 10])
    session.rewind(0)
    again = session.run(tokens[:, :30])
    other = one.session(2)
    close(again, other.run(tokens[:, :30]))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3"])
def test_logits_are_those_of_the_kept_keys_at_their_places(name):
    """Of one layer, keys hold nothing of other tokens: the same as a short prompt whose tokens these are."""
    program = over_state(capture(models.make(name, 1), max_context=128))
    one = evicting(program, recipe("streaming-llm", 8, keep="key-rerotate"))
    tokens = one.tokens(1, 40)
    session = one.session(1)
    session.run(tokens[:, :30])
    session.end_prompt()
    short = np.concatenate([tokens[:, :2], tokens[:, 24:30]], axis=1)
    plain = one.session(1, budget={"use": "uniform", "tokens_kept": 1 << 20})
    plain.run(short)
    close(singles(session, tokens[:, 30:35]), singles(plain, tokens[:, 30:35]), 1e-3)


@pytest.mark.parametrize("size", [40, 34])  # tokens move at its end, or before it alone
def test_a_prompt_in_parts_is_the_same_as_in_calls(size, case, monkeypatch):
    one = case(every=4)
    monkeypatch.setattr(core, "CHUNK", 16)
    tokens = one.tokens(2, 50)
    a, b = one.session(2), one.session(2)
    last = a.run(tokens[:, :size], [size, 21], last_only=True)[:, 0]
    parts = [
        b.run(tokens[:, :16], last_only=True),
        b.run(tokens[:, 16:32], [16, 5], last_only=True),
        b.run(tokens[:, 32:size], [size - 32, 0], last_only=True),
    ]
    close(last[0], parts[2][0, 0])
    close(last[1], parts[1][1, 0])
    assert a.lengths.tolist() == b.lengths.tolist() == [12 if size == 40 else 14, 12]
    close(singles(a, tokens[:, 40:]), singles(b, tokens[:, 40:]))


def test_text_outgrows_the_positions_of_the_model(case):
    one = case(every=4)
    session = one.session(1)
    rng = np.random.default_rng(0)
    for _ in range(3 * one.program.facts.max_context // 16):
        logits = session.run(rng.integers(3, one.program.facts.vocab_size, (1, 16)))
        assert np.isfinite(logits).all() and session.lengths[0] <= 12 + 4
    places = kept(session)[0]
    assert (places[0] == np.arange(12)).all()


def test_forks_rows_and_failed_calls_go_on_alike(case, monkeypatch):
    one = case(every=4)
    session, tokens = one.session(2), one.tokens(2, 60)
    session.run(tokens[:, :30], [30, 17])
    other = session.fork()
    other.select([1, 0])
    a, b = singles(session, tokens[:, 30:40]), singles(other, tokens[[1, 0], 30:40])
    close(a, b[[1, 0]])
    backend = type(session._core.backend)
    monkeypatch.setattr(backend, "step", lambda *a, **k: 1 / 0)
    before = session.lengths
    with pytest.raises(ZeroDivisionError):
        session.run(tokens[:, [40]])
    assert (session.lengths == before).all()
    monkeypatch.undo()
    close(singles(session, tokens[:, 40:45]), singles(other, tokens[[1, 0], 40:45])[[1, 0]])


def test_the_first_token_over_the_budget_goes(case):
    one = case(every=1)
    session, tokens = one.session(1), one.tokens(1, 16)
    for i in range(16):
        session.run(tokens[:, [i]])
        assert session.lengths[0] == min(i + 1, 12)


def test_copies_share_nothing_once_their_tokens_moved(case):
    one = case(every=4)
    session, tokens = one.session(1), one.tokens(2, 40)
    session.run(tokens[:1, :10])
    session.select([0, 0])
    session.run(tokens[:, 10:30])
    assert session._core.kin.slots(np.array([1, 0]), session.lengths, session._core.base) is None


def test_a_call_that_fails_after_tokens_moved_closes_the_session(case, monkeypatch):
    one = case(every=4)
    monkeypatch.setattr(core, "CHUNK", 16)
    session, tokens = one.session(1), one.tokens(1, 60)
    session.run(tokens[:, :20])
    assert session.lengths[0] == 12
    whole, calls = type(session._core.backend).step, []

    def second(*args, **kwargs):
        calls.append(1)
        return 1 / 0 if len(calls) == 2 else whole(*args, **kwargs)

    monkeypatch.setattr(type(session._core.backend), "step", second)
    with pytest.raises(AccelError, match="cannot be undone"):
        session.run(tokens[:, 20:40])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "model, tables, message",
    [
        (
            "llama",
            {"budget": "pyramidkv", "kept": 40},
            "layers or heads would hold different numbers",
        ),
        ("llama", {"budget": "ada-kv"}, "layers or heads would hold different numbers"),
        ("llama", {"score": "laq"}, "runs some aside at their old positions"),
        ("llama", {"budget": "phases"}, "goes by `prompt`, which says positions that last"),
        ("gpt2", {}, "not rotated by position .*leave kv.keep = key-rerotate out"),
        ("falcon_h1", {}, "leave kv.keep = key-rerotate out"),
        ("mistral", {}, "sees a window of the tokens"),
    ],
)
def test_what_cannot_move_is_refused(case, model, tables, message):
    with pytest.raises(PassError, match=message):
        case(model=model, **tables)


# finch


def test_finch_by_hand():
    x = slots(3, base=(0, 0, 0), recent=(14, 11, 9))
    x["question"] = torch.tensor([12, -1, 7])
    begins = [12, 7, 7]
    found = sets(choose(x, 7, Finch(window=4)))
    for row in range(B):
        n, first = int(x["seen"][row]), begins[row]
        for head in range(G):
            keys, total = x["recent_k"][row, head, :n], torch.zeros(n)
            for w in range(4):
                at = int(x["query_positions"][row, w])
                if at < first:
                    continue
                for q in x["queries"][row, w, 2 * head : 2 * head + 2]:
                    total[: at + 1] += (keys[: at + 1] @ q * SCALE).softmax(0) * (at + 1)
            best = total[:first].argsort(descending=True)[: 7 - (n - first)].tolist()
            assert found[row][head] == {*best, *range(first, n)}
    assert found != sets(choose(x, 7, build("score", "snapkv", window=4, kernel=1)))


def test_finch_keeps_the_same_share_of_each_chunk():
    """Of 5 tokens each; the question counts in its own chunk."""
    x = slots(3, base=(0, 0, 0), recent=(15, 14, 15))
    x["question"] = begins = torch.tensor([14, 13, 14])
    found = sets(choose(x, 6, Finch(window=4, chunk=5)))
    whole = sets(choose(x, 6, Finch(window=4)))
    for row in found:
        assert all(len(head & {*range(i, i + 5)}) == 2 for head in row for i in (0, 5, 10))
    assert all(int(n) in head for n, row in zip(begins, found, strict=True) for head in row)
    assert found != whole, "the control"
    one = sets(choose(x, 6, Finch(window=4, chunk=99)))
    assert one == whole, "a chunk of all"


@pytest.mark.long
@pytest.mark.parametrize(("chunk", "each"), [(5, 2), (128, None)])
def test_finch_by_chunks_in_a_session(stateful, chunk, each):
    score = {"use": "finch", "window": 4, "chunk": chunk}
    case = evicting(stateful("llama"), {**recipe("finch", 8), "kv.score": score})
    with case.session() as session:
        session.mark(question=[18])
        session.prompt(case.tokens(1, 20))
        for where in kept(session).values():
            for head in where[0]:
                assert (head >= 0).sum() == 8 and 19 in head
                parts = [((head >= i) & (head < i + 5)).sum() for i in range(0, 20, 5)]
                assert each is None or set(parts) == {each}


@pytest.mark.long
def test_the_question_stays_and_is_forgotten(case):
    one = case("finch", 12)
    session, tokens = one.session(2), one.tokens(2, 60)
    plain = evicting_plain(case)
    found = []
    for question in ([22, 30], None):
        for made in (one, plain):
            session = made.session(2)
            if question is not None:
                session.mark(question=question)
            session.prompt(tokens[:, :32])
            found.append((session, kept(session)))
    (moved, _), (_, marked), _, (_, unmarked) = found
    assert moved.lengths.tolist() == [12, 12]
    for where in marked.values():
        assert all(set(range(22, 32)) <= set(h) for h in where[0])
        assert all({30, 31} <= set(h) for h in where[1])
    assert any(not np.array_equal(unmarked[n], w) for n, w in marked.items()), "the control"
    logits = moved.prompt(tokens[:, 32:52])
    assert np.isfinite(logits).all() and moved.lengths.tolist() == [12, 12]


def evicting_plain(case):
    return case("finch", 12, keep="drop")


def test_no_window_is_refused():
    with pytest.raises(RecipeError, match="kv.score.finch: window is 0; give 1 to 1024"):
        AXES["score"].build("finch", window=0)
