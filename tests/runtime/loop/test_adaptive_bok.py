"""adaptive-bok: the samples of a version that reads every text anew, how they are spread, and its probe."""

from functools import cache
from itertools import product

import models
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import accel
from accel.compiler.train.runs import adaptive_bok as trainer
from accel.compiler.train.train import train
from accel.runtime.decode.prompts import prompted
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import adaptive_bok
from accel.runtime.loop.adaptive_bok import AdaptiveBok, allocated, gain

from ...draft_case import rows_of
from ...part_case import written

PROMPTS = [[3, 5, 7, 11], [2, 40, 9], [17, 18, 19, 20, 21, 22], [2, 40, 9]]
NEW = 8


# How samples are spread


def expected(chances, counts):
    return sum(1 - (1 - p) ** k for p, k in zip(chances, counts, strict=True))


def law_of_allocation(spread):
    rng = np.random.default_rng(0)
    for _ in range(12):
        chances = rng.random(4).round(2)
        least, most, budget = 1, 5, int(rng.integers(4, 20))
        counts = spread(chances, budget, least, most)
        assert sum(counts) == budget and min(counts) >= least and max(counts) <= most
        every = (c for c in product(range(least, most + 1), repeat=4) if sum(c) == budget)
        best = max(expected(chances, c) for c in every)
        assert expected(chances, counts) >= best - 1e-12, "another choice is better"


def test_samples_are_spread_as_no_other_choice_is_better():
    law_of_allocation(allocated)
    assert allocated([0.0, 1.0, 0.2], 9, 1, 9) == [1, 1, 7], "nothing is gained by more of some"
    even = allocated([0.3] * 4, 10, 1, 9)
    assert sum(even) == 10 and max(even) - min(even) <= 1
    assert allocated([0.5, 0.5], 9, 1, 3) == [3, 3], "no more than most"
    assert sum(gain(0.3, k) for k in range(5)) == pytest.approx(expected([0.3], [5]))


@pytest.mark.parametrize(
    "broken",
    [
        lambda chances, budget, *_: [budget // 4 + (n < budget % 4) for n in range(4)],
        lambda chances, budget, least, most: allocated(1 - np.array(chances), budget, least, most),
        lambda chances, budget, least, most: allocated(chances, budget - 1, least, most),
    ],
    ids=["even", "wrong way", "less"],
)
def test_the_law_catches_others(broken):
    with pytest.raises(AssertionError):
        law_of_allocation(broken)


# The search


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.write(tmp_path_factory.mktemp("bok") / "tiny")


def build(folder, target="eager", **options):
    recipe = {"loop": {"use": "adaptive-bok", **options}}
    return accel.optimize(folder, recipe, target=target, max_context=64, max_batch=8)


@pytest.fixture(scope="module")
def probed(folder, tmp_path_factory):
    """The file of a probe that finds some prompts likely and others not; and its tensors."""
    rng = np.random.default_rng(5)
    with build(folder) as made:
        width = made.program.facts.config["hidden_size"]
        sizes = AdaptiveBok.sizes(width, 6)
        probe = {name: rng.normal(0, 0.6, size).astype(np.float32) for name, size in sizes.items()}
        probe["bins"] = np.array([0.02, 0.3, 0.6, 0.97], np.float32)
        file = written(made, "adaptive-bok", probe, tmp_path_factory.mktemp("probe") / "part")
    return file, probe


@cache
def module_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def published(folder, probe, prompt, seed, scorer, temperature=1.0):
    """Every text from its first token on: (tokens, samples)."""
    module = module_of(folder)
    state = module(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
    hidden = np.maximum(0, state.numpy() @ probe["first"] + probe["first.bias"])
    chance = 1 / (1 + np.exp(-float((hidden @ probe["last"] + probe["last.bias"])[0])))
    best = max(
        (c for c in product(range(1, 9), repeat=4) if sum(c) == 12),
        key=lambda c: expected(probe["bins"], c),
    )
    count = best[int(np.abs(probe["bins"] - chance).argmin())]
    root, texts = np.random.default_rng(seed), []
    for rng in [root, *root.spawn(count - 1)]:
        ids = list(prompt)
        for _ in range(NEW):
            p = (module(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1)
            ids.append(int((rng.random() < np.cumsum(p.numpy())).argmax()))
        texts.append(ids[len(prompt) :])
    read = Tokenizer(folder / "tokenizer.json").decode
    return texts[int(np.argmax([scorer(read(t)) for t in texts]))], count


def least_of(text):
    """A score that no probability knows."""
    return -sum(map(ord, text)) % 97


def scorer(prompt, texts):
    return [least_of(text) for text in texts]


def test_answers_are_those_of_texts_read_anew(folder, probed):
    file, probe = probed
    options = {"temperature": 1.0, "seed": 3, "eos": [], "scorer": scorer}
    with build(folder, trained=file, mean=3.0, most=8) as made:
        alone = [made.generate(prompt, NEW, **options).tokens[0] for prompt in PROMPTS]
        together = made.generate(PROMPTS, NEW, **options).tokens
        counts = [made._loop._worth(states) for states in states_of(folder, PROMPTS)]
    assert together[0] == alone[0], "a prompt's own samples"
    (want, first), *others = [published(folder, probe, p, 3, least_of) for p in PROMPTS]
    assert alone == [want, *(tokens for tokens, _ in others)]
    assert counts == [first, *(count for _, count in others)] and len(set(counts)) > 1


@torch.no_grad()
def states_of(folder, prompts):
    module = module_of(folder)
    said = (module(torch.tensor([p]), output_hidden_states=True) for p in prompts)
    return [out.hidden_states[-1][0, -1].numpy() for out in said]


def test_hidden_states_are_those_of_last_tokens_also_of_equal_prompts(folder):
    """Of prompts of several lengths in one call, one of which comes twice as one array."""
    with build(folder) as made, made.session(4) as session:
        rows = rows_of(PROMPTS)
        rows[3].prompt = rows[1].prompt
        prompts = adaptive_bok.Prompts(rows)
        session.listen(prompts)
        prompted(session, rows)
        np.testing.assert_allclose(prompts.states, states_of(folder, PROMPTS), atol=1e-4)


@pytest.mark.long
def test_without_a_probe_each_prompt_gets_the_mean(folder, monkeypatch):
    counted, own = [], adaptive_bok.Way.ways
    monkeypatch.setattr(
        adaptive_bok.Way, "ways", lambda way, count: counted.append(count) or own(way, count)
    )
    with build(folder, mean=2.6) as made:
        made.generate(PROMPTS[:2], 3, temperature=1.0, eos=[])
        assert counted == [3, 3]
        greedy = made.generate(PROMPTS[0], NEW, eos=[]).tokens
    with accel.optimize(folder, "base", target="eager", max_context=64) as plain:
        assert greedy == plain.generate(PROMPTS[0], NEW, eos=[]).tokens


def test_options_that_cannot_be():
    with pytest.raises(accel.RecipeError, match="mean is 3, which is not between least = 4"):
        AdaptiveBok(mean=3.0, least=4)
    for wrong in ({"least": 0}, {"most": 1000}, {"mean": float("nan")}):
        with pytest.raises(accel.RecipeError, match=next(iter(wrong))):
            AdaptiveBok(**wrong)


def test_a_scorer_that_raises_leaves_the_model_usable(folder, probed):
    def wrong(prompt, texts):
        raise ValueError("no")

    with build(folder, trained=probed[0]) as made:
        with pytest.raises(accel.InputError, match="wrong.*raised ValueError"):
            made.generate(PROMPTS[0], 2, temperature=1.0, scorer=wrong)
        assert len(made.generate(PROMPTS[0], 2, temperature=1.0, eos=[]).tokens[0]) == 2


# The probe


def test_a_probe_learns_the_share_of_right_samples():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (300, 8)).astype(np.float32)
    share = torch.from_numpy(1 / (1 + np.exp(3 - x[:, 2])))
    held = torch.arange(300) % 4 == 0
    options = trainer.TrainOptions(inner=8, rate=1e-2)
    probe = trainer.taught(AdaptiveBok(), torch.from_numpy(x), share, held, options)
    found = AdaptiveBok.odds({n: t.numpy() for n, t in probe.items()}, x[held.numpy()])
    told = 1 / (1 + np.exp(-found))
    assert np.abs(told - share[held].numpy()).mean() < 0.05
    assert np.abs(told[::-1] - share[held].numpy()).mean() > 0.1, "a control"


def test_a_probe_of_what_tells_nothing_is_the_constant():
    """Of more numbers than examples it would else learn these by heart."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((60, 90)).astype(np.float32))
    share = torch.from_numpy((rng.random(60) < 0.2).astype(np.float32))
    held = torch.arange(60) % 4 == 0
    options = trainer.TrainOptions(inner=8, rate=1e-2)
    probe = trainer.taught(AdaptiveBok(), x, share, held, options)
    chances = AdaptiveBok.odds(probe, x[held]).sigmoid()

    def loss(told):
        return float(torch.nn.functional.binary_cross_entropy(told, share[held]))

    assert loss(chances) <= loss(share[~held].mean().expand_as(chances)) + 1e-6


@pytest.mark.long
def test_a_probe_is_made_by_the_command(folder, tmp_path):
    text, out = tmp_path / "text", tmp_path / "part.safetensors"
    text.write_text("def f(x):\n    return x + 1\n" * 60)
    options = {"text": text, "out": out, "length": 24, "samples": 8, "inner": 4, "rate": 1e-2}
    made = train("adaptive-bok", folder, options)
    assert made.file == out and "constant" in made.message
    with build(folder, trained=str(out)) as model:
        assert len(model.generate(PROMPTS[0], 3, temperature=1.0, eos=[]).tokens[0]) == 3
