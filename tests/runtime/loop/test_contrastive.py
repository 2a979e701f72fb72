"""contrastive: the tokens of a version that reads every text anew, and its ends."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.runtime.decode.context import DecodeContext
from accel.runtime.loop import contrastive
from accel.runtime.sample.standard import Standard

from ...draft_case import rows_of

PROMPTS = [[3, 5, 7, 11], [2, 40, 9], [17, 18, 19, 20, 21, 22]]
NEW = 8


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    made = models.make("llama", 2).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(3)  # else no token is likelier than others
    return made


def build(module, target="eager", max_context=64, **options):
    recipe = {"loop": {"use": "contrastive", **options}}
    return accel.optimize(module, recipe, target=target, max_context=max_context, max_batch=4)


@torch.no_grad()
def published(module, prompt, new, k, alpha, first=0):
    """Every text from its first token on; tokens from `first` on are looked back at."""
    ids = list(prompt)
    while len(ids) < len(prompt) + new:
        out = module(torch.tensor([ids]), output_hidden_states=True)
        chances = out.logits[0, -1].double().softmax(-1).topk(k)
        before = out.hidden_states[-1][0, first:].double()
        scores = []
        for chance, token in zip(*chances, strict=True):
            tried = module(torch.tensor([[*ids, int(token)]]), output_hidden_states=True)
            state = tried.hidden_states[-1][0, -1].double()
            near = torch.cosine_similarity(before, state[None], dim=1).max()
            scores.append(float((1 - alpha) * chance - alpha * near))
        ids.append(int(chances.indices[int(np.argmax(scores))]))
    return ids[len(prompt) :]


@pytest.mark.few(1)
@pytest.mark.parametrize("target, options", [("eager", (4, 0.6)), ("onnx", (8, 0.3))], ids=str)
def test_tokens_are_those_of_texts_read_anew(module, options, target):
    with build(module, target, **dict(zip(("k", "alpha"), options, strict=True))) as made:
        alone = [made.generate(prompt, NEW, eos=[]).tokens[0] for prompt in PROMPTS]
        together = made.generate(PROMPTS, NEW, eos=[]).tokens
    wanted = [published(module, prompt, NEW, *options) for prompt in PROMPTS]
    assert alone == together == wanted
    assert wanted != [published(module, prompt, NEW, *options, first=-1) for prompt in PROMPTS]


@pytest.mark.few(1)
@pytest.mark.parametrize("ends", [{"alpha": 0.0}, {"k": 1}], ids=str)
def test_its_ends_are_greedy_decoding(module, ends):
    with (
        build(module, **ends) as made,
        accel.optimize(module, "base", target="eager", max_context=64, max_batch=4) as plain,
    ):
        assert (
            made.generate(PROMPTS, NEW, eos=[]).tokens
            == plain.generate(PROMPTS, NEW, eos=[]).tokens
        )


def decoded(made, session, prompts, new):
    """The tokens that the loop gives in a session."""
    rows = rows_of([np.array(p) for p in prompts], Standard(), 3, limit=new, max_context=64)
    for _ in made._loop.tokens(session, rows, DecodeContext({}, None, made)):
        pass
    return [row.tokens for row in rows]


def test_a_token_takes_one_call_and_what_is_held_is_read_anew(module):
    with build(module) as made, made.session(len(PROMPTS)) as session:
        first = decoded(made, session, PROMPTS, NEW)
        assert session.stats["calls"] <= 1 + NEW
        assert session.lengths.tolist() == [len(p) + NEW - 1 for p in PROMPTS]
        texts = [[*p, *tokens, 9] for p, tokens in zip(PROMPTS, first, strict=True)]
        again = decoded(made, session, texts, 4)
    assert again == [published(module, text, 4, 4, 0.6) for text in texts]


def test_candidates_that_have_no_room_come_in_several_calls(module):
    with build(module, max_context=16, k=6) as made:
        found = made.generate(PROMPTS[2], 10, eos=[])
    assert found.tokens[0] == published(module, PROMPTS[2], 10, 6, 0.6)


def test_states_that_are_not_of_length_one_are_caught(module, monkeypatch):
    """The control: products in place of cosines pick other tokens."""
    monkeypatch.setattr(contrastive, "_unit", lambda states: states)
    with build(module) as made:
        found = [made.generate(prompt, NEW, eos=[]).tokens[0] for prompt in PROMPTS]
    assert found != [published(module, prompt, NEW, 4, 0.6) for prompt in PROMPTS]


def test_what_it_cannot_do_is_refused(module):
    with build(module) as made, pytest.raises(accel.InputError, match="leave temperature at 0"):
        made.generate(PROMPTS[0], 4, temperature=0.7)
    with pytest.raises(accel.RecipeError, match="every token of a prompt runs"):
        accel.optimize(
            module, {"loop": {"use": "contrastive"}, "kv.reuse": {"use": "paged-prefix"}}
        )
    for wrong in ({"k": 0}, {"alpha": 1.5}, {"alpha": float("nan")}):
        with pytest.raises(accel.RecipeError, match=next(iter(wrong))):
            build(module, **wrong)
