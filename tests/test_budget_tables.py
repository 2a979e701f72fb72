"""Budgets with a table: headkv-r2, duo-heads and prefixkv."""

import itertools

import numpy as np
import pytest
import torch

from accel.compiler.over_state import keys_of
from accel.compiler.part_text import example_rows
from accel.ir.errors import InputError, RecipeError
from accel.ir.ops.attention import Form
from accel.ir.tables import Observed, Rows
from accel.passes.kv._shared import tables
from accel.passes.kv._shared.tables import measured
from accel.passes.kv.score.streaming_llm import StreamingLlm
from accel.passes.trained import sample, write
from accel.runtime.kv.budget._observed import right_places
from accel.runtime.kv.budget.duo_heads import DuoHeads
from accel.runtime.kv.budget.headkv_r2 import HeadKVR2
from accel.runtime.kv.budget.prefixkv import PrefixKV, curve, prefixes

from .kv_case import evicting, kept, recipe, table
from .kv_slots import AXES, B, G, choose, real, sets, slots
from .session_ways import close, singles

KINDS = {"headkv-r2": HeadKVR2, "duo-heads": DuoHeads, "prefixkv": PrefixKV}
T = 24


def observed(heads=4, groups=2, rows=1, seed=0, width=6):
    r = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, n, T, width, generator=r) for n in (heads, groups, groups))
    return Observed(q, k, v, Form("causal", scale=0.7))


def text(rows=1, seed=0, kinds=5):
    """Tokens [B,T+1] of few kinds, so that pairs repeat."""
    return torch.randint(kinds, (rows, T + 1), generator=torch.Generator().manual_seed(seed))


def layer_tokens(budget, seen, tables):
    return [budget.tokens(seen, i, len(tables), **one) for i, one in enumerate(tables)]


# headkv-r2


def importance(*layers):
    """The tables of layers whose heads are so important, 1 on average."""
    every = np.array(layers, np.float64) / np.mean(layers)
    return [{"share": one, "shares": every.mean(1)} for one in every]


def test_right_places_follow_a_copy_of_the_token():
    tokens = [3, 4, 5, 3, 4, 4, 5, 3, 4]
    found = right_places(torch.tensor(tokens))
    for t, j in itertools.product(range(8), range(8)):
        want = 1 <= j <= t and tokens[j] == tokens[t + 1] and tokens[j - 1] == tokens[t]
        assert bool(found[t, j]) == want, (t, j)


def test_importance_is_attention_to_the_right_places():
    """Written out for each query and head; a head that looks at them gets more."""
    one, other, tokens = observed(rows=2), observed(rows=2, seed=1), text(2)
    known = torch.ones(2, T)
    known[:, ::3] = 0
    want = np.zeros((2, 2))
    for layer, x in enumerate((one, other)):
        for row in range(2):
            for t in range(T):
                span = [j for j in range(T) if right_places(tokens[row])[t, j]]
                if not span or not known[row, t]:
                    continue
                for head in range(4):
                    keys = x.keys[row, head // 2, : t + 1]
                    probs = (keys @ x.queries[row, head, t] * x.form.scale).softmax(0)
                    top = probs.argsort(descending=True)[: len(span)].tolist()
                    hits = sum(float(probs[j]) for j in span if j in top)
                    want[layer, head // 2] += hits / len(span) / 2
    found = HeadKVR2().measure([Rows(tokens, known, {3: one, 7: other})])
    want /= want.mean()
    np.testing.assert_allclose(found[3]["share"], want[0], rtol=1e-4)
    np.testing.assert_allclose(found[7]["share"], want[1], rtol=1e-4)
    np.testing.assert_allclose(found[3]["shares"], want.mean(1), rtol=1e-4)
    assert torch.equal(found[3]["shares"], found[7]["shares"])
    strange = HeadKVR2().measure([Rows(torch.arange(T + 1)[None], known[:1], {0: observed()})])
    assert strange[0]["share"].tolist() == [1, 1], "nothing repeats"


def law_facts_count(method):
    """Written out: the attention to the facts alone counts, of tokens of the answer, among as many highest weights."""
    x, tokens, known = observed(), text(), torch.zeros(1, T)
    facts, answer = [3, 4, 5, 11], [19, 20, 22]
    known[0, facts], known[0, answer] = -1, 1
    want = np.zeros(2)
    for t, head in itertools.product(answer, range(4)):
        logits = x.keys[0, head // 2, : t + 1] @ x.queries[0, head, t] * x.form.scale
        probs = logits.softmax(0)
        top = probs.argsort(descending=True)[: len(facts)].tolist()
        want[head // 2] += sum(float(probs[j]) for j in facts if j in top)
    found = method.measure([Rows(tokens, known, {0: x})])
    np.testing.assert_allclose(found[0]["share"], want / want.mean(), rtol=1e-4)


def test_importance_of_an_example_is_attention_to_its_facts():
    law_facts_count(HeadKVR2())


def test_copies_in_place_of_facts_are_caught():
    class Copies(HeadKVR2):
        def measure(self, rows):
            return super().measure(Rows(r.tokens, r.known.clamp(min=0), r.layers) for r in rows)

    with pytest.raises(AssertionError):
        law_facts_count(Copies())


def test_the_answer_of_a_needle_needs_both_facts():
    for one in itertools.islice(HeadKVR2().examples(3), 20):
        owner, code = one.facts
        thing = owner.partition(" has the ")[2].rstrip(".")
        assert thing in code and f" {thing} " not in one.question and one.answer in code
        assert owner.partition(" ")[0] in one.question and one.answer not in "".join(one.others)
    first, again = (list(itertools.islice(HeadKVR2().examples(3), 5)) for _ in "ab")
    assert first == again


class Letters:
    """A tokenizer of letters."""

    def encode(self, text, *, special=True):
        return [*[1] * special, *map(ord, text)]


def test_rows_of_examples_hide_the_facts_in_a_text():
    examples, around = HeadKVR2().examples(0), torch.tensor([*b"word "] * 200)
    seen = set()
    for row, known in itertools.islice(example_rows(Letters(), examples, around, 500, 0), 8):
        assert row.shape == (1, 501) and known.shape == (1, 500) and row[0, 0] == 1
        whole = "".join(map(chr, row[0, 1:].tolist()))
        asked = (known[0] > 0).nonzero()[:, 0]
        answer = "".join(chr(int(row[0, i + 1])) for i in asked)
        assert whole.endswith(f"Answer: The code is{answer}") and len(answer) == 5
        facts = "".join(chr(int(row[0, i])) for i in (known[0] < 0).nonzero()[:, 0])
        assert f" is{answer}.\n" in facts and facts.count(" has the ") == 1
        assert facts.replace("\n\n", "\n").strip() and whole.count(" has the ") == 2
        seen.add(whole.find(answer))
    assert len(seen) > 4, "they lie anywhere"
    with pytest.raises(InputError, match="give length="):
        next(example_rows(Letters(), HeadKVR2().examples(0), around, 50, 0))


def test_examples_that_are_answered_wrong_do_not_count(monkeypatch):
    """Of those that are right the marks stay; if none is, their rows are text; a text's rows are as they were."""
    known = torch.tensor([[-1.0, 0, 1]])
    rows = [(torch.full((1, 4), i), known) for i in range(4)]
    for right, want in (({1, 3}, [1, 3]), (set(), [0, 1, 2, 3])):
        monkeypatch.setattr(tables, "says", lambda program, ids, _, r=right: int(ids[0, 0]) in r)
        found = list(tables._answered(None, rows))
        assert [int(ids[0, 0]) for ids, _ in found] == want
        assert all(torch.equal(k, known if right else torch.ones(1, 3)) for _, k in found)
    plain = [(ids, known.abs()) for ids, known in rows]
    assert list(tables._answered(None, plain)) == plain


@pytest.mark.parametrize("beta", [1.0, 1.005, 1.2, 2.0, 10.0])
def test_capacities_are_those_of_the_paper(beta):
    """round(I pool + base - base / beta) + w, a token apart; what no layer has room for goes to the others."""
    tables, window, count = importance([0.2, 1.4], [1.1, 0.9], [0.4, 0.1]), 8, 60
    budget = HeadKVR2(tokens_kept=count, beta=beta, window=window)
    base, total = count - window, 0
    for i, one in enumerate(tables):
        keep = budget.tokens(3000, i, 3, **one)
        x = slots(0, base=(0, 0, 0), recent=(300, 300, 300)) | {
            "recent_pos": torch.arange(300).repeat(B, 1),
            **{n: torch.randn(B, G, 300, 6) for n in ("recent_k", "recent_v")},
        }
        x |= {f"table.{n}": torch.tensor(v, dtype=torch.float32) for n, v in one.items()}
        x = {
            n: v
            for n, v in x.items()
            if "mass" not in n and "notes" not in n and "entropy" not in n
        }
        most = budget.most(keep, G, **one)
        found = [len(h) for h in sets(choose(x, keep, StreamingLlm(), budget, most=most))[0]]
        pool = base / beta
        want = one["share"] * pool + base - pool + window
        assert np.abs(np.array(found) - want).max() <= 1.01, (i, found, want)
        assert min(found) >= base - pool + window - 1 and max(found) <= most
        total += sum(found)
    assert abs(total - count * 6) <= 6
    short = layer_tokens(budget, 90, tables)
    assert max(short) <= 90 and abs(sum(short) - 3 * count) <= 3


def test_a_head_has_room_for_its_part_of_the_pool_and_no_more():
    budget = HeadKVR2(tokens_kept=20, beta=1.0, window=4)
    assert budget.most(20, 2, share=np.array([1.0, 3.0])) == 4 + 16 * 3 // 2
    assert budget.most(4, 2, share=np.array([1.0, 3.0])) == 4


def test_what_a_layer_has_no_room_for_goes_to_the_others():
    tables = importance([9, 9], [0.5, 0.5], [0.4, 0.6], [0.1, 0.3])
    budget = HeadKVR2(tokens_kept=50, beta=1.0, window=4)
    found = layer_tokens(budget, 80, tables)
    assert found[0] == 80 and abs(sum(found) - 200) <= 4 and found[1] >= found[3]
    assert layer_tokens(budget, 50, tables) == layer_tokens(budget, 9, tables) == [50] * 4
    assert layer_tokens(HeadKVR2(tokens_kept=4, window=4), 80, tables) == [4] * 4


def law_adds_up(budget, count, seen, layers, seed):
    """All layers together keep what the average says, each as the paper wants it, less than a token apart."""
    share = np.random.default_rng(seed).gamma(0.5, 1, (layers, 2))
    tables = importance(*share)
    found = layer_tokens(budget, seen, tables)
    assert sum(found) == count * layers and 1 <= min(found) <= max(found) <= seen
    weights = budget._weights(tables[0]["shares"])
    wanted = budget.window + (count - budget.window) * weights
    if 1 <= wanted.min() and wanted.max() <= seen:
        assert np.abs(found - wanted).max() < 1


@pytest.mark.parametrize("layers", [2, 9, 28, 36])
@pytest.mark.parametrize("window, count", [(0, 5), (0, 33), (4, 5), (4, 9), (32, 100)])
def test_layers_add_up_to_the_average(layers, window, count):
    """Nine layers at an average of 5 keep 45: they are not rounded one by one."""
    for seed in range(5):
        for beta in (1.0, 1.2, 3.0):
            budget = HeadKVR2(tokens_kept=count, beta=beta, window=window)
            law_adds_up(budget, count, 300, layers, seed)


def test_layers_that_are_rounded_one_by_one_are_caught():
    class Alone(HeadKVR2):
        def tokens(self, seen, layer, layers, share, shares):
            return max(1, round(self.window + (5 - self.window) * self._weights(shares)[layer]))

    with pytest.raises(AssertionError):
        for seed in range(5):
            law_adds_up(Alone(tokens_kept=5, window=0), 5, 300, 9, seed)


def test_slots_that_a_head_lacks_go_to_the_others():
    x, budget = slots(3), HeadKVR2(window=2, beta=1.0)
    x |= {"table.share": torch.tensor([1.0, 9.0]), "table.shares": torch.ones(1)}
    there = [[len(h) for h in row] for row in real(x)]
    for keep in (3, 6, 9, 12):
        found = [[len(h) for h in row] for row in sets(choose(x, keep, StreamingLlm(), budget))]
        for got, can in zip(found, there, strict=True):
            assert sum(got) == min(2 * keep, sum(can)) and got[0] >= min(2, can[0])


# duo-heads


def test_streaming_heads_keep_the_first_and_the_newest():
    x = slots(1, base=(0, 0, 0), recent=(14, 5, 16))
    x["table.place"] = torch.tensor([0.3, 0.7])
    for share, streams in ((0.0, ()), (0.5, (0,)), (1.0, (0, 1))):
        budget = DuoHeads(share=share, sinks=2, recent=4)
        for row, got in enumerate(sets(choose(x, 6, StreamingLlm(2), budget))):
            n = int(x["seen"][row])
            for head in range(G):
                few = {p for p in range(n) if p < 2 or p >= n - 4}
                assert got[head] == (few if head in streams else set(range(n)))
    place = np.array([0.3, 0.7])
    budget = DuoHeads(sinks=2, recent=4)
    assert budget.tokens(99, 0, 2, place=place) == 6 and budget.most(6, 2, place=place) > 1 << 30
    assert budget.tokens(99, 0, 2, place=place + 0.3) == 99
    assert budget.most(6, 2, place=place - 0.3) == 6 == budget.tokens(99, 0, 2, place=place - 0.3)


def test_heads_that_lose_least_stream():
    """Against outputs of each query by hand; of layers, those with a copy far away only."""
    tokens = text(kinds=3)
    tokens[0, 8:14] = 7  # right places before it are far from those after it
    xs = {2: observed(), 5: observed(seed=1)}
    method = DuoHeads(sinks=2, recent=4)
    loss = {}
    for layer, x in xs.items():
        for group in range(2):
            total = 0.0
            for t in range(T):
                span = [j for j in range(T) if right_places(tokens[0])[t, j]]
                near = [j for j in range(t + 1) if j < 2 or t - j < 4]
                if not span or set(span) & set(near):
                    continue
                for head in (2 * group, 2 * group + 1):
                    keys, values = x.keys[0, group], x.values[0, group]
                    logits = keys @ x.queries[0, head, t] * x.form.scale
                    whole = logits[: t + 1].softmax(0) @ values[: t + 1]
                    moved = whole - logits[near].softmax(0) @ values[near]
                    total += float(moved.square().sum() / whole.square().sum())
            loss[layer, group] = total
    assert min(loss.values()) > 0
    found = method.measure([Rows(tokens, torch.ones(1, T), xs)])
    places = {(i, g): float(p) for i, one in found.items() for g, p in enumerate(one["place"])}
    assert sorted(places, key=places.get) == sorted(loss, key=loss.get)
    assert sorted(places.values()) == [0.125, 0.375, 0.625, 0.875]


# prefixkv


def test_a_layer_keeps_what_reaches_one_height():
    r = torch.Generator().manual_seed(5)
    weights = [torch.rand(60, generator=r) ** power for power in (0.2, 2, 9)]
    curves = [(w.sort(descending=True).values / w.sum()).cumsum(0) for w in weights]
    found = prefixes(curves)
    percent = torch.linspace(0, 1, 101)
    torch.testing.assert_close(found.mean(0), percent, atol=1e-3, rtol=0)
    assert (found.diff(dim=1) >= -1e-6).all() and (found[0] >= found[2] - 1e-6).all()
    assert found[0, 30] > found[2, 30] + 0.2
    for share in (10, 35, 80):  # the height: the smallest that needs so many
        height = max(
            float(c[max(0, int(60 * s) - 1)]) for c, s in zip(curves, found[:, share], strict=True)
        )
        want = torch.tensor([int((c < height).sum()) for c in curves]) / 60
        assert (found[:, share] - want).abs().max() < 0.05
    same = prefixes([curves[1]] * 3)
    torch.testing.assert_close(same, percent.expand(3, -1), atol=1e-3, rtol=0)


def test_curves_are_of_attention_summed_over_queries():
    x = observed()
    total = torch.zeros(T)
    for t, head in itertools.product(range(T), range(4)):
        keys = x.keys[0, head // 2, : t + 1]
        total[: t + 1] += (keys @ x.queries[0, head, t] * x.form.scale).softmax(0) / 4
    want = (total.sort(descending=True).values / T).cumsum(0)
    torch.testing.assert_close(curve(x.weights()[0]), want)


@pytest.mark.parametrize("seen", [60, 700])
def test_prefixes_add_up(seen):
    r = torch.Generator().manual_seed(5)
    curves = [(torch.rand(90, generator=r) ** p).sort(descending=True).values for p in (0.2, 2, 9)]
    found = prefixes([(c / c.sum()).cumsum(0) for c in curves]).numpy()
    tables = [{"kept": one} for one in found]
    for ratio in (0.1, 0.5, 0.7, 0.9):
        each = layer_tokens(PrefixKV(compression_ratio=ratio), seen, tables)
        assert abs(sum(each) - 3 * seen * (1 - ratio)) <= 3 and each[0] > each[2] >= 5
        alike = [{"kept": np.linspace(0, 1, 101)}] * 3
        assert len(set(layer_tokens(PrefixKV(compression_ratio=ratio), seen, alike))) == 1
    assert layer_tokens(PrefixKV(tokens_kept=seen), seen, tables) == [seen] * 3, "nothing dropped"


# In sessions


def files(stateful, name, folder):
    """The recipe of a budget with a table that was measured on random tokens."""
    program, file = stateful("llama"), folder / f"{name}.safetensors"
    method = AXES["budget"].build(name, **AXES["budget"].small(name))
    tokens = torch.randint(3, 9, (2, 41), generator=torch.Generator().manual_seed(0))
    parts = measured(method, program, [(tokens, torch.ones(2, 40))])
    write(method, file, parts, sample(program, keys_of(program)), {})
    return {**recipe("streaming-llm"), "kv.budget": table(name, table=str(file))}, parts


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_session_keeps_what_its_table_says(stateful, tmp_path, name):
    tables, parts = files(stateful, name, tmp_path)
    budget = {n: v for n, v in tables["kv.budget"].items() if n != "use"}
    method = KINDS[name](**budget)
    case = evicting(stateful("llama"), tables)
    session = case.session(2)
    session.run(case.tokens(2, 40), [40, 30])
    session.end_prompt()
    for layer, where in kept(session).items():
        one = {n: np.array(v) for n, v in parts[layer].items()}
        for row, n in enumerate((40, 30)):
            total = int((where[row] >= 0).sum())
            if name == "duo-heads":
                assert total == sum(8 if p < 0.5 else n for p in one["place"])
            else:
                assert total == 2 * method.tokens(n, layer, 2, **one)
    logits = singles(session, case.tokens(2, 44)[:, 40:])
    alone = case.session(1)
    alone.run(case.tokens(2, 40)[1:, :30])
    alone.end_prompt()
    close(logits[1:], singles(alone, case.tokens(2, 44)[1:, 40:]))


@pytest.mark.long
def test_no_streaming_head_loses_nothing(stateful, tmp_path):
    tables, _ = files(stateful, "duo-heads", tmp_path)
    found = []
    for change in ({"share": 0.0}, {"share": 1.0, "recent": 60}, {"share": 1.0}):
        case = evicting(stateful("llama"), {**tables, "kv.budget": tables["kv.budget"] | change})
        session = case.session(1)
        session.run(case.tokens(1, 40))
        session.end_prompt()
        found.append(singles(session, case.tokens(1, 44)[:, 40:]))
    close(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 1e-3, "the control"


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("headkv-r2", {"beta": 0.9}, "beta is 0.9"),
        ("headkv-r2", {"beta": float("nan")}, "beta is nan"),
        ("headkv-r2", {"window": -1}, "window is -1; give at least 0"),
        ("duo-heads", {"share": 1.5}, "share is 1.5; give 0 to 1"),
        ("duo-heads", {"share": float("nan")}, "share is nan"),
        ("duo-heads", {"sinks": -1}, "sinks is -1"),
        ("duo-heads", {"recent": 0}, "recent is 0; give at least 1"),
        ("prefixkv", {"protected": -1}, "protected is -1; give at least 0"),
    ],
)
def test_options_are_checked(name, options, says):
    with pytest.raises(RecipeError, match=f"kv.budget.{name}: .*{says}"):
        AXES["budget"].build(name, **options)
