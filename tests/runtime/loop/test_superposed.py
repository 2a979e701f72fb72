"""superposed: the drafts of a version that reads every mixture anew, and its ends."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.runtime.loop import superposed
from accel.runtime.speculation.datastore import Datastore
from accel.runtime.speculation.texts import GAP

PROMPTS = [[3, 5, 7, 11], [2, 40, 9], [17, 18, 19, 20, 21, 22]]
NEW = 8
TEXT = np.random.default_rng(5).integers(3, 101, 4000)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    made = models.make("llama", 2).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(0.3)  # the temperature makes up for it
    return made


def build(module, target="eager", **options):
    recipe = {"loop": {"use": "superposed", **options}}
    return accel.optimize(module, recipe, target=target, max_context=64, max_batch=4)


def followed(text, tail, tokens):
    """Shares of tokens behind the last ones of a text, by looking everywhere."""
    found = np.zeros(len(tokens))
    for size, weight in enumerate(superposed.ORDERS, start=1):
        at = [i for i in range(len(text) - size) if list(text[i : i + size]) == list(tail[-size:])]
        after = [text[i + size] for i in at if len(tail) >= size and text[i + size] != GAP]
        if after:
            found += [weight * after.count(t) / len(after) for t in tokens]
    return found


@torch.no_grad()
def published(module, prompt, new, k, most=9, temperature=0.06, alpha=0.54, text=None, eos=()):
    """The k best drafts; the mixtures are read anew from the first one on."""
    embed = module.get_input_embeddings()
    stream = embed(torch.tensor([prompt]))
    drafts, totals, ended = [[]], np.zeros(1), []
    for _ in range(new):
        line = module(inputs_embeds=stream).logits[0, -1].double() / temperature
        logs, tokens = line.topk(max(most, 2 * k))
        logs, tokens = logs.log_softmax(-1).numpy(), tokens.tolist()
        choices = []
        for n, draft in enumerate(drafts):
            score = logs
            if text is not None:
                shares = followed(text, [*prompt, *draft], tokens)
                if shares.any():
                    with np.errstate(divide="ignore"):
                        score = (1 - alpha) * logs + alpha * np.log(shares)
                else:
                    score = (1 - alpha) * logs - 200
            choices += [(totals[n] + s, [*draft, t]) for s, t in zip(score, tokens, strict=True)]
        choices = sorted((c for c in choices if np.isfinite(c[0])), key=lambda c: -c[0])[: 2 * k]
        ended += [c for c in choices if c[1][-1] in eos]
        choices = [c for c in choices if c[1][-1] not in eos][:k]
        totals, drafts = np.array([c[0] for c in choices]), [c[1] for c in choices]
        weights = np.exp(totals - totals.max())
        last = torch.tensor([d[-1] for d in drafts])
        mixed = (torch.tensor(weights / weights.sum())[:, None] * embed(last).double()).sum(0)
        stream = torch.cat([stream, mixed.float()[None, None]], 1)
    ended += zip(totals, drafts, strict=True)
    return [draft for _, draft in sorted(ended, key=lambda c: -c[0])[:k]]


@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_drafts_are_those_of_mixtures_read_anew(module, target):
    with build(module, target) as made:
        alone = [made.generate(prompt, NEW, n=3, eos=[]).tokens for prompt in PROMPTS]
        together = made.generate(PROMPTS, NEW, n=3, eos=[]).tokens
        first = made.generate(PROMPTS, NEW, eos=[]).tokens
    wanted = [published(module, prompt, NEW, 3) for prompt in PROMPTS]
    assert alone == wanted and together == [draft for drafts in wanted for draft in drafts]
    assert first == [drafts[0] for drafts in wanted]
    assert all(len({tuple(d) for d in drafts}) == 3 for drafts in wanted)


def test_what_followed_in_a_datastore_tells_drafts_apart(module, tmp_path):
    Datastore.of(np.concatenate([[GAP], TEXT])).save(tmp_path / "texts", 101, "")
    with build(module, datastore=str(tmp_path / "texts")) as made:
        found = [made.generate(prompt, NEW, n=3, eos=[]).tokens for prompt in PROMPTS]
    text = [GAP, *TEXT.tolist()]
    assert found == [published(module, prompt, NEW, 3, text=text) for prompt in PROMPTS]
    assert found != [published(module, prompt, NEW, 3) for prompt in PROMPTS]


def test_one_draft_is_greedy_decoding(module):
    with (
        build(module, drafts=1) as made,
        accel.optimize(module, "base", target="eager", max_context=64, max_batch=4) as plain,
    ):
        assert (
            made.generate(PROMPTS, NEW, eos=[]).tokens
            == plain.generate(PROMPTS, NEW, eos=[]).tokens
        )


def test_drafts_that_end_are_set_aside(module):
    eos = published(module, PROMPTS[0], NEW, 3)[0][3]
    with build(module) as made:
        found = made.generate(PROMPTS[0], NEW, n=3, eos=[eos]).tokens
    assert found == published(module, PROMPTS[0], NEW, 3, eos=(eos,))
    assert any(draft[-1] == eos for draft in found)


def test_a_prompt_whose_drafts_are_over_leaves_others_as_they_are(module):
    eos = [draft[0] for draft in published(module, PROMPTS[0], 1, 3)]
    with build(module) as made:
        alone = [made.generate(prompt, NEW, eos=eos).tokens[0] for prompt in PROMPTS]
        assert made.generate(PROMPTS, NEW, eos=eos).tokens == alone
    assert [len(tokens) for tokens in alone] == [1, 2, NEW]


def test_equal_weights_are_caught(module, monkeypatch):
    """The control: drafts that weigh the same in a mixture give other texts."""
    even = property(lambda group: np.full(len(group.alive), 1 / len(group.alive)))
    monkeypatch.setattr(superposed._Drafts, "weights", even)
    with build(module) as made:
        found = [made.generate(prompt, NEW, n=3, eos=[]).tokens for prompt in PROMPTS]
    assert found != [published(module, prompt, NEW, 3) for prompt in PROMPTS]


def test_a_token_takes_one_row_of_a_call_whatever_the_drafts(module):
    with build(module, drafts=6) as made:
        stats = made.generate(PROMPTS[0], NEW, eos=[]).stats
    assert stats["calls"] == NEW


def test_what_it_cannot_do_is_refused(module, tmp_path):
    with build(module) as made, pytest.raises(accel.InputError, match="leave temperature at 0"):
        made.generate(PROMPTS[0], 4, temperature=0.7)
    with pytest.raises(accel.RecipeError, match=r"loop.superposed: datastore.*no-such"):
        build(module, datastore=str(tmp_path / "no-such"))
    for wrong in ({"drafts": 0}, {"alpha": 1.0}, {"temperature": 0.0}):
        with pytest.raises(accel.RecipeError, match=next(iter(wrong))):
            build(module, **wrong)
