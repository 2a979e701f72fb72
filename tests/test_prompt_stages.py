"""FastKV, LazyLLM and SpAtten beside brute-force forms over transformers' own attention."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from accel.ir.axis import find_axes
from accel.ir.errors import PassError, RecipeError
from accel.passes.kv._shared.named import call

from .prefill_case import LENGTHS, TOKENS, best, built, cascade, far, module

AXIS = find_axes()["prefill.prune"]
ROWS = TOKENS[:, : LENGTHS.max()]


def stayed(kept, scores, count, *always):
    """Of the kept positions those with the best scores; `always`: places among them."""
    return kept[best(scores, count, *always)]


def fastkv(prompt, share=0.4, window=3, kernel=3):
    def choose(layer, probs, kept):
        if layer != 1:
            return kept
        scores = probs[:, -window:].sum((0, 1))
        scores[-window:] = 0
        pooled = F.avg_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]
        count = max(1, int(share * prompt))
        last = range(len(kept) - min(window, count), len(kept))
        return stayed(kept, pooled, count, *last)

    return choose


def lazyllm(prompt, share=0.6, layers=(1, 3, 4)):
    def choose(layer, probs, kept):
        if layer not in layers:
            return kept
        count = max(1, int(share ** (layers.index(layer) + 1) * prompt + 1e-9))
        return stayed(kept, probs[:, -1].mean(0), min(count, len(kept)), len(kept) - 1)

    return choose


def spatten(prompt, share=0.4, sinks=1, recent=4, layers=3):
    total = torch.zeros(prompt)

    def choose(layer, probs, kept):
        total[kept] += probs.sum((0, 1))
        if layer == layers - 1:
            return kept
        count = max(1, int((1 - (1 - share) * (layer + 1) / (layers - 1)) * prompt + 1e-9))
        ends = [*range(len(kept) - recent, len(kept)), *range(sinks)][:count]
        return stayed(kept, total[kept], min(count, len(kept)), *ends)

    return choose


CASES = [
    ("fastkv", "llama", fastkv),
    ("fastkv", "gpt_neox", fastkv),
    ("lazyllm", "llama:6", lazyllm),
    ("spatten", "llama", spatten),
    ("spatten", "gpt2", spatten),
]


def prompted(model, tokens, length, after):
    with model.session() as session:
        out = [session.prompt(tokens[None, :length])]
        out += [session.run(tokens[None, [length + i]]) for i in range(after)]
    return np.concatenate(out, axis=1)[0]


def law_by_hand(name, worth):
    """The score of each slot of one row of ten, out of weights [H,N,S] of the last three queries."""
    weights = torch.rand(1, 4, 3, 10, generator=torch.Generator().manual_seed(1)) ** 3
    weights[0, 2, 1, 4] = 3.0  # one head and query, which a sum does not follow alone
    given = {
        "weights": weights, "query_positions": torch.tensor([[7, 8, 9]]),
        "positions": torch.arange(10)[None], "before": torch.ones(1, 10),
    }  # fmt: skip
    found = call(AXIS.build(name, **AXIS.small(name)).score, given)
    torch.testing.assert_close(found[0], worth(weights[0]))


def by_fastkv(weights, pool=lambda near: sum(near) / 3):
    """Sums over heads and queries, none of the window's own tokens, a mean with both neighbours."""
    total = [float(weights[:, :, s].sum()) if s < 7 else 0.0 for s in range(10)]
    return torch.tensor(
        [pool([*total, 0.0][max(s - 1, -1) : s + 2] if s else [0.0, *total[:2]]) for s in range(10)]
    )


SCORES = {
    "fastkv": by_fastkv,
    "lazyllm": lambda weights: weights.sum((0, 1)),
    "spatten": lambda weights: 1 + weights.sum((0, 1)),
}
WRONG = {
    "fastkv": lambda weights: by_fastkv(weights, max),
    "lazyllm": lambda weights: weights[:, -1].amax(0),
    "spatten": lambda weights: weights.sum((0, 1)),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_by_hand(name):
    law_by_hand(name, SCORES[name])
    with pytest.raises(AssertionError):
        law_by_hand(name, WRONG[name])


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "arch", "form"), CASES)
def test_layers_read_what_the_brute_force_form_keeps(name, arch, form):
    model = built(arch, use=name, **AXIS.small(name))
    for row, length in enumerate(LENGTHS[:2]):
        tokens = TOKENS[row, : length + 3]
        got = prompted(model, tokens, length, 3)
        want = cascade(module(arch), tokens, length, form(length))
        assert far(got, want[length - 1 :]) < 1e-4
        rule = form(length)

        def newest(layer, probs, kept, rule=rule):  # the control: as many, by position
            return kept[-len(rule(layer, probs, kept)) :]

        other = cascade(module(arch), tokens, length, newest)
        assert far(got, other[length - 1 :]) > 1e-3


def largest(share=0.5, layers=3, heads=4):
    """Masks of the heads with the largest outputs so far, of those that are left."""
    total, mask = torch.zeros(heads), torch.ones(heads)

    def choose(layer, out):
        nonlocal mask
        total.add_(out.abs().sum((1, 2)) * mask)
        if layer < layers - 1:
            count = int(heads * (1 - (1 - share) * (layer + 1) / (layers - 1)))
            best = total.masked_fill(mask == 0, -1).topk(count).indices
            mask = torch.zeros(heads).scatter(0, best, 1.0)
        return mask

    return choose


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_heads_of_spatten(target):
    options = {**AXIS.small("spatten"), "heads": 0.5}
    model = built("llama", target, use="spatten", **options)
    for row, length in enumerate(LENGTHS[:2]):
        tokens = TOKENS[row, : length + 3]
        got = prompted(model, tokens, length, 3)
        want = cascade(module("llama"), tokens, length, spatten(length), largest())
        assert far(got, want[length - 1 :]) < 1e-4
        other = cascade(module("llama"), tokens, length, spatten(length))  # the control: all heads
        assert far(got, other[length - 1 :]) > 1e-3


def test_heads_are_of_a_prompt():
    model, base = built("llama", use="spatten", **AXIS.small("spatten"), heads=0.5), built("llama")
    rows = [TOKENS[0, :30], TOKENS[1, :21], TOKENS[2, :1]]
    alone = [
        prompted(model, np.append(row, TOKENS[i, 30:33]), len(row), 3) for i, row in enumerate(rows)
    ]
    padded = np.zeros((3, 30), np.int64)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    with model.session(3) as session, base.session(3) as whole:
        for _ in range(2):  # and again, after a rewind
            out = [session.prompt(padded, np.array([30, 21, 1]))]
            masks = [session._core.backend._state[f"kv.heads.{i}"].numpy() for i in (1, 2)]
            assert masks[0].sum(1).tolist() == [3] * 3 and masks[1].sum(1).tolist() == [2] * 3
            assert (masks[1] <= masks[0]).all()
            with session.fork() as other:
                other.select([2, 1, 0])
                later = other.run(TOKENS[[2, 1, 0], 30:31])
            out += [session.run(TOKENS[:, 30 + i : 31 + i]) for i in range(3)]
            assert far(later[[2, 1, 0]], out[1]) < 1e-5
            for row, want in zip(np.concatenate(out, 1), alone, strict=True):
                assert far(row, want) < 1e-5
            session.rewind(0)
        got, want = session.run(TOKENS[:, :9]), whole.run(TOKENS[:, :9])  # all heads: no prompt
        assert far(got, want) < 1e-5


def sums(entry_scores, heads, rows, layers):
    assert np.allclose(entry_scores.sum(1), heads * rows * layers, rtol=1e-5)


@pytest.mark.long
def test_scores_of_spatten_are_all_attention_that_was_given():
    model = built("llama:4", use="spatten", dense=2, share=0.4, sinks=1, recent=4)
    entry, seen = model.program.entries["prompt.0"], {}
    heads = module("llama:4").config.num_attention_heads
    run = model.program.run

    def spy(name, inputs):
        found = run(name, inputs)
        seen.setdefault(name, []).append(found)
        return found

    assert "before" in entry.inputs
    object.__setattr__(model.program, "run", spy)
    try:
        prompted(model, TOKENS[0], 30, 0)
    finally:
        del model.program.__dict__["run"]
    first = seen["prompt.0"][-1]["scores"].numpy()
    sums(first, heads, 30, 2)
    with pytest.raises(AssertionError):  # of one layer alone
        sums(first, heads, 30, 1)
    later = seen["prompt.1"][-1]["scores"].numpy()
    assert (later[0, :10] > 0).all() and later.sum() < first.sum() + heads * 30


@pytest.mark.long
def test_what_lazyllm_computes_is_less_than_the_prompt_in_every_layer():
    model = built("llama:6", use="lazyllm", **AXIS.small("lazyllm"))
    with model.session() as session:
        session.prompt(ROWS[:1])
        state = {n: v.numpy() for n, v in session._core.backend._state.items()}
    held = [int((state[f"kv.pos.{i}"][0] >= 0).sum()) for i in (1, 2, 3)]
    assert held == [18, 10, 6]
    assert 2 * 30 + 2 * held[0] + held[1] + held[2] < 30 * 6


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fastkv", {"window": 0}, "window is 0"),
        ("fastkv", {"share": 1.5}, "share is 1.5; give more than 0 and at most 1"),
        ("fastkv", {"share": float("nan")}, "share is nan"),
        ("lazyllm", {"stages": 0}, "stages is 0; give 1 to 64"),
        ("lazyllm", {"spacing": 0.0}, "spacing is 0"),
        ("lazyllm", {"stages": 4}, "4 stages with a spacing of 0.3 go beyond the last layer"),
        ("spatten", {"heads": 0.0}, "heads is 0.0; give more than 0 and at most 1"),
        ("spatten", {"dense": 0}, "dense is 0"),
        ("spatten", {"recent": -1}, "recent is -1; give at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(name, options, words):
    with pytest.raises(RecipeError, match=f"prefill.prune.{name}: .*{words}"):
        AXIS.build(name, **options)


def test_a_model_that_is_dense_all_through_is_refused():
    with pytest.raises(PassError, match="3 layers read the whole prompt, and the model has 3"):
        built("llama", use="spatten")


@pytest.mark.parametrize("name", ["fastkv", "lazyllm", "spatten"])
def test_short_prompts(name):
    model, base = (built("llama", use=name, **AXIS.small(name)), built("llama"))
    got, want = (prompted(m, TOKENS[0], 1, 4) for m in (model, base))
    assert far(got, want) < 1e-5
    assert np.isfinite(prompted(model, TOKENS[0], 2, 4)).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["promptdistill", pytest.param("lazyllm", marks=pytest.mark.long)])
def test_pages_of_layers_with_slots_of_their_own(name):
    """An artifact says of the pages of a stage C1/4, as its graph does; it was refused on load."""
    quest = {"use": "quest", **find_axes()["kv.select"].small("quest")}
    tables, options = {"kv.select": quest}, AXIS.small(name)
    found = [built("llama", t, tables, use=name, **options) for t in ("eager", "onnx")]
    first, second = (run(model) for model in found)
    assert far(first, second) < 1e-4
    assert far(first, run(built("llama", "eager", {}, use=name, **options))) > 1e-4  # it selects


def test_the_end_of_a_long_prompt_reads_all_that_layers_hold(monkeypatch):
    """Beside pages that single tokens choose, however few tokens are left behind the longest graph call."""
    quest = {"use": "quest", **find_axes()["kv.select"].small("quest")}
    options = {**AXIS.small("promptdistill"), "tokens": 78}
    model = built("llama", tables={"kv.select": quest}, use="promptdistill", **options)
    tokens, found = np.random.default_rng(6).integers(3, 50, (1, 85)), []
    for chunk in (512, 80):
        monkeypatch.setattr("accel.runtime.session.core.CHUNK", chunk)
        with model.session() as session:
            found.append(session.prompt(tokens))
            assert session.stats["calls"] == (3 if chunk < 85 else 2)
    assert far(*found) < 1e-4


def run(model):
    with model.session(len(ROWS)) as session:
        return np.concatenate(
            [session.prompt(ROWS, LENGTHS), *(session.run(TOKENS[:, [t]]) for t in range(30, 34))],
            1,
        )
