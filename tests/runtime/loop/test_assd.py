"""assd: every way that a text can come about, against one token after another by both streams written out."""

from functools import cache

import numpy as np
import pytest
import torch

import accel
from accel.ir.capture.arch.any_order import AnyOrder, AnyOrderConfig
from accel.runtime.decode.context import DecodeContext
from accel.runtime.loop import assd
from accel.runtime.loop.assd import Assd
from accel.runtime.sample.standard import Standard

from ...draft_case import rows_of
from ...verify_case import outcomes

VOCABULARY, MASK = 5, 4
GIVEN = [1, MASK, 3, MASK, MASK, 0]  # two places in the middle, and one of them next to the other
WARM = Standard(temperature=0.8)


@cache
def module():
    torch.manual_seed(2)
    found = AnyOrder(AnyOrderConfig(VOCABULARY, 32, 48, 2, 2, 16, MASK)).eval()
    with torch.no_grad():
        for layer in found.layers:
            layer.v.weight.mul_(4), layer.q.weight.mul_(2)
        found.head.weight.mul_(4)
    return found


@cache
def model():
    tables = {"loop": {"use": "assd", "mask": MASK}}
    return accel.optimize(module(), tables, target="eager", max_context=64, max_batch=3)


@torch.no_grad()
def said(text, places, known, asked):
    """Logits [K,V] of the masks `asked` of a text, of whose `places` the first `known` are filled in order, by two
    streams: a content token sees those of no higher rank, a query those of lower rank than its own.
    """
    rank = np.where(np.array(text) == MASK, len(text) + 1, 0)
    rank[places] = 1 + np.arange(len(places))
    filled = rank <= known
    content = filled & (rank[:, None] >= rank) | np.eye(len(text), dtype=bool)
    query = filled & (rank < rank[asked][:, None])
    biases = [
        torch.zeros(sees.shape).masked_fill(torch.tensor(~sees), -torch.inf)
        for sees in (content, query)
    ]
    logits = module().two_streams(torch.tensor([text]), torch.tensor(asked), *biases)[0]
    logits[:, MASK] = -torch.inf
    return logits


def in_order(prompt, new, temperature):
    """The probability of each way to fill the first `new` masks, one token per call; the likeliest tokens at 0."""
    text = [*prompt, *[MASK] * max(0, new - prompt.count(MASK))]
    places = [i for i, token in enumerate(text) if token == MASK][:new]
    found = {(): 1.0}
    for number, place in enumerate(places):
        grown = {}
        for past, weight in found.items():
            ids = list(text)
            for at, token in zip(places, past, strict=False):
                ids[at] = token
            logits = said(ids, places, number, [place])[0].double()
            if not temperature:
                grown[*past, int(logits.argmax())] = weight
                continue
            law = (logits / temperature).softmax(-1).tolist()
            grown |= {(*past, t): weight * law[t] for t in range(VOCABULARY) if t != MASK}
        found = grown
    return found


class Again:
    """A session whose calls are made once for the same arguments."""

    def __init__(self, session, calls):
        self._session, self._calls = session, calls
        self.count = 0

    def __getattr__(self, name):
        return getattr(self._session, name)

    def guess(self, *parts):
        self.count += 1
        key = tuple(np.asarray(part).tobytes() for part in parts)
        if key not in self._calls:
            self._calls[key] = self._session.guess(*parts)
        return self._calls[key].copy()


def every_way(monkeypatch, loop, prompt, new, sampler=WARM):
    """What the loop gives, and how probably, by every way that its choices can fall; most calls of one way."""
    calls, most = {}, 0

    def once(chance):
        nonlocal most
        monkeypatch.setattr(assd, "Chance", lambda rng: chance)
        (row,) = rows_of([prompt], sampler, limit=new)
        session = Again(opened, calls)
        list(loop.tokens(session, [row], DecodeContext()))
        assert len(row.tokens) == new and MASK not in row.tokens
        most = max(most, session.count)
        return tuple(row.tokens)

    with model().session() as opened:
        return outcomes(once), most


def law_exact(found, wanted):
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose([found[key] for key in wanted], [*wanted.values()], atol=2e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "prompt, new, drafts",
    [(GIVEN, 3, 3), (GIVEN, 2, 2), (GIVEN, 3, 2), ([2, 0], 3, 3), ([MASK, 2], 3, 3), (GIVEN, 3, 1)],
)
def test_texts_have_the_probability_of_one_token_per_call(prompt, new, drafts, monkeypatch):
    """Places within a prompt, fewer of them than there are, and places behind it; no more calls than tokens."""
    found, most = every_way(monkeypatch, Assd(drafts=drafts, mask=MASK), prompt, new)
    law_exact(found, in_order(prompt, new, WARM.temperature))
    assert most <= new and sum(found.values()) == pytest.approx(1)


WRONG = {
    "the oracle's law in place of the rest": ("rest", lambda law, drafted: law),
    "what was drafted, again": ("rest", lambda law, drafted: drafted),
    "all drafts": ("ratio", lambda law, drafted, token: 1.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_has_other_probabilities(name, monkeypatch):
    monkeypatch.setattr(assd, *WRONG[name])
    found, _ = every_way(monkeypatch, Assd(drafts=3, mask=MASK), GIVEN, 3)
    with pytest.raises(AssertionError):
        law_exact(found, in_order(GIVEN, 3, WARM.temperature))


def test_a_draft_that_sees_the_others_is_seen(monkeypatch):
    """The control of the two calls: queries of the second that see all that was drafted, themselves included."""
    own = assd._Text.oracle

    def oracle(self, count):
        call = own(self, count)
        size = self.ids.size
        call.sees[size:, :size] = self.rank <= self.known + count
        return call

    monkeypatch.setattr(assd._Text, "oracle", oracle)
    found, _ = every_way(monkeypatch, Assd(drafts=3, mask=MASK), GIVEN, 3)
    with pytest.raises(AssertionError):
        law_exact(found, in_order(GIVEN, 3, WARM.temperature))


LONG = [*GIVEN, 2, MASK, MASK, 1, MASK]


@pytest.mark.parametrize("drafts", [1, 2, 4, 15])
def test_greedy_tokens_are_those_of_one_per_call(drafts):
    """With masks behind the prompt; in a batch as alone, in no more calls than tokens."""
    rows, calls = rows_of([LONG, GIVEN, [0, 1]], limit=9), []
    for row in rows:
        with model().session() as session:
            list(Assd(drafts=drafts, mask=MASK).tokens(session, [row], DecodeContext()))
            calls.append(session.stats["calls"])
            assert session.lengths.tolist() == [0]
        assert [tuple(row.tokens)] == [*in_order(row.prompt.tolist(), 9, 0)]
    assert max(calls) <= 9 and (calls == [9] * 3) == (drafts <= 2)  # a draft of two, two calls
    together = rows_of([row.prompt for row in rows], limit=9)
    with model().session(3) as session:
        list(Assd(drafts=drafts, mask=MASK).tokens(session, together, DecodeContext()))
    assert [row.tokens for row in together] == [row.tokens for row in rows]


def test_of_each_draft_the_first_token_stays():
    """It is what the second call draws, too: its law is the same in both."""
    stats = model().generate([LONG], 9, temperature=1.5, seed=2, eos=[]).stats["speculation"]
    assert stats["accepted"] >= stats["rounds"] > 0 and stats["drafted"] > stats["accepted"]
    assert min(stats["seconds"].values()) > 0
    text, places = list(LONG), [i for i, token in enumerate(LONG) if token == MASK]
    apart = said(text, places, 0, places[:1])
    text[places[1]] = 2
    np.testing.assert_allclose(said(text, places, 0, places[:1]), apart)


def test_a_row_is_what_its_prompt_and_seed_make_it():
    given = [LONG, GIVEN, [3, 1]]
    options = {"temperature": 0.9, "top_k": 3, "seed": 5, "eos": []}
    together = model().generate(given, 7, **options).tokens
    assert together == [model().generate([one], 7, **options).tokens[0] for one in given]
    assert together != model().generate(given, 7, **{**options, "seed": 6}).tokens


def test_an_end_within_and_log_probabilities_of_each_token():
    (tokens,) = model().generate([LONG], 9, eos=[]).tokens
    end = tokens[4]
    out = model().generate([LONG], 9, eos=[end], logprobs=1)
    assert out.tokens == [tokens[: tokens.index(end) + 1]] and out.stats["finish"] == ["eos"]
    assert len(out.logprobs[0]) == len(out.tokens[0])


def test_bad_input():
    with pytest.raises(
        accel.RecipeError, match="loop = assd: AnyOrder has tokens 0 to 4, .* is -1; give"
    ):
        accel.optimize(module(), "assd", target="eager", max_context=64)
    with pytest.raises(accel.RecipeError, match="loop.mask is 5; give the token"):
        accel.optimize(
            module(), {"loop": {"use": "assd", "mask": 5}}, target="eager", max_context=64
        )
    with pytest.raises(accel.RecipeError, match="loop.assd: drafts is 0"):
        Assd(drafts=0)
    with pytest.raises(accel.InputError, match="row 1 has 64 tokens with its answer.*room for 64"):
        model().generate([GIVEN, [1] * 60], 4)
    with (
        accel.optimize(module(), target="eager", max_context=64) as plain,
        plain.session() as session,
    ):
        with pytest.raises(accel.InputError, match="this model's calls cannot"):
            list(Assd(mask=MASK).tokens(session, rows_of([GIVEN], limit=3), DecodeContext()))
    with pytest.raises(ValueError, match="mask_token_id 9 one of 5 tokens"):
        AnyOrderConfig(VOCABULARY, 32, 48, 2, 2, 16, 9)
