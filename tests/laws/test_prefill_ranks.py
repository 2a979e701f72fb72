"""Laws of prompts that ranks share, over every method found: of its plan, and of what a session then gives."""

import dataclasses
from itertools import product
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError, InputError, RecipeError
from accel.runtime.prefill.exchange import rank as one_rank
from accel.runtime.prefill.exchange.plan import (
    KEYS,
    QUERIES,
    Attend,
    Plan,
    Receive,
    Send,
    Sizes,
    sent,
)
from accel.runtime.session.prompt.ranks import PromptRanks

from ..prefill_case import LENGTHS, TOKENS, built, far
from ..session_ways import variants
from ..spread import spread
from ..test_recurrence import mamba

TABLE = {"prefill.ranks": {"use": "cp-ring", "ranks": 3, "least": 4}}
AXIS = find_axes()["prefill.ranks"]
NAMES = AXIS.names()
FORMS = [(name, {}) for name in NAMES] + [("cp-ring", {"mode": "pass-q"})]
SIZES = [
    (1, 5, 0),
    (2, 4, 0),
    (2, 13, 0),
    (3, 24, 0),
    (4, 64, 0),
    (5, 31, 7),
    (2, 9, 30),
    (4, 8, 1),
]


def method(name, **options):
    return AXIS.build(name, **{**AXIS.small(name), **options})


def met(plan):
    """How often each query meets each key that it may see [tokens,keys], as steps say. A rank that uses what it was
    not sent, or waits for what nobody sends, is an error.
    """
    first = min(own.min() for own in plan.queries)
    total = max(own.max() for own in plan.queries) + 1
    counts = np.zeros((total - first, total), int)
    has = [
        {(KEYS, r, 0)} | {(QUERIES, r, row) for row in range(plan.queries[r].size)}
        for r in range(plan.ranks)
    ]
    results = [[] for _ in range(plan.ranks)]
    todo, mail = [list(steps) for steps in plan.steps], []
    while any(todo):
        before = sum(map(len, todo))
        for rank, steps in enumerate(todo):
            while steps:
                step = steps[0]
                things = None
                if not isinstance(step, Attend):
                    span = range(*step.rows) if step.kind != KEYS else range(1)
                    things = {(step.kind, o, row) for o in step.owners for row in span}
                if isinstance(step, Send):
                    if step.kind in (KEYS, QUERIES):
                        assert things <= has[rank]
                    else:
                        for at in [x for x in results[rank] if x[0] == step.owners[0]]:
                            assert set(at[1]) <= set(range(*step.rows))
                            results[rank].remove(at)
                            mail.append((rank, step.to, "pairs", at))
                    mail.append((rank, step.to, step.kind, step.owners, step.rows))
                elif isinstance(step, Receive):
                    letter = (step.source, rank, step.kind, step.owners, step.rows)
                    if letter not in mail:
                        break
                    mail.remove(letter)
                    has[rank] |= things
                    for one in [m for m in mail if m[:3] == (step.source, rank, "pairs")]:
                        results[rank].append(one[3])
                        mail.remove(one)
                else:
                    assert {(QUERIES, step.owner, row) for row in range(*step.rows)} <= has[rank]
                    assert all((KEYS, o, 0) in has[rank] for o, *_ in step.keys)
                    keys = np.concatenate([plan.keys[o][a:b] for o, a, b in step.keys])
                    results[rank].append((step.owner, tuple(range(*step.rows)), keys))
                steps.pop(0)
        assert sum(map(len, todo)) < before, "ranks wait for each other"
    assert not mail
    for rank, found in enumerate(results):
        for owner, rows, keys in found:
            assert owner == rank, "a result that is not brought home"
            for row in rows:
                at = plan.queries[rank][row]
                np.add.at(counts[at - first], keys[(keys >= 0) & (keys <= at)], 1)
    return counts


def law_of_pairs(plan):
    """Each pair of the causal triangle is met once, and each token is one rank's."""
    counts = met(plan)
    new, total = counts.shape
    assert sorted(np.concatenate(plan.queries)) == list(range(total - new, total))
    assert np.array_equal(counts, np.tri(new, total, total - new, dtype=int))


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
@pytest.mark.parametrize(("ranks", "tokens", "cached"), SIZES)
def test_each_pair_is_met_once(name, options, ranks, tokens, cached):
    how = method(name, ranks=ranks, **options)
    law_of_pairs(how.plan(tokens, cached, 4, 2))


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_a_plan_that_leaves_a_pair_out_is_caught(name, options):
    plan = method(name, ranks=3, **options).plan(24, 0, 4, 2)
    steps = list(plan.steps)
    last = max(i for i, s in enumerate(steps[1]) if isinstance(s, Attend) and s.owner == 1)
    steps[1] = (*steps[1][:last], *steps[1][last + 1 :])
    with pytest.raises(AssertionError):
        law_of_pairs(dataclasses.replace(plan, steps=tuple(steps)))
    twice = tuple(
        (*s, next(x for x in s if isinstance(x, Attend) and x.owner == i))
        for i, s in enumerate(plan.steps)
    )
    with pytest.raises(AssertionError):
        law_of_pairs(Plan(plan.queries, plan.keys, twice))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 64), (4, 64), (4, 61), (3, 100)])
def test_work_is_balanced(name, ranks, tokens):
    """Causal work differs by less than a chunk of queries has, or a query of each rank where slices are uneven."""
    plan = method(name, ranks=ranks).plan(tokens, 0, 4, 2)
    work = [int((own + 1).sum()) for own in plan.queries]
    chunk = -(-tokens // (2 * ranks))
    assert max(work) - min(work) <= chunk * tokens / 2
    even = [
        int((np.arange(*cut) + 1).sum())
        for cut in [(i * tokens // ranks, (i + 1) * tokens // ranks) for i in range(ranks)]
    ]
    assert max(even) - min(even) > max(work) - min(work)  # the control: an even split is not


# bytes, as the methods' papers count them


KV, Q, RESULT = 2 * 2 * 8 * 4, 4 * 8 * 4, 4 * (8 + 1) * 4  # 2 KV heads and 4 heads of 8 floats
BYTES = Sizes(KV, Q, RESULT)


@pytest.mark.parametrize(
    ("ranks", "tokens", "cached"), [(2, 64, 0), (4, 64, 0), (4, 64, 32), (4, 61, 30)]
)
def test_cp_ring_sends_what_its_paper_counts(ranks, tokens, cached):
    plan = method("cp-ring", ranks=ranks, mode="pass-kv").plan(tokens, cached, 4, 2)
    most = max(keys.size for keys in plan.keys)
    assert most <= -(-cached // ranks) + 2 * -(-tokens // (2 * ranks))  # max P_i + T/N, padded
    assert sent(plan, BYTES) == [(ranks - 1) * most * KV] * ranks
    if (tokens + cached) % (2 * ranks) == 0:
        assert sent(plan, BYTES)[0] == KV * (tokens + cached) * (ranks - 1) // ranks
    plan = method("cp-ring", ranks=ranks, mode="pass-q").plan(tokens, cached, 4, 2)
    around = sum(sent(plan, Sizes(0, Q, 0)))
    home = sum(sent(plan, Sizes(0, 0, RESULT)))
    assert around == (ranks - 1) * tokens * Q and home == (ranks - 1) * tokens * RESULT


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 64), (4, 64), (4, 61)])
def test_token_ring_sends_halves_once_around(ranks, tokens):
    plan = method("token-ring", ranks=ranks).plan(tokens, 0, 4, 2)
    assert sum(sent(plan, Sizes(KV, 0, 0))) == 0
    if tokens % (2 * ranks) == 0:
        n = tokens // ranks
        rows = sum((ranks - s) * n + s * n // 2 for s in range(1, ranks))
        assert sum(sent(plan, BYTES)) == rows * (Q + RESULT)
    assert sum(sent(plan, Sizes(0, Q, 0))) * RESULT == sum(sent(plan, Sizes(0, 0, RESULT))) * Q


def test_token_ring_works_equally_at_every_step():
    plan = method("token-ring", ranks=4).plan(64, 0, 4, 2)
    work = [
        [
            (s.rows[1] - s.rows[0]) * sum(b - a for _, a, b in s.keys)
            for s in steps
            if isinstance(s, Attend)
        ]
        for steps in plan.steps
    ]
    assert all(len({per[i] for per in work}) == 1 for i in range(4))
    pairs = [
        (s.owner, r) for r, steps in enumerate(plan.steps) for s in steps if isinstance(s, Attend)
    ]
    assert sorted(pairs) == list(product(range(4), range(4)))


@pytest.mark.parametrize(
    ("shares", "cached"), [([1, 1, 1, 1], 0), ([5, 3, 2, 1], 0), (None, 0), ([4, 3, 2, 1], 20)]
)
def test_kv_runahead_sends_what_comes_before_each_slice(shares, cached):
    how = method("kv-runahead", ranks=4, shares=shares)
    plan, ends = how.plan(64, cached, 4, 2), how.cuts(64, cached)
    assert sum(sent(plan, BYTES)) == sum(end + cached for end in ends[:-1]) * KV
    if shares == [1, 1, 1, 1]:
        assert sum(sent(plan, BYTES)) == 3 * 64 // 2 * KV  # (p-1) C / 2
    assert plan.last == 3


@pytest.mark.parametrize("seed", [0, 1])
def test_kv_runahead_search_finds_the_least_time(seed):
    from accel.runtime.prefill.ranks.kv_runahead import interpolated, search

    rng = np.random.default_rng(seed)
    per, pair = rng.uniform(1, 20), rng.uniform(0.1, 1)

    def seconds(ends):
        return max(
            (b - a) * per + (b - a) * (a + b) / 2 * pair
            for a, b in zip([0, *ends], ends, strict=False)
        )

    ends, found = search(seconds, 60, 3)
    best = min(seconds([a, b, 60]) for a in range(1, 58) for b in range(a + 1, 60))
    assert search(seconds, 60, 3, grid=1)[1] <= 1.05 * best
    assert found == seconds(ends) <= 1.013 * best  # the page's margin
    assert ends[0] > ends[1] - ends[0] > 0  # earlier slices are longer
    assert interpolated([(10, 1, 1), (20, 3, 1)], 15) == pytest.approx([0.625, 0.375])
    assert interpolated([(10, 1, 1), (20, 3, 1)], 99) == pytest.approx([0.75, 0.25])


def test_cp_ring_passes_what_is_smaller():
    how = method("cp-ring", ranks=4)
    assert how.passes_keys(64, 0, 32, 8) and how.passes_keys(64, 64, 32, 8)
    assert not how.passes_keys(4, 1000, 32, 8)  # few new tokens behind many cached ones
    fast = method("cp-ring", ranks=4, flops=1e6, bandwidth=1e6)
    assert fast.passes_keys(4, 1000, 32, 8) and not fast.passes_keys(1, 1000, 32, 8)


# sessions


def shared(name, arch="llama", target="eager", **options):
    return built(arch, target, {"prefill.ranks": {"use": name, **AXIS.small(name), **options}})


def prompted(model, tokens=TOKENS[:, :30], lengths=LENGTHS, after=3, again=True):
    """Logits after the prompts, single tokens and a second prompt; and the session's figures."""
    with model.session(len(tokens)) as session:
        out = [session.prompt(tokens, lengths)]
        out += [session.run(TOKENS[: len(tokens), [30 + i]]) for i in range(after)]
        if again:
            session.rewind(session.lengths - 1)
            out.append(session.prompt(TOKENS[: len(tokens), 33:43]))
            out.append(session.run(TOKENS[: len(tokens), [44]]))
        return np.concatenate(out, axis=1), session.stats


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_session_goes_on_as_if_one_had_run_all(name, options, ranks):
    got, stats = prompted(shared(name, ranks=ranks, **options))
    want, _ = prompted(built("llama"))
    assert far(got, want) < 1e-5
    assert (stats["exchanged_bytes"] > 0) == (ranks > 1)


def law_of_sessions(model, want):
    assert far(prompted(model)[0], want) < 1e-5


def test_ranks_that_merge_by_equal_shares_are_caught(monkeypatch):
    want, _ = prompted(built("llama"))
    model = shared("cp-ring")
    law_of_sessions(model, want)
    path = "accel.runtime.prefill.exchange.rank.merged"
    monkeypatch.setattr(path, lambda a, x, b, y: ((a + b) / 2, x))
    with pytest.raises(AssertionError):
        law_of_sessions(model, want)


ARCHITECTURES = "gemma2", "gpt_neox", "plain_latent"  # windows and caps, partial rotation, a latent


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "arch"), spread("prefill.ranks", NAMES, *ARCHITECTURES))
def test_every_attention_by_position_is_shared(name, arch):
    got, _ = prompted(shared(name, arch, ranks=2))
    assert far(got, prompted(built(arch))[0]) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "arch"), spread("prefill.ranks", NAMES, "llama", "gemma2"))
def test_onnx_is_the_eager_oracle(name, arch):
    want, figures = prompted(shared(name, arch, ranks=2))
    compiled = shared(name, arch, "onnx", ranks=2)
    for _, model in variants(compiled, None):
        got, stats = prompted(model)
        assert far(got, want) < 1e-4
        assert stats["exchanged_bytes"] == figures["exchanged_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_is_what_the_plan_says(name):
    """The figures of a session: bytes of all layers of the plan, and the keys that the session got."""
    model, n = shared(name, ranks=3), 24
    layer = model.facts.layers[0]
    heads, groups, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    sizes = Sizes(8 * groups * width, 4 * heads * width, 4 * heads * (width + 1))
    with model.session() as session:
        session.prompt(TOKENS[:1, :n])
        each = sent(method(name, ranks=3).plan(n, 0, heads, groups), sizes)
        assert session.stats["exchanged_bytes"] == len(model.facts.layers) * sum(each)
        assert session.stats["gathered_bytes"] == len(model.facts.layers) * n * sizes.keys
    out = model.generate(list(TOKENS[0, :n]), 2, eos=[])
    assert out.stats["exchanged_bytes"] == len(model.facts.layers) * sum(each)


@pytest.mark.parametrize("name", NAMES)
def test_short_prompts_run_in_one_piece(name):
    model, base = shared(name, ranks=3, least=10), built("llama")
    for n in (1, 2, 5, 9):
        prompt = list(TOKENS[1, :n])
        found = model.generate(prompt, 4, eos=[])
        assert found.tokens == base.generate(prompt, 4, eos=[]).tokens
        assert found.stats["exchanged_bytes"] == 0
    assert model.generate(list(TOKENS[1, :10]), 1, eos=[]).stats["exchanged_bytes"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_forked_and_its_rows_reordered(name):
    model, base = shared(name, ranks=2), built("llama")
    found = []
    for one in (model, base):
        with one.session(3) as session:
            session.prompt(TOKENS[:, :30], LENGTHS)
            with session.fork() as other:
                other.select([2, 0, 0])
                other.prompt(TOKENS[:, 5:14])
                out = [other.run(TOKENS[:, [40]]), session.run(TOKENS[:, [41]])]
            found.append(np.concatenate(out, 1))
    assert far(*found) < 1e-5


def test_rows_that_are_no_numbers_stay_apart():
    """A row whose keys are no numbers leaves the other rows as they are."""
    model = shared("cp-ring", ranks=2)
    with model.session(2) as session, built("llama").session(2) as plain:
        for one in (session, plain):
            one.prompt(TOKENS[:2, :10])
            one._core.backend.buffers()["kv.0.k"][0] = np.nan
        got, want = (one.prompt(TOKENS[:2, 10:30]) for one in (session, plain))
        assert np.isnan(got[0]).all() and np.isnan(want[0]).all()
        assert far(got[1], want[1]) < 1e-5


# refusals


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "option", [{"ranks": 0}, {"ranks": -1}, {"ranks": 65}, {"least": 0}], ids=str
)
def test_options_out_of_range_are_refused(name, option):
    with pytest.raises(
        RecipeError, match=f"{name}.*{next(iter(option))}.*{next(iter(option.values()))}.*give"
    ):
        AXIS.build(name, **option)


@pytest.mark.parametrize("name", NAMES)
def test_more_ranks_than_tokens_are_refused(name):
    with pytest.raises(
        InputError,
        match=f"{name}: 3 tokens are too few for 4 ranks.*give more tokens, or fewer ranks",
    ):
        method(name, ranks=4).plan(3, 0, 4, 2)


@pytest.mark.parametrize(
    "shares",
    [[1], [1, 0], [1, 2, 3], [1, -1], "ab", [[100, 1]], [1, float("nan")], 3, [], [[]], [1, True]],
    ids=str,
)
def test_shares_that_are_not_of_the_ranks_are_refused(shares):
    with pytest.raises(RecipeError, match="kv-runahead: shares has .*; give .*ranks = 2"):
        method("kv-runahead", shares=shares)


@pytest.mark.parametrize(
    "option", [{"mode": "pass"}, {"flops": -1.0}, {"bandwidth": float("nan")}], ids=str
)
def test_cp_ring_refuses_other_modes(option):
    with pytest.raises(RecipeError, match=f"cp-ring: .*{next(iter(option))} .*(give|mean)"):
        method("cp-ring", **option)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "why"), [(mamba, "has 0 attentions"), (models.cla, "keys or values of another layer")]
)
def test_models_that_cannot_be_cut_are_refused(make, why):
    with pytest.raises(AccelError, match=f"{why}.*leave prefill.ranks out"):
        accel.optimize(make(), TABLE, target="eager", max_context=64, verify=False)


def law_of_sinks(compiled, want):
    """A key that all queries see is counted once, however many ranks there are."""
    with compiled.session() as session:
        got = session.prompt(TOKENS[:1, :30])
        assert session.stats["exchanged_bytes"] > 0
    assert far(got, want) < 1e-4


@pytest.mark.parametrize("target", ["eager", pytest.param("onnx", marks=pytest.mark.long)])
def test_sinks_are_counted_once(target, monkeypatch):
    model = models.random(
        "gpt_oss", vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2, sliding_window=9,
        num_experts_per_tok=1, max_position_embeddings=64,
    ).eval()  # fmt: skip
    with torch.no_grad():
        want = model(torch.tensor(TOKENS[:1, :30])).logits[:, -1:].numpy()
    with accel.optimize(model, TABLE, target=target, max_context=64, verify=False) as compiled:
        law_of_sinks(compiled, want)
        real = one_rank._Held.result
        monkeypatch.setattr(
            one_rank._Held, "result", lambda held: (real(held)[0], real(held)[1] + 99)
        )
        with pytest.raises(AssertionError):
            law_of_sinks(compiled, want)  # as if there were no sink


def test_ranks_that_wait_for_each_other_are_told():
    """A plan whose ranks all begin by receiving."""
    model = shared("cp-ring", ranks=2)
    with model.session() as session:
        observer = session.observer(PromptRanks)
        plan = observer.method.plan(12, 0, 4, 2)
        late = [tuple(sorted(steps, key=lambda s: isinstance(s, Send))) for steps in plan.steps]
        broken = dataclasses.replace(plan, steps=tuple(late))
        observer.method = SimpleNamespace(plan=lambda *_: broken, least=1, fewest=1)
        with pytest.raises(AccelError, match="ranks wait for each other: 0 for 1, 1 for 0"):
            session.prompt(TOKENS[:1, :12])
        assert session.length == 0
        observer.method = method("cp-ring")
        session.prompt(TOKENS[:1, :12])
        assert session.length == 12
