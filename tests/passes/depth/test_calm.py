"""calm: where a token leaves, and how often one that left is another than the whole model's."""

import math
from functools import cache
from pathlib import Path

import models
import numpy as np
import pytest
import torch

import accel
from accel import reference
from accel.compiler.load.source import open_source
from accel.compiler.pipeline import pipeline
from accel.compiler.quality.calibration import make_calibration
from accel.ir.calibration import Calibration
from accel.ir.capture.capture import capture
from accel.ir.errors import RecipeError
from accel.passes import run
from accel.passes.depth import _threshold
from accel.passes.depth._classifier import ExitClassifier
from accel.passes.depth._joint import layers
from accel.passes.depth._routed import Reads
from accel.passes.depth._threshold import (
    APART,
    at_most,
    even,
    gap,
    least_threshold,
    leaving,
    likeness,
    near_one,
    observed,
)
from accel.passes.depth.calm import MEASURES, Calm

from ...depth_case import NEVER, far, module_of, oracle, program_of

COUNT = 6
TOKENS = np.random.default_rng(3).integers(3, 90, (2, 14))
SHARE, DOUBT = 0.1, 0.05


def cosines(module, tokens):
    """Of the last token of each row, how alike the stream before and after each layer is [B,L-1], by the module's own
    hidden states; the last one is normed and left out.
    """
    with torch.no_grad():
        states = module(torch.tensor(tokens), output_hidden_states=True).hidden_states[:COUNT]
    last = [s[:, -1].double() for s in states]
    near = [torch.cosine_similarity(a, b, dim=-1) for a, b in zip(last, last[1:], strict=False)]
    return torch.stack(near, 1).numpy()


def left_after(depth, tokens):
    """Which layers [L,T] run where the last token leaves after `depth` of them."""
    ran = np.ones((COUNT, tokens.shape[1]), bool)
    ran[depth:, -1] = False
    return ran


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_a_token_leaves_after_the_first_layer_that_leaves_it_as_it_is(target):
    """Of two rows after the first where both are: a batch never leaves before its rows do. The control: one deeper."""
    module, tokens = module_of(COUNT), TOKENS[:, :9]
    near = cosines(module, tokens)
    options = {"use": "calm", "by": "state", "first": 1, "every": 1, "threshold": 0.9}
    found = []
    with accel.optimize(
        *(module, {"depth": options}), target=target, max_context=32, max_batch=2, verify=False
    ) as compiled:
        assert compiled.facts.depth.threshold == 0.9
        for limit in (
            -1.0,
            *sorted(0.999 * float(x) for x in near.min(0)),
            NEVER,
        ):
            alone = []
            for rows in ([0], [1], [0, 1]):
                sure = near[rows].min(0) >= limit
                depth = int(sure.argmax()) + 1 if sure.any() else COUNT
                alone.append(depth)
                with compiled.session(len(rows)) as session:
                    session.prompt(tokens[rows, :-1])
                    got = session.run(tokens[rows, -1:], threshold=limit)
                want = oracle(module, tokens[rows], left_after(depth, tokens))[:, -1:]
                assert far(got, want) < 1e-4
                if rows == [0] and depth < COUNT:
                    deeper = oracle(module, tokens[rows], left_after(depth + 1, tokens))[:, -1:]
                    assert far(got, deeper) > 1e-3
            assert alone[2] >= max(alone[:2])
            found.append(alone[2])
    assert found == sorted(found) and len(set(found)) > 2


def each_step(compiled, **controls):
    """The logits [T,V] of nine single tokens behind a prompt of five; controls are functions of the token's number."""
    with compiled.session() as session:
        session.prompt(TOKENS[:1, :5])
        steps = [
            session.run(TOKENS[:1, 5 + n : 6 + n], **{k: of(n) for k, of in controls.items()})
            for n in range(9)
        ]
    return np.concatenate(steps)[:, -1]


def test_a_threshold_falls_with_each_token_behind_the_prompt():
    """The control: one that stays."""
    module = module_of(COUNT)
    near = cosines(module, TOKENS[:, :9])
    options = {"use": "calm", "by": "state", "first": 1, "every": 1, "falls": 4.0, "over": 6}
    for limit in np.linspace(max(near.min(), 0.05), 1, 8):
        recipe = {"depth": {**options, "threshold": float(limit)}}
        with accel.optimize(module, recipe, target="eager", max_context=32) as compiled:
            found = each_step(compiled)

            def said(n, limit=float(limit)):
                return limit * (0.9 + 0.1 * math.exp(-4 * n / 6))

            assert far(found, each_step(compiled, threshold=said)) < 1e-6
            if far(found, each_step(compiled, threshold=lambda n, at=float(limit): at)) > 1e-3:
                return
    pytest.fail("a threshold that falls changes nothing")


def test_exits_norm_the_stream_where_a_loop_reads_it_normed():
    """`adaptive-bok` reads the normed stream of all tokens, so rows are chosen behind the norm."""
    module, logits = models.make("llama", 4), []
    with torch.no_grad():
        module.model.norm.weight.fill_(0.02)  # sure of less than the stream itself
    calm = {"use": "calm", "first": 1, "every": 1, "threshold": 0.5}
    for loop in ("autoregressive", "adaptive-bok"):
        recipe = {"depth": calm, "loop": {"use": loop}}
        with accel.optimize(module, recipe, target="eager", max_context=32) as compiled:
            for limit in np.geomspace(1e-5, 1, 11):
                with compiled.session() as session:
                    session.prompt(TOKENS[:1, :8])
                    logits.append(session.run(TOKENS[:1, 8:9], threshold=float(limit)))
    apart, found = np.split(np.array(logits), 2)
    assert far(apart[0], apart[-1]) > 1e-3, "some leave early, and some do not"
    for got, want in zip(found, apart, strict=True):
        assert far(got, want) < 1e-6


def test_the_test_is_the_tail_of_the_binomial():
    for count, share in [(10, 0.3), (60, 0.05), (512, 0.02)]:
        tail = 0.0
        for wrong in range(0, 20 if count > 20 else count):
            tail += math.comb(count, wrong) * share**wrong * (1 - share) ** (count - wrong)
            assert at_most(wrong, count, share) == pytest.approx(tail, rel=1e-9)
    assert at_most(0, 58, 0.05) > 0.05 > at_most(0, 59, 0.05)
    assert at_most(3, 5, 0.0) == 1 and at_most(0, 5, 1.0) == 0


def test_the_threshold_is_the_last_that_passes_before_one_fails():
    """The surest tokens agree, then one in five does not, then all do: what comes after a failure does not count."""
    sure = torch.linspace(1, 0, 2000)[None]
    same = torch.ones(1, 2000, dtype=torch.bool)
    same[0, 200:1000:2] = False
    found = least_threshold(sure, same, even(), SHARE, DOUBT)
    wrong = int((~leaving(sure, same, found)).sum())
    assert at_most(wrong, 2000, SHARE) <= DOUBT < at_most(wrong + 10, 2000, SHARE)
    same[0, :30] = False
    assert least_threshold(sure, same, even(), 0.002, DOUBT) is None, "the surest are others"
    assert least_threshold(sure[:, :20], same[:, 40:60], even(), SHARE, DOUBT) is None, "too few"


LIMITS = {
    "softmax": even()[::4],
    "max": even()[::4],
    "state": near_one()[100:180],
    "meta": even()[::4],
}


@cache
def seen(count, by):
    """What exits of the bundled model give on `count` tokens of its calibration text, and of text held out of it."""
    source = open_source(Path(reference.__file__).parent)
    loaded = source.load()
    program = capture(loaded.model, max_context=64, stored=loaded.stored)
    run(program, [*pipeline(), Reads(Calm(), ExitClassifier())])
    text = make_calibration(None, source.tokenizer, program.facts, lambda *_: None)
    learnt = program.parts["calm"]

    def of(logits, after, before, layer):
        part = learnt[layer].values() if by == "meta" else ()
        return MEASURES[by].at(logits, after, before, tuple(part))

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_threshold, "TOKENS", count)
        for rows in (text.tokens, text.held_out):
            program.calibration = Calibration(rows, rows, "given")
            found.append(observed(program, layers(program), [3, 5], of))
    return found


def draws(text, other, limits, count=100):
    """Over draws of 200 tokens of a text, how often the share of others is more on another text than it may be: at the
    threshold of the method, and at the one at which no more than the share was seen. And how many leave early.
    """
    generator, beyond, plainly, early = torch.Generator().manual_seed(1), 0, 0, []
    for _ in range(count):
        drawn = torch.randint(0, text[0].shape[1], (200,), generator=generator)
        some = [x[:, drawn] for x in text]
        bound = least_threshold(*some, limits, SHARE, DOUBT) or NEVER
        plain = min(x for x in limits if int((~leaving(*some, x)).sum()) <= SHARE * 200)
        beyond += risk(other, bound) > SHARE
        plainly += risk(other, plain) > SHARE
        early.append(leaving(*other, bound).numel() / other[0].shape[1])
    return beyond / count, plainly / count, np.median(early)


@pytest.mark.few(1)
@pytest.mark.parametrize("by", LIMITS)
def test_the_bound_holds_with_its_probability(by):
    """Of tokens drawn from a text, for all of it. The control: the share that was seen is no bound."""
    whole = [torch.cat(parts, 1) for parts in zip(*seen(1024, by), strict=True)]
    beyond, plainly, early = draws(whole, whole, LIMITS[by])
    assert beyond <= 2 * DOUBT < plainly
    assert early > 0.05


@pytest.mark.long
@pytest.mark.parametrize("by", LIMITS)
def test_the_bound_holds_on_text_that_was_held_out(by):
    """Of other documents, with as much again for the difference of the two texts."""
    beyond, plainly, _ = draws(*seen(16384, by), LIMITS[by])
    assert beyond <= 2 * DOUBT < plainly


def risk(text, limit):
    """The share of all tokens that leave as others than the whole model's."""
    return int((~leaving(*text, limit)).sum()) / text[0].shape[1]


@pytest.mark.parametrize("by", ["softmax", "state"])
def test_what_is_observed_is_what_the_module_gives(by):
    """Every eighth token of each row; the control: its neighbours."""
    text = torch.from_numpy(np.random.default_rng(5).integers(3, 90, (3, 24)))
    program, module = program_of(COUNT, text), module_of(COUNT)
    of = (lambda x, *_: gap(x)) if by == "softmax" else (lambda _, a, b, *__: likeness(a, b))
    sure, same = observed(program, layers(program), [1, 3], of)
    whole = oracle(module, text.numpy(), np.ones((COUNT, 24), bool)).argmax(-1)
    for index, layer in enumerate((1, 3)):
        ran = np.repeat((np.arange(COUNT) <= layer)[:, None], 24, 1)
        logits = torch.from_numpy(oracle(module, text.numpy(), ran))
        best = logits.softmax(-1).topk(2).values
        want = (best[..., 0] - best[..., 1]).numpy()
        if by == "state":
            ends = [APART * i + APART for i in range(3)]
            want = np.stack([cosines(module, text[:, :n].numpy())[:, layer] for n in ends], 1)
        else:
            want = want[:, APART - 1 :: APART]
        np.testing.assert_allclose(sure[index].view(3, 3), want, atol=1e-5)
        found = logits.argmax(-1).numpy() == whole
        assert np.array_equal(same[index].view(3, 3), found[:, APART - 1 :: APART])


def built(text, **options):
    program = capture(module_of(COUNT), max_context=64)
    program.calibration = Calibration(text, text, "given")
    run(program, [*pipeline(), Calm(first=1, every=1, **options)])
    return program


def test_a_build_measures_its_threshold_and_tells_what_holds():
    text = torch.from_numpy(np.random.default_rng(6).integers(3, 90, (40, 24)))
    program = built(text, agreement=0.2, probability=0.9)
    limit, other = program.facts.depth.threshold, program_of(COUNT, text)
    sure, same = observed(other, layers(other), range(COUNT - 1), lambda x, *_: gap(x))
    assert limit == least_threshold(sure, same, even(), 0.8, 1 - 0.9)
    assert (
        "at most 0.8 of tokens are others than the whole model's, with 0.9"
        in program.facts.notes[-1]
    )
    falls = built(text, agreement=0.2, probability=0.9, falls=4.0, over=64).facts.depth
    assert falls.threshold_at(0) == pytest.approx(limit / 0.9)
    assert falls.threshold_at(10_000) == pytest.approx(limit), "it ends where the bound holds"
    program = built(text[:2])
    assert program.facts.depth.threshold is None and "threshold" not in program.step.inputs
    assert program.facts.notes[-1].startswith("calm: no exits, for at no threshold")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by": "mean"}, "by 'mean' does not exist; did you mean 'meta'"),
        ({"agreement": 1.0}, "agreement is 1.0; give more than 0 and less than 1"),
        ({"probability": 0.0}, "probability is 0.0; give more than 0 and less than 1"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(RecipeError, match=words):
        Calm(**options)
