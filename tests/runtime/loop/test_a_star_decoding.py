"""A*-Decoding: the tokens of a version that reads every text anew, its order of nodes, limits and bad scorers."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from accel.ir.errors import InputError, RecipeError
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import a_star_decoding
from accel.runtime.loop.a_star_decoding import AStarDecoding
from accel.runtime.sample.standard import Standard

from ...draft_case import plain, rows_of
from ...search_case import PROMPTS, WARM, Text, letters, searched, told

NEW, EOS = 14, [12, 34, 70, 101, 200, 250]
LOOP = dict(width=3, step_tokens=3)


def published(toy, prompt, scorer, seed, width, step_tokens, budget=8192, cost="regress"):
    """Best first over a plain list; (tokens, the nodes taken)."""
    decode = Tokenizer(toy.path / "tokenizer.json").decode
    text = Text(toy, prompt, np.random.default_rng(seed), NEW, EOS)
    node = {"text": text, "g": 0.0, "h": 1.0, "depth": 0}
    held, order, taken, spent = [], 0, [], 0
    while not node["text"].ended and spent < budget:
        before = len(node["text"].tokens)
        children = node["text"].copies(width)
        for child in children:
            child.write(step_tokens, "\n", decode)
        spent += sum(len(child.tokens) - before for child in children)
        unique = []
        for child in children:
            if child.tokens not in [one.tokens for one in unique]:
                unique.append(child)
        if scorer is None:
            scores = [float(np.exp(np.mean(child.logs[before:]))) for child in unique]
        else:
            scores = scorer("", [child.decoded(decode) for child in unique])
        for child, score in zip(unique, scores, strict=True):
            lost = (1 - score) - node["h"]
            g = node["g"] + max(0, lost if cost == "regress" else -lost)
            order += 1
            held.append(
                {"text": child, "g": g, "h": 1 - score, "depth": node["depth"] + 1, "order": order}
            )
        node = min(held, key=lambda n: (n["g"] + n["h"], -n["depth"], n["order"]))
        held.remove(node)
        taken.append(node)
    if not node["text"].ended:
        ended = [n for n in held if n["text"].ended]
        if ended:
            node = min(ended, key=lambda n: (n["g"] + n["h"], -n["depth"], n["order"]))
        node["text"].write()
    return node["text"].tokens, taken


CASES = [
    (letters, LOOP),
    (None, LOOP),
    (letters, {**LOOP, "cost": "consistent"}),
    (letters, {"width": 4, "step_tokens": 2, "budget": 30}),
]


@pytest.mark.parametrize(
    "scorer, options", CASES, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_tokens_are_those_of_texts_read_anew(toy, scorer, options):
    back = 0
    for seed in range(2):
        wanted = [published(toy, prompt, scorer, seed, **options) for prompt in PROMPTS]
        rows, _ = searched(
            toy, AStarDecoding(**options), PROMPTS, scorer, seed=seed, limit=NEW, eos=EOS
        )
        assert [row.tokens for row in rows] == [tokens for tokens, _ in wanted]
        for _, taken in wanted:
            steps = [node["text"].tokens for node in taken]
            back += sum(b[: len(a)] != a for a, b in zip(steps, steps[1:], strict=False))
    assert back or options.get("budget"), "no search went back to another text"


def agree(toy, options, published_options):
    """Whether all tokens are those of the version with other options."""
    for seed in range(6):
        rows, _ = searched(
            toy, AStarDecoding(**options), PROMPTS, letters, seed=seed, limit=NEW, eos=EOS
        )
        wanted = [published(toy, p, letters, seed, **published_options)[0] for p in PROMPTS]
        if [row.tokens for row in rows] != wanted:
            return False
    return True


def test_other_costs_and_another_order_are_caught(toy, monkeypatch):
    """The controls: costs of the other kind, and the newest node in place of the best."""
    assert not agree(toy, LOOP, {**LOOP, "cost": "consistent"})
    newest = SimpleNamespace(heappush=list.append, heappop=list.pop)
    monkeypatch.setattr(a_star_decoding, "heapq", newest)
    assert not agree(toy, LOOP, LOOP)


@pytest.mark.parametrize("cost", ["regress", "consistent"])
def test_costs_add_up_and_consistent_ones_never_fall(toy, monkeypatch, cost):
    made, scored = [], a_star_decoding._Nodes._scored

    def spied(self, parent, ways, start):
        found = scored(self, parent, ways, start)
        made.extend((parent, child) for child in found)
        return found

    monkeypatch.setattr(a_star_decoding._Nodes, "_scored", spied)
    searched(
        toy,
        AStarDecoding(**LOOP, cost=cost),
        PROMPTS,
        letters,
        Standard(temperature=2.0),
        limit=NEW,
    )
    assert all(child.g >= parent.g for parent, child in made)
    falls = sum(c.g + c.h < p.g + p.h - 1e-12 for p, c in made)
    assert falls > 0 if cost == "regress" else falls == 0


def test_its_ends_are_plain_decoding(toy):
    for loop, sampler in (
        (AStarDecoding(width=1, step_tokens=2), WARM),
        (AStarDecoding(width=3, step_tokens=2), Standard()),
    ):
        want = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, 4, limit=NEW, eos=EOS))
        rows, _ = searched(toy, loop, PROMPTS, sampler=sampler, seed=4, limit=NEW, eos=EOS)
        assert [row.tokens for row in rows] == want


def test_a_scorer_sees_the_prompt_and_all_steps_at_once(toy):
    asked = []

    def scorer(prompt, texts):
        asked.append((prompt, texts))
        return [0.5] * len(texts)

    hot = Standard(temperature=2.0)
    searched(toy, AStarDecoding(**LOOP), PROMPTS[:1], scorer, hot, limit=9)
    decode = Tokenizer(toy.path / "tokenizer.json").decode
    assert {prompt for prompt, _ in asked} == {decode(PROMPTS[0])}
    assert max(len(texts) for _, texts in asked) == 3
    assert len(asked) == 3, "constant scores: depth first, a step of 3 tokens a time"


@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        ("high", "scorer = 'high': give a function"),
        (lambda prompt, texts: 1 / 0, r"scorer \(<lambda>\) raised ZeroDivisionError"),
        (lambda prompt, texts: [0.5], r"returned .* for \d texts"),
        (lambda prompt, texts: [float("nan")] * len(texts), "return finite numbers"),
        (lambda prompt, texts: ["high"] * len(texts), "return a number for each text"),
        (lambda prompt, texts: None, "return a number for each"),
    ],
    ids=["text", "raises", "fewer", "nan", "words", "none"],
)
def test_a_scorer_that_is_wrong_is_named_and_leaves_the_session(toy, scorer, words):
    rows = rows_of(PROMPTS, WARM, limit=NEW)
    with toy.session(batch=3) as session:
        with pytest.raises(InputError, match=words):
            list(AStarDecoding(**LOOP).tokens(session, rows, told(toy, scorer)))
        if not isinstance(scorer, str):
            assert session.lengths.tolist() == [len(prompt) for prompt in PROMPTS]
            want = [toy.oracle(np.array([*prompt, 7]))[-1] for prompt in PROMPTS]
            got = session.run([[7]] * 3)[:, 0]
            np.testing.assert_allclose(got, want, atol=1e-3, rtol=1e-3)


def test_options_and_models_that_do_not_fit_are_refused(toy):
    for options in ({"width": 0}, {"step_tokens": 0}, {"budget": 0}, {"cost": "none"}):
        with pytest.raises(RecipeError, match=next(iter(options))):
            AStarDecoding(**options)
    with pytest.raises(InputError, match=re.escape("has no tokenizer; build with tokenizer=")):
        AStarDecoding().check(None)
