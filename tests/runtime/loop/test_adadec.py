"""adadec: the tokens of a version that reads every text anew, and its ends."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.runtime.loop import adadec

PROMPTS = [[3, 5, 7, 11], [2, 40, 9], [17, 18, 19, 20, 21, 22]]
NEW = 12


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    made = models.make("llama", 2).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(3)  # else no token is likelier than others
    return made


def build(module, **options):
    recipe = {"loop": {"use": "adadec", **options}}
    return accel.optimize(module, recipe, target="eager", max_context=64, max_batch=4)


def published(module, prompt, new, threshold, tries, ahead, eos=()):
    """Every text from its first token on; (tokens, pauses)."""

    @torch.no_grad()
    def logs(ids):
        return module(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)

    ids, pauses = list(prompt), 0
    while len(ids) < len(prompt) + new and not (len(ids) > len(prompt) and ids[-1] in eos):
        now = logs(ids)
        token = int(now.argmax())
        if float(-(now.exp() * now).sum()) >= threshold:
            pauses, scores = pauses + 1, []
            for first in now.topk(tries).indices.tolist():
                text, total = [*ids, first], [float(now[first])]
                room = len(prompt) + new - len(text)
                for _ in range(min(ahead, room)):
                    if text[-1] in eos:
                        break
                    then = logs(text)
                    text.append(int(then.argmax()))
                    total.append(float(then.max()))
                scores.append((np.mean(total), first))
            token = max(scores, key=lambda one: one[0])[1]
        ids.append(token)
    return ids[len(prompt) :], pauses


@pytest.mark.parametrize("options", [(2.0, 3, 4), (0.0, 2, 1), (1.5, 4, 7)], ids=str)
def test_tokens_are_those_of_texts_read_anew(module, options):
    names = dict(zip(("threshold", "tries", "ahead"), options, strict=True))
    with build(module, **names) as made:
        found = [made.generate(prompt, NEW, eos=[]).tokens[0] for prompt in PROMPTS]
        together = made.generate(PROMPTS, NEW, eos=[]).tokens
    wanted = [published(module, prompt, NEW, *options) for prompt in PROMPTS]
    assert found == together == [tokens for tokens, _ in wanted]
    assert sum(pauses for _, pauses in wanted) > 1


def test_other_tokens_than_greedy_ones_are_taken(module):
    with build(module, threshold=0.0) as made, build(module, threshold=1e9) as greedy:
        assert (
            made.generate(PROMPTS, NEW, eos=[]).tokens
            != greedy.generate(PROMPTS, NEW, eos=[]).tokens
        )


@pytest.mark.parametrize("ends", [{"threshold": 1e9}, {"tries": 1}, {"ahead": 0}], ids=str)
def test_its_ends_are_greedy_decoding(module, ends):
    with (
        build(module, **{"threshold": 0.0, **ends}) as made,
        accel.optimize(module, "base", target="eager", max_context=64, max_batch=4) as plain,
    ):
        assert (
            made.generate(PROMPTS, NEW, eos=[]).tokens
            == plain.generate(PROMPTS, NEW, eos=[]).tokens
        )


def test_an_answer_ends_at_eos_also_within_a_try(module):
    plain, _ = published(module, PROMPTS[0], NEW, 0.0, 3, 4)
    for eos in sorted(set(plain[2:]))[:4]:
        want, _ = published(module, PROMPTS[0], NEW, 0.0, 3, 4, {eos})
        with build(module, threshold=0.0, tries=3, ahead=4) as made:
            assert made.generate(PROMPTS[0], NEW, eos=[eos]).tokens[0] == want


def test_a_wrong_mean_is_caught(module, monkeypatch):
    """The control: the least log-probability in place of their mean picks other tokens somewhere."""
    monkeypatch.setattr(adadec._Try, "worth", property(lambda one: min(one.sums)))
    with build(module, threshold=0.0, tries=4, ahead=7) as made:
        found = [made.generate(prompt, NEW, eos=[]).tokens[0] for prompt in PROMPTS]
    assert found != [published(module, prompt, NEW, 0.0, 4, 7)[0] for prompt in PROMPTS]


def test_requests_that_sample_are_refused(module):
    with build(module) as made, pytest.raises(accel.InputError, match="leave temperature at 0"):
        made.generate(PROMPTS[0], 4, temperature=0.7)


@pytest.mark.parametrize(
    "wrong", [{"tries": 0}, {"ahead": -1}, {"threshold": float("nan")}], ids=str
)
def test_options_without_sense_are_refused(module, wrong):
    with pytest.raises(accel.RecipeError, match=next(iter(wrong))):
        build(module, **wrong)
