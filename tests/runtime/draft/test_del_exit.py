"""draft = del-exit: what exits are worth, against plain sums; which tokens they are judged by, against calls that end
there; and tokens and drafts beside plain decoding and layerskip.
"""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import InputError, RecipeError
from accel.runtime.draft import del_exit
from accel.runtime.draft.del_exit import DelExit, Worth
from accel.runtime.draft.layerskip import LayerSkip
from accel.runtime.length.fixed import Fixed
from accel.runtime.sample.standard import Standard

from ...draft_case import plain, rows_of, speculated
from ...prefill_case import TOKENS, built

LAYERS = 4
TABLES = {"draft": {"use": "del-exit", "exits": [1, 2, 3]}, "depth": {"use": "by-call"}}
PROMPTS = TOKENS[:2, :9]
EXITS = (1, 2, 3)


@pytest.fixture(scope="module")
def model():
    return built(f"llama:{LAYERS}", tables=TABLES)


def method(**more):
    return DelExit(**{"exits": EXITS, **more})


def generated(model, method, temperature=0.0, limit=30, prompts=PROMPTS):
    rows = rows_of(prompts, Standard(temperature=temperature), limit=limit)
    for i, row in enumerate(rows):
        row.rng = np.random.default_rng(i)
    if method is None:
        return plain(model.session(len(rows)), rows), rows
    with model.session(len(rows)) as session:
        list(speculated(session, rows, method, "sample-match", length=Fixed(6), model=model))
    return [row.tokens for row in rows], rows


def noted(monkeypatch):
    """(drafter, row, exit, its draft) of each draft; and (place, right, chances) of all that was counted."""
    drafts, counted = [], []
    draft, count = del_exit._Exiting.draft, Worth.count

    def drafting(self, limits, more):
        trees = draft(self, limits, more)
        for i, tree in trees.items():
            drafts.append((i, EXITS[self._of[i].place], tree.tokens.tolist()))
        return trees

    def counting(self, place, right, chances):
        counted.append((self, place, right.tolist(), chances.tolist()))
        count(self, place, right, chances)

    monkeypatch.setattr(del_exit._Exiting, "draft", drafting)
    monkeypatch.setattr(Worth, "count", counting)
    return drafts, counted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.few(1)
def test_tokens_are_those_of_plain_decoding_while_exits_change(model, temperature, monkeypatch):
    drafts, _ = noted(monkeypatch)
    want, _ = generated(model, None, temperature)
    got, rows = generated(model, method(refresh=2), temperature)
    assert got == want
    assert len({n for _, n, _ in drafts}) > 1 and len(drafts) > 10
    assert all(row.drafting["drafted"] > 0 for row in rows)


@pytest.mark.long
def test_one_exit_is_layerskip(model, monkeypatch):
    """Where no draft ends early; else each is where layerskip's begins."""
    for never in (False, True):
        drafts, _ = noted(monkeypatch)
        if never:
            monkeypatch.setattr(Worth, "least", lambda self, place: 0.0)
        one, rows = generated(model, method(exits=[2]))
        other, theirs = generated(model, LayerSkip(exit=2))
        assert one == other
        same = [row.drafting for row in rows] == [row.drafting for row in theirs]
        assert same is never
        with model.session(2) as session, model.session(2) as beside:
            found = []
            for m, s in ((method(exits=[2]), session), (LayerSkip(exit=2), beside)):
                s.prompt(PROMPTS)
                rows = rows_of(PROMPTS)
                drafter = m.open(s, rows, model._context())
                for row in rows:
                    row.accept(5, None)
                paces = Fixed(6).open(rows, lambda n: 1.0)
                trees = drafter.draft({0: 6, 1: 6}, paces)
                found.append([trees[i].tokens.tolist() for i in (0, 1)])
        for mine, its in zip(*found, strict=True):
            assert mine and its[: len(mine)] == mine


def shadows(model, tokens, start):
    """What calls that end at each exit, and the whole model, say of a row's tokens [n] from `start` on [exits+1,n]."""
    said = []
    for n in (*EXITS, LAYERS):
        with model.session() as session:
            plan = np.arange(LAYERS) < n
            said.append(session.run(np.array([tokens]), run_layers=plan)[0, start:])
    logits = np.stack(said).astype(np.float64)
    return logits.argmax(-1), torch.from_numpy(logits).softmax(-1).amax(-1).numpy()


def test_all_exits_are_judged_by_what_calls_say_that_end_there(model, monkeypatch):
    """First of the newest tokens of the prompt; then, in each round, of what was committed and one more."""
    _, counted = noted(monkeypatch)
    got, _ = generated(model, method(refresh=1, prompt=5), prompts=PROMPTS[:1])
    tokens = [*PROMPTS[0].tolist(), *got[0]]
    said, chances = shadows(model, tokens, 0)
    right = said[:-1] == said[-1]
    assert [place for _, place, *_ in counted] == list(range(3)) * (len(counted) // 3)
    at = len(PROMPTS[0]) - 5
    for i in range(0, len(counted), 3):
        size = len(counted[i][2])
        for place, (_, _, found, sure) in enumerate(counted[i : i + 3]):
            assert found == right[place, at : at + size].tolist()
            np.testing.assert_allclose(sure, chances[place, at : at + size], rtol=1e-3)
        at += size
    assert at >= len(tokens) - 8, "nothing is left out but plain steps at the end"


def test_between_refreshes_the_exit_that_drafts_is_judged_by_its_own_tokens(model, monkeypatch):
    drafts, counted = noted(monkeypatch)
    asked = []
    entry = accel.Session.entry
    monkeypatch.setattr(
        accel.Session, "entry", lambda self, *a: asked.append(len(counted)) or entry(self, *a)
    )
    got, _ = generated(model, method(refresh=3, prompt=0), prompts=PROMPTS[:1])
    tokens = [*PROMPTS[0].tolist(), *got[0]]
    said, _ = shadows(model, tokens, len(PROMPTS[0]))
    right = said[:-1] == said[-1]
    assert len(asked) == -(-len(drafts) // 3), "the head is asked every third time"
    sizes = {0: 3, 1: 1, 2: 1}
    at, start = 0, 0
    for number, (_, exit_, draft) in enumerate(drafts):
        mine = counted[at : at + sizes[number % 3]]
        at += sizes[number % 3]
        stood = 0
        while stood < len(draft) and draft[stood] == tokens[len(PROMPTS[0]) + start + 1 + stood]:
            stood += 1
        if number % 3:
            ((_, place, found, _),) = mine
            assert EXITS[place] == exit_ and len(found) == min(stood + 1, len(draft))
            assert found == right[place, start : start + len(found)].tolist()
        start += stood + 1
        if start + 8 > len(got[0]):
            break


def test_worth_is_the_papers_sums():
    """Against plain sums over rounds, of which each weighs 0.95 of the next."""
    rng, costs = np.random.default_rng(0), [0.3, 0.5, 0.8]
    worth, rounds = Worth(costs), [[] for _ in costs]
    for _ in range(12):
        for place in range(3):
            size = int(rng.integers(1, 6))
            right, chances = rng.random(size) < 0.4 + 0.2 * place, rng.random(size)
            worth.count(place, right, chances)
            rounds[place].append((right, chances))
        for place, seen in enumerate(rounds):
            weights = [0.95**age for age in range(len(seen))][::-1]
            sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
            for weight, (right, chances) in zip(weights, seen, strict=True):
                for is_right, chance in zip(right, chances, strict=True):
                    sums[bool(is_right)][0] += weight
                    sums[bool(is_right)][1] += weight * chance
            share = sums[True][0] / (sums[True][0] + sums[False][0])
            assert worth.shares[place] == pytest.approx(share)
            if sums[True][0] and sums[False][0]:
                least = sum(total / count for count, total in sums.values()) / 2
                assert worth.least(place) == pytest.approx(least)
        best = max(
            range(3),
            key=lambda p: max(
                sum(worth.shares[p] ** k for k in range(g + 1)) / (g * costs[p] + 1)
                for g in range(1, 18)
            ),
        )
        assert worth.best == best


def test_what_is_known_of_an_exit_decides():
    always = np.ones(4, bool), np.full(4, 0.9)
    never = np.zeros(4, bool), np.full(4, 0.3)
    worth = Worth([0.2, 0.6])
    assert worth.best == 0 and worth.least(0) == 0, "the cheapest, where nothing is known"
    worth.count(1, *always)
    assert worth.best == 1 and worth.least(1) == 0, "nothing was wrong yet"
    worth.count(0, *always)
    assert worth.best == 0
    for _ in range(3):
        worth.count(0, *never)
    assert worth.best == 1 and worth.least(0) == pytest.approx(0.6)
    same = Worth([0.5])
    for _ in range(5):
        same.count(0, *always)
    assert same.counts[1, 0] == pytest.approx(4 * (1 - 0.95**5) / (1 - 0.95))


def test_the_first_exit_behind_which_nothing_changes_is_chosen():
    """Of a module whose last layers add nothing: what stands there is all, and no later exit drafts. The control: an
    exit before them is wrong now and then.
    """
    torch.manual_seed(0)
    module = models.make("llama", LAYERS).eval()
    for layer in module.model.layers[2:]:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(part.weight)
    with accel.optimize(module, TABLES, target="eager", max_context=128, max_batch=2) as made:
        _, rows = generated(made, method(refresh=1))
        assert all(row.drafting["accepted"] > 0.6 * row.drafting["drafted"] for row in rows)
        with made.session(2) as session:
            rows = rows_of(PROMPTS)
            drafter = method().open(session, rows, made._context())
            session.prompt(PROMPTS)
            for row in rows:
                row.accept(5, None)
            drafter.draft({0: 2, 1: 2}, Fixed(6).open(rows, lambda n: 1.0))
            for of in drafter._of:
                shares = of.worth.shares
                assert shares[1] == shares[2] == 1 > shares[0]
                assert EXITS[of.place] != 3, "it costs more, and is right as often"


def test_it_costs_the_layers_and_the_head(model):
    with model.session() as session:
        costs = method().open(session, rows_of(PROMPTS[:1]), model._context())._of[0].worth.costs
    assert (np.diff(costs) > 0).all() and costs[0] > 0.25 and costs[-1] < 1


def test_what_is_wrong_is_refused(model):
    for wrong in ([], [0], ["a"], 3, [True], [1.5]):
        with pytest.raises(RecipeError, match="draft.del-exit: exits is .*such as"):
            DelExit(exits=wrong)
    with model.session() as session:
        rows = rows_of(PROMPTS[:1])
        with pytest.raises(InputError, match=r"exits = \[2, 4\], but the model has 4 layers"):
            DelExit(exits=[4, 2]).open(session, rows, model._context())
    bare = built(f"llama:{LAYERS}", tables={"depth": {"use": "by-call"}})
    with bare.session() as session, pytest.raises(InputError, match="build with draft = del-exit"):
        method().open(session, rows, bare._context())
    whole = built(f"llama:{LAYERS}", tables={})
    with whole.session() as session, pytest.raises(InputError, match="depth = by-call"):
        method().open(session, rows, whole._context())
