"""atts: the tokens of a version that reads every text anew, its ends, and how often the model takes over."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import models
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.compiler.train.train import train
from accel.runtime.loop import atts
from accel.runtime.loop.atts import Atts, perplexity

from ...part_case import written

PROMPTS = [[3, 5, 7, 11], [2, 40, 9], [17, 18, 19, 20, 21, 22]]
NEW, TURN = 14, 3


def part():
    return {"perplexities": np.linspace(1, 200, 20)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folders of a model and of one that drafts for it, and a part of the two."""
    folders = [models.write(tmp_path_factory.mktemp("atts") / name) for name in ("large", "small")]
    for seed, folder in enumerate(folders):
        module = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            module.lm_head.weight.copy_(
                torch.randn(
                    module.lm_head.weight.shape, generator=torch.Generator().manual_seed(seed)
                )
            )  # else no token is likelier than others
        module.save_pretrained(folder)
    tables = {"draft": {"use": "model", "path": str(folders[1])}}
    with accel.optimize(folders[0], tables, target="eager", max_context=64) as made:
        known = np.exp(np.linspace(4, 22, 37)).astype(np.float32)
        file = written(made, "atts", {"perplexities": known}, folders[0].parent / "part")
    return *folders, file, known


def build(pair, **options):
    draft = {"use": "model", "path": str(pair[1]), "weights": ""}  # as they are
    recipe = {"loop": {"use": "atts", "trained": pair[2], "turn": TURN, **options}, "draft": draft}
    return accel.optimize(pair[0], recipe, target="eager", max_context=64, max_batch=4)


@pytest.fixture(scope="module")
def model(pair):
    with build(pair) as made:
        yield made


@contextmanager
def going_by(model, threshold):
    """The model with another threshold."""
    own = model._loop
    model._loop = replace(own, threshold=threshold)
    yield model
    model._loop = own


@cache
def module_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def published(pair, prompt, threshold):
    """Every text from its first token on: (tokens, turns read, turns that the model took over behind)."""
    large, small = map(module_of, pair[:2])
    ids, end, turns, over = list(prompt), len(prompt) + NEW, 0, 0

    def write(module):
        for _ in range(min(TURN, end - len(ids))):
            ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))

    while len(ids) < end:
        start = len(ids)
        write(small)
        if len(ids) == end:
            break
        logs = large(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        own = [float(logs[n - 1, ids[n]]) for n in range(start, len(ids))]
        turns += 1
        if np.mean(pair[3] < np.exp(-np.mean(own))) >= threshold:
            over += 1
            write(large)
    return ids[len(prompt) :], turns, over


def test_tokens_are_those_of_texts_read_anew(pair, model):
    wanted = [published(pair, prompt, 0.6) for prompt in PROMPTS]
    with going_by(model, 0.6) as made:
        alone = [made.generate(prompt, NEW, eos=[]).tokens[0] for prompt in PROMPTS]
        assert made.generate(PROMPTS, NEW, eos=[]).tokens == alone
        streamed = list(made.stream(PROMPTS[0], NEW, eos=[]))
    assert alone == [tokens for tokens, *_ in wanted] and streamed == alone[0]
    turns, over = (sum(one[n] for one in wanted) for n in (1, 2))
    assert 0 < over < turns, "both ways are gone"


@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_at_its_ends_the_model_takes_over_always_and_never(pair, model, threshold):
    wanted = [published(pair, prompt, threshold) for prompt in PROMPTS]
    assert all(over == (0 if threshold else turns) for _, turns, over in wanted)
    with going_by(model, threshold) as made:
        out = made.generate(PROMPTS, NEW, eos=[])
    assert out.tokens == [tokens for tokens, *_ in wanted]
    if threshold:
        plain = [model.draft_model.generate(p, NEW, eos=[]).tokens[0] for p in PROMPTS]
        assert out.tokens == plain


def test_a_wrong_perplexity_is_caught(pair, model, monkeypatch):
    """The control: that of the turn's last token alone."""
    own = atts.perplexity
    monkeypatch.setattr(
        atts, "perplexity", lambda logits, tokens: own(logits[len(tokens) - 1 :], tokens[-1:])
    )
    with going_by(model, 0.6) as made:
        found = [made.generate(prompt, NEW, eos=[]).tokens[0] for prompt in PROMPTS]
    assert found != [published(pair, prompt, 0.6)[0] for prompt in PROMPTS]


def law_of_rates(refuses, draw):
    """Of turns that are like the calibrated ones a share of 1 - threshold is refused, up to what both samples vary."""
    rng = np.random.default_rng(0)
    for threshold in (0.2, 0.6, 0.9):
        known, new = np.exp(rng.normal(2, 1, 800)), draw(rng, 800)
        found = np.mean([refuses(known, one, threshold) for one in new])
        spread = np.sqrt(2 * threshold * (1 - threshold) / 800)
        assert abs(found - (1 - threshold)) < 4 * spread, "another rate"


def refused(known, one, threshold):
    class Known(Atts):
        part = {"perplexities": known}

    return Known(threshold=threshold).refuses(one)


def test_the_share_that_is_taken_over_is_the_calibrated_one():
    law_of_rates(refused, lambda rng, n: np.exp(rng.normal(2, 1, n)))
    with pytest.raises(AssertionError, match="another rate"):  # turns of another kind
        law_of_rates(refused, lambda rng, n: np.exp(rng.normal(2.5, 1, n)))
    with pytest.raises(AssertionError, match="another rate"):  # a rule the wrong way
        law_of_rates(
            lambda k, x, t: not refused(k, x, t), lambda rng, n: np.exp(rng.normal(2, 1, n))
        )


def test_perplexity_is_that_of_torch():
    logits = np.random.default_rng(0).normal(0, 3, (5, 20)).astype(np.float32)
    tokens = np.array([3, 1, 4, 1])
    want = torch.nn.functional.cross_entropy(torch.tensor(logits[:4]), torch.tensor(tokens)).exp()
    assert perplexity(logits, tokens) == pytest.approx(float(want), rel=1e-5)


def test_an_answer_ends_at_eos_in_either_model(pair, model):
    tokens, *_ = published(pair, PROMPTS[0], 0.0)
    with going_by(model, 0.0) as made:
        for place in (1, TURN + 1):
            out = made.generate(PROMPTS[0], NEW, eos=[tokens[place]])
            assert out.tokens[0] == tokens[: tokens.index(tokens[place]) + 1]


@pytest.mark.long
def test_other_models_and_options_are_refused(pair, model):
    turned = (pair[1], pair[0], *pair[2:])
    with (
        build(turned) as made,
        pytest.raises(accel.InputError, match="another model.*--draft DRAFT"),
    ):
        made.generate(PROMPTS[0], 2)
    with pytest.raises(accel.InputError, match="atts: .*trained for.*--draft DRAFT"):
        build((*pair[:2], ""))
    for wrong in ({"turn": 0}, {"threshold": -0.1}, {"threshold": float("nan")}):
        with pytest.raises(accel.RecipeError, match=next(iter(wrong))):
            Atts(**wrong)
    with pytest.raises(accel.InputError, match="logprobs"):
        model.generate(PROMPTS[0], 2, logprobs=1)


@pytest.mark.long
def test_a_calibration_is_made_by_the_command(pair, tmp_path):
    text, out = tmp_path / "text", tmp_path / "part.safetensors"
    text.write_text("def f(x):\n    return x + 1\n" * 60)
    options = {"text": text, "out": out, "length": 24, "samples": 5, "draft": pair[1]}
    made = train("atts", pair[0], options)
    assert made.file == out and "turns 5" in made.message
    with build((*pair[:2], str(out))) as model:
        assert len(model.generate(PROMPTS[0], 3, eos=[]).tokens[0]) == 3
