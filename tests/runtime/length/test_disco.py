"""disco: what its head reads, what is logged of rounds and learnt, and when drafts end."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference_data import REFERENCE
from torch.nn import functional as F

import accel
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import rounds as trainer
from accel.compiler.train.runs.head import untaught
from accel.ir.errors import InputError, RecipeError
from accel.reference.kinds import prompts
from accel.runtime.length._head import chance
from accel.runtime.length.disco import Disco
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree import Level

from ...length_case import one
from ...open_case import Tables
from .test_specdec_pp import Model

SIZE = 30


def says(held, seed=3):
    return np.random.default_rng([seed, *held[-2:]]).standard_normal(SIZE).astype(np.float32) * 3


def test_it_reads_odds_and_the_place():
    reader, rng = Disco().reader(), np.random.default_rng(0)
    for place in (1, 2, 3):
        logits = rng.standard_normal(SIZE).astype(np.float32) * 3
        x, p = reader.read(one(4, place - 1), [logits]), torch.from_numpy(logits).softmax(-1)
        np.testing.assert_allclose(x[:10], p.sort(descending=True).values[:10].log(), atol=1e-5)
        assert x[10] == pytest.approx(float(-(p * p.log()).sum()), abs=1e-4)
        assert x[11] == pytest.approx(place / 20) and x.shape == (Disco.width(),)
    lines = rng.standard_normal((2, SIZE)).astype(np.float32)
    lines[1, 7] = 9
    both, alone = Disco().reader(), Disco().reader()
    of = both.read(Level(np.array([3, 7]), np.array([0, 0])), lines)
    np.testing.assert_array_equal(of, alone.read(one(7), lines[1:]), "of a level the likeliest")


def lengths(threshold, most=9):
    """Of twelve drafts, each the same path of tokens whatever the threshold."""
    pace, found = Disco(threshold, most).begin(unmeasured_cost), []
    for draft in range(12):
        rng, drafted, more = np.random.default_rng(draft), 0, True
        while more and drafted < pace.limit():
            more = pace.more(one(0, drafted), [rng.standard_normal(30) * rng.uniform(0, 9)])
            drafted += 1
        pace.observe(drafted, 0)
        found.append(drafted)
    return found


def test_a_draft_ends_where_a_token_will_likely_fall():
    assert lengths(0) == [9] * 12 and lengths(1.01) == [1] * 12
    by_threshold = [lengths(t) for t in (0, 0.3, 0.6, 0.9, 1.01)]
    for more, less in zip(by_threshold, by_threshold[1:], strict=False):
        assert all(a >= b for a, b in zip(more, less, strict=True))
    assert len({tuple(found) for found in by_threshold}) > 3 and len(set(lengths(0.6))) > 1


def logged(wrong):
    """Rounds of a draft model that says what the target says, but after every `wrong`-th token."""

    def misled(held):
        return says(held, 4 if held[-1] % wrong == 0 else 3)

    class Model:
        facts, tokenizer = SimpleNamespace(max_context=200, max_batch=8), None
        draft_model = SimpleNamespace(
            session=lambda batch=1: Tables(misled, misled, SIZE), tokenizer=None, facts=facts
        )
        session = staticmethod(lambda batch=1: Tables(says, says, SIZE))

    return trainer.recorded(Model(), Disco(most=6), [np.array([5, n]) for n in (1, 2)])


def test_rounds_are_logged_with_what_stood(monkeypatch):
    """Of each draft its tokens, those first that stood; all went on to the end."""
    monkeypatch.setattr(Tables, "max_context", 200)
    monkeypatch.setattr(trainer, "NEW", 25)
    good, bad = logged(10**9), logged(3)
    x, right = trainer.examples(good.outcomes[:1])
    assert right.all() and len(right) > 15 and float(x[:, 11].max()) == pytest.approx(6 / 20)
    x, right = trainer.examples(bad.outcomes[:1])
    starts = np.flatnonzero(np.isclose(x[:, 11], 1 / 20))
    for first, end in zip(starts, [*starts[1:], len(right)], strict=True):
        draft = right[first:end]
        assert (draft.diff() <= 0).all() and len(draft) <= 6
    assert 0 < right.mean() < 1


def test_texts_that_are_greedy_and_that_sample_judge_the_head(monkeypatch):
    """Of 32 texts, of which the head reads the number, two pairs are apart. Too few to part are refused."""
    judges = list[float]()

    def rounds(count):
        each = [[(np.full(Disco.width(), n, np.float32), True)] for n in range(count)]
        return lambda model, method, prompts: trainer.Rounds(method, each)

    def judged(method, part, x, right):
        judges.extend(x[:, 0].tolist())
        return {}

    def told(method, read, part, names, figures, options):
        return figures

    whole = SimpleNamespace(session=None, facts=SimpleNamespace(max_context=200))
    whole.draft_model = SimpleNamespace(session=None)
    monkeypatch.setattr(trainer, "optimize", lambda *_, **__: nullcontext(whole))
    monkeypatch.setattr(trainer, "sample", lambda session: None)
    monkeypatch.setattr(trainer, "taught", lambda *_: None)
    monkeypatch.setattr(trainer, "judged", judged)
    monkeypatch.setattr(trainer, "save_part", told)

    def make(count):
        monkeypatch.setattr(trainer, "recorded", rounds(count))
        source = SimpleNamespace(path="", progress=None)
        return trainer.Logged.make(Disco(), source, TrainOptions(draft=Path("draft")))

    assert make(32) == {"examples": 28.0} and judges == [0, 1, 16, 17]
    with pytest.raises(InputError, match="2 texts are read.*give samples=… of 3 or more"):
        make(2)


def test_every_second_text_samples(monkeypatch):
    sampled = list[bool]()

    class Sampler(Standard):
        def __init__(self, temperature=0.0):
            sampled.append(temperature > 0)
            super().__init__(temperature=temperature)

    monkeypatch.setattr(trainer, "Standard", Sampler)
    monkeypatch.setattr(trainer, "NEW", 2)
    monkeypatch.setattr(Tables, "max_context", 200)
    logged(3)
    assert sampled == [False, True]


def test_the_head_learns_what_tells_and_nothing_from_noise(monkeypatch):
    monkeypatch.setattr(trainer, "learn", partial(trainer.learn, steps=150))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, Disco.width(), generator=generator)
    for right, learns in (
        (x[:, 0] > 0.4, True),
        (torch.rand(600, generator=generator) > 0.4, False),
    ):
        part = untaught(Disco, 16, generator)
        trainer.taught(Disco, part, x[:400], right[:400].float(), 0.01)
        told = trainer.judged(Disco, part, x[400:], right[400:].float())
        assert (told["loss"] < told["constant"] - 0.2) == learns


@pytest.mark.long
def test_the_head_that_comes_along_tells_what_stands(monkeypatch):
    """On rounds of held-out prompts: better than the best constant; what it reads of another token tells nothing."""
    monkeypatch.setattr(trainer, "NEW", 32)
    with accel.optimize(str(REFERENCE), "disco", verify=False) as model:
        texts = [text for kind in ("code", "free", "copy") for text in prompts(kind, 2)]
        ids = [np.array(model.tokenizer.encode(text), np.int64)[-200:] for text in texts]
        found = trainer.recorded(model, Disco(), ids)
        Disco().fit(model)
    x, right = trainer.examples(found.outcomes)
    odds = torch.from_numpy(Disco.odds(Disco().part, x.numpy()))
    lost = F.binary_cross_entropy_with_logits
    constant = lost(right.mean().logit().expand_as(right), right)
    assert lost(odds, right) < constant
    assert lost(odds[torch.randperm(len(odds))], right) > constant
    assert chance(odds.numpy()).std() > 0.1


def test_what_cannot_be_is_refused():
    for options, words in (({"threshold": -0.1}, "threshold is -0.1; give at least 0"),
                           ({"most": 0}, "most is 0; give 1 to 256")):  # fmt: skip
        with pytest.raises(RecipeError, match=f"length.disco: {words}"):
            Disco(**options)
    with pytest.raises(InputError, match="length.disco: the bundled file was trained for another model; train it: "
                                         "accel-compile train disco"):  # fmt: skip
        Disco().fit(Model(0, Model(1)))
    with pytest.raises(InputError, match="disco: nowhere does not exist"):
        Disco(trained="nowhere").begin(unmeasured_cost)
