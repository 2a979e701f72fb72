"""Prompts and generated tokens apart: marks, the budget and the moments of both, scope and shotkv."""

from functools import cache

import numpy as np
import pytest
import torch

from accel.ir.errors import InputError, RecipeError
from accel.passes.kv.refine.chunkkv import ChunkKV
from accel.passes.kv.refine.scope import Scope
from accel.passes.kv.refine.shotkv import ShotKV
from accel.runtime.kv.budget.phases import Phases
from accel.runtime.session.state._marks import Marks

from ....kv_case import evicting, kept, state, table
from ....kv_slots import AXES, B, G, build, choose, sets, slots
from ....runtime.test_rows import growing
from ....session_ways import close, singles

PROMPT, KEPT, NEW, RECENT = 30, 10, 6, 3


def tables(refine="scope", score="tova", every=1, **budget):
    budget = {"tokens_kept": KEPT, "decode_kept": NEW, "recent": RECENT, **budget}
    found = {
        "kv.score": table(score),
        "kv.budget": {"use": "phases", **budget},
        "kv.when": {"use": "generated", "tokens": every},
    }
    return found | ({"kv.refine": table(refine)} if refine else {})


@pytest.fixture(scope="module")
def case(stateful):
    return cache(lambda *args, **options: evicting(stateful("llama"), tables(*args, **options)))


def numbers(*values):
    return np.array(values, np.int64)


# Marks


def test_a_prompt_is_all_until_it_is_whole():
    marks = Marks.new(2)
    assert marks.prompts(numbers(7, 0)).tolist() == [7, 0]
    marks = marks.begun(growing(numbers(0, 0), numbers(9, 4))).ended(numbers(9, 4))
    assert marks.prompts(numbers(12, 4)).tolist() == [9, 4]
    marks = marks.begun(growing(numbers(12, 4), numbers(13, 9)))  # the second row's next prompt
    assert marks.prompts(numbers(13, 9)).tolist() == [9, 9]
    marks = marks.ended(numbers(13, 9))
    assert marks.prompts(numbers(14, 10)).tolist() == [9, 9], "a generated token is no prompt"
    assert marks.rewound(numbers(5, 9)).prompts(numbers(5, 9)).tolist() == [5, 9]
    anew = marks.forget(np.array([True, False]))
    assert anew.prompts(numbers(3, 10)).tolist() == [3, 9]
    assert marks.select(numbers(1, 0, 1)).prompts(numbers(11, 14, 12)).tolist() == [9, 9, 9]


def test_units_and_the_question_lie_at_their_positions():
    marks = Marks.new(2).coming([[0, 0, 1], [4, -1, 9]], [-1, 1], [3, 2])
    marks = marks.begun(growing(numbers(0, 5), numbers(3, 7)))
    found = marks.inputs(("units", "question", "prompt"), numbers(3, 7))
    assert found["units"].tolist() == [[0, 0, 1, -1, -1, -1, -1], [-1] * 5 + [4, -1]]
    assert found["question"].tolist() == [-1, 6] and found["prompt"].tolist() == [3, 7]
    back = marks.rewound(numbers(1, 6)).inputs(("units", "question"), numbers(1, 6))
    assert back["units"][:, :6].tolist() == [[0] + [-1] * 5, [-1] * 5 + [4]]
    assert back["question"].tolist() == [-1, -1]
    again = marks.coming([[7], [7]], None, None).begun(growing(numbers(3, 7), numbers(4, 8)))
    assert again.units[0].tolist()[:4] == [0, 0, 1, 7] and again.units[1, 7] == 7
    assert marks.units[0].tolist()[:4] == [0, 0, 1, -1], "a fork's marks are its own"


@pytest.mark.parametrize(
    "marks, message",
    [
        ({}, "neither units nor question are given"),
        ({"units": [[0, 1]]}, r"units have shape \[1, 2\]; give \[2,T\]"),
        ({"units": [[0, -2], [0, 1]]}, r"give \[2,T\], numbers of units from 0 on, or -1"),
        ({"units": [[0.5], [1]]}, "units"),
        ({"units": [[0], [1]], "lengths": [1, 2]}, r"lengths of marks are \[1, 2\]; .* 0..1"),
        ({"question": [1, 2, 3]}, r"question has shape \[3\]; give an int or \[2\]"),
        ({"question": -2}, "give an int or .*, or -1"),
    ],
)
def test_marks_that_cannot_be_are_refused(marks, message):
    given = {"units": None, "question": None, "lengths": None} | marks
    with pytest.raises(InputError, match=message):
        Marks.new(2).coming(**given)


def _shot(case, **options):
    return case("shotkv", "snapkv", **options)


def test_marks_of_other_tokens_are_refused_and_nothing_runs(case):
    one = _shot(case)
    tokens, session = one.tokens(2, 9), one.session(2)
    session.mark([[0] * 8] * 2)
    with pytest.raises(InputError, match="8 tokens of row 0 are marked, but the call has 9"):
        session.prompt(tokens)
    assert session.lengths.tolist() == [0, 0]
    session.mark([[0] * 9] * 2, lengths=[9, 7])
    with pytest.raises(InputError, match="7 tokens of row 1 are marked, but the call has 9"):
        session.prompt(tokens)
    session.mark(question=[2, 9])
    with pytest.raises(InputError, match="question of row 1 begins at token 9, but the call has 9"):
        session.prompt(tokens)
    session.mark([[0] * 9] * 2)
    session.prompt(tokens)
    assert session.lengths.tolist() == [9, 9]


def test_marks_nobody_reads_are_refused(case):
    session = case().session(1)
    with pytest.raises(InputError, match="goes by no such marks; .* 'shotkv'"):
        session.mark([[0]])


# The budget


def test_the_two_parts_by_hand():
    slide = Phases(tokens_kept=KEPT, decode_kept=NEW, recent=RECENT)
    assert [slide.tokens(n, 0, 2, prompt=PROMPT) for n in (30, 31, 36, 40, 99)] == [
        10, 11, 16, 16, 16,
    ]  # fmt: skip
    assert slide.tokens(8, 0, 2, prompt=5) == 8, "what a prompt leaves is not the answer's"
    assert slide.tokens(20, 0, 2) == 10
    grown = Phases(tokens_kept=KEPT, decode_kept=7, recent=3, longest=19)
    assert grown.step == 4
    found = [grown.tokens(PROMPT + t, 0, 2, prompt=PROMPT) - KEPT for t in (0, 2, 3, 8, 16, 40)]
    assert found == [0, 2, 3, 5, 7, 7]
    share = Phases(compression_ratio=0.5, decode_ratio=0.25)
    assert share.tokens(38, 0, 2, prompt=30) == 15 + 6


def test_heads_say_what_the_host_does():
    x = slots(0)
    for budget in (
        Phases(tokens_kept=3, decode_kept=4, recent=1),
        Phases(tokens_kept=3, decode_kept=9, recent=2, longest=16),
        Phases(tokens_kept=3, decode_ratio=0.3),
    ):
        prompt = torch.tensor([20, 5, 6])
        told = list(zip(x["seen"].tolist(), prompt.tolist(), strict=True))
        keep = torch.tensor([budget.tokens(n, 0, 1, prompt=p) for n, p in told])
        where = torch.arange(40).expand(B, G, -1).clone()
        where[:, :, 3:5] = -1
        where = where.masked_fill(where >= x["seen"][:, None, None], -1)
        found = budget.heads(where.float(), keep, where, prompt, x["seen"])
        assert torch.equal(found, keep[:, None].expand(-1, G))
        none = where.masked_fill(where < prompt[:, None, None], -1)
        new = budget.heads(none.float(), keep, none, prompt, x["seen"])
        assert torch.equal(new, (keep - 3)[:, None].expand(-1, G))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recent": 0}, "recent is 0; give at least 1"),
        ({"decode_kept": 100}, "recent is 256, more than are kept; give at most decode_kept = 100"),
        ({"decode_ratio": 1.0}, "decode_ratio is 1.0; give at least 0 and less than 1"),
        (
            {"longest": 9, "decode_ratio": 0.5},
            "longest is 9 and decode_ratio 0.5; give one of them",
        ),
    ],
)
def test_budgets_out_of_range_are_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        AXES["budget"].build("phases", **options)


# scope


def prompts(session):
    """Keys, values and positions of the prompt's tokens in each layer, of rows whose parts have equal sizes."""
    found = {}
    for layer, where in kept(session).items():
        real = (where >= 0) & (where < PROMPT)
        found[layer] = [where[real]] + [state(session)[f"kept.{layer}.{p}"][real] for p in "kv"]
    return found


@pytest.mark.parametrize("refine, stays", [("scope", True), (None, False)])
def test_the_prompt_is_frozen(case, refine, stays):
    """Bit by bit; without the refine, which is the control, generated tokens push it out."""
    one = case(refine)
    session, tokens = one.session(2), one.tokens(2, PROMPT + 16)
    session.run(tokens[:, :PROMPT])
    session.end_prompt()
    before, same = prompts(session), []
    for t in range(1, 17):
        session.run(tokens[:, [PROMPT + t - 1]])
        after = prompts(session)
        same.append(
            all(
                np.array_equal(a, b)
                for n in before
                for a, b in zip(before[n], after[n], strict=True)
            )
        )
        if t <= NEW:
            assert (session.held_from == PROMPT).all(), "nothing was over the budget"
            continue
        for where in kept(session).values():
            held = [[set(h[h >= PROMPT]) for h in row] for row in where]
            newest = set(range(PROMPT + t - RECENT, PROMPT + t))
            assert not stays or ((where >= 0).sum(2) == KEPT + NEW).all()
            assert not stays or all(newest <= h and len(h) == NEW for row in held for h in row)
    assert all(same) == stays


def test_the_other_generated_tokens_go_by_their_scores():
    x = slots(4, base=(9, 9, 9), recent=(8, 6, 3))
    x["kept_pos"] = torch.arange(9).expand(B, G, -1).clone()
    x["prompt"] = torch.full((B,), 9)
    budget = Phases(tokens_kept=9, decode_kept=4, recent=2)
    keep = [budget.tokens(n, 0, 1, prompt=9) for n in x["seen"].tolist()]
    found = sets(
        choose(x, torch.tensor(keep), build("score", "knorm"), budget, refine=Scope(recent=2))
    )
    for row, n in enumerate((8, 6, 3)):
        for head in range(G):
            worth = -x["recent_k"][row, head, : max(0, n - 2)].norm(dim=-1)
            best = worth.topk(min(2, len(worth))).indices
            want = {*range(9), *(9 + best).tolist(), *range(9 + n - min(n, 2), 9 + n)}
            assert found[row][head] == want


@pytest.mark.long
def test_evicting_now_and_then_holds_a_step_more(case):
    one = case(every=4, longest=19, decode_kept=7)
    budget = one.plan.budget
    session, tokens = one.session(1), one.tokens(1, PROMPT + 20)
    session.run(tokens[:, :PROMPT])
    session.end_prompt()
    for t in range(20):
        session.run(tokens[:, [PROMPT + t]])
        held = max((w >= 0).sum(2).max() for w in kept(session).values())
        held += int((session.lengths - session.held_from)[0])
        most = budget.tokens(PROMPT + t + 1, 0, 1, prompt=PROMPT)
        assert held <= most + 4 - 1


def test_a_second_prompt_is_cut_as_one(case):
    one = case()
    session, tokens = one.session(1), one.tokens(1, 60)
    session.run(tokens[:, :20])
    session.end_prompt()
    singles(session, tokens[:, 20:28])
    session.run(tokens[:, 28:50])
    session.end_prompt()
    assert all(((w >= 0).sum(2) == KEPT).all() for w in kept(session).values())


def test_forks_and_rows_go_on_alike(case):
    one = case()
    session, tokens = one.session(2), one.tokens(2, 50)
    session.run(tokens[:, :PROMPT], [PROMPT, 12])
    session.end_prompt()
    other = session.fork()
    other.select([1, 0])
    a, b = singles(session, tokens[:, 30:40]), singles(other, tokens[[1, 0], 30:40])
    close(a, b[[1, 0]])
    alone = one.session(1)
    alone.run(tokens[[1], :12])
    alone.end_prompt()
    close(singles(alone, tokens[[1], 30:40]), a[[1]])


# shotkv


def shot(seed=0, units=((0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3),) * 3, **more):
    x = slots(seed, base=(0, 0, 0), recent=tuple(len(u) for u in units))
    x["units"][:, : len(units[0])] = torch.tensor(units)
    return x | more


def by_units(x, kept, units, score, must=()):
    """The page's rule: whole units by their mean over tokens and heads, until the next does not fit."""
    found = []
    for row in range(B):
        worth = {}
        for u in set(units):
            at = [i for i, v in enumerate(units) if v == u]
            worth[u] = float(np.mean([float(score[row, g, i]) for g in range(G) for i in at]))
        stays, room = set(), kept
        for u in sorted(worth, key=lambda u: (u not in must, -worth[u])):
            at = {i for i, v in enumerate(units) if v == u}
            if len(at) > room:
                break
            stays, room = stays | at, room - len(at)
        found.append([stays] * G)
    return found


@pytest.mark.parametrize("kept", [4, 6, 8, 9, 11, 12])
def test_units_stay_as_wholes(kept):
    for seed in range(4):
        x = shot(seed)
        score = -x["recent_k"].norm(dim=-1)
        found = sets(choose(x, kept, build("score", "knorm"), refine=ShotKV()))
        assert found == by_units(x, kept, (0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3), score)
        assert kept in (4, 12) or found != sets(choose(x, kept, build("score", "knorm")))


def test_the_unit_of_protected_tokens_comes_first():
    x = shot(1)
    found = sets(choose(x, 8, build("score", "h2o", recent=1), refine=ShotKV()))
    score = x["kept_mass.recent"]
    assert found == by_units(x, 8, (0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3), score, must=(3,))
    assert all({9, 10, 11} <= head for row in found for head in row)


def test_a_unit_beyond_the_budget_is_cut_to_its_newest():
    x = shot(0, units=((5,) * 12,) * 3)
    found = sets(choose(x, 4, build("score", "knorm"), refine=ShotKV()))
    assert found == [[{8, 9, 10, 11}] * G] * B


def test_tokens_without_a_unit_fill_the_room():
    x = shot(2, units=((0,) * 5 + (-1,) * 7,) * 3)
    x["recent_k"][:, :, :5] *= 0.01  # the unit is the best
    found = sets(choose(x, 8, build("score", "knorm"), refine=ShotKV()))
    assert all(set(range(5)) <= h and len(h) == 8 for row in found for h in row)
    x["recent_k"][:, :, :5] *= 1e4
    found = sets(choose(x, 8, build("score", "knorm"), refine=ShotKV()))
    assert all(h == set(range(5, 12)) for row in found for h in row)


def test_units_of_one_length_are_chunks():
    units = tuple(i // 3 for i in range(12))
    for seed, count in ((0, 6), (1, 9), (2, 3)):
        x = shot(seed, units=(units,) * 3)
        score = build("score", "h2o", recent=0)
        chunks = sets(choose(x, count, score, refine=ChunkKV(chunk=3, pooling="mean")))
        assert sets(choose(x, count, score, refine=ShotKV())) == chunks
        x["units"] = torch.where(x["units"] < 0, -1, (x["units"] + 1) // 2)
        assert sets(choose(x, count, score, refine=ShotKV())) != chunks, "the control"


@pytest.mark.long
def test_a_session_keeps_examples_whole(case):
    """Of rows of other lengths; then the prompt stays and generated tokens keep their share."""
    one = _shot(case, decode_ratio=0.5, every=2)
    units = [np.arange(PROMPT) // 4, np.arange(PROMPT) // 3]
    session, tokens = one.session(2), one.tokens(2, PROMPT + 12)
    session.mark(units, lengths=[PROMPT, 21])
    session.run(tokens[:, :PROMPT], [PROMPT, 21])
    session.end_prompt()
    before = kept(session)
    for where in before.values():
        for row, n in enumerate((PROMPT, 21)):
            heads = [set(h[h >= 0].tolist()) for h in where[row]]
            assert all(h == heads[0] and len(h) <= KEPT for h in heads)
            for unit in set(units[row][:n].tolist()):
                of = set(np.flatnonzero(units[row][:n] == unit).tolist())
                assert of <= heads[0] or not of & heads[0]
    singles(session, tokens[:, PROMPT:])
    for layer, where in kept(session).items():
        for row, n in enumerate((PROMPT, 21)):
            for a, b in zip(before[layer][row], where[row], strict=True):
                assert np.array_equal(a[a >= 0], b[(b >= 0) & (b < n)])
                assert (b >= n).sum() <= 6
