"""An engine tells the log-probabilities of a prompt's tokens: those of the model, however the prompt runs."""

from dataclasses import replace

import numpy as np
import pytest

import accel
from accel.ir.errors import InputError
from accel.runtime.decode import prompt_scores
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.serve.engine import Engine, Request
from accel.runtime.session.session import Session

from ..once import made_once
from ..prefill_case import built

LOOPS = {
    "plain": {},
    "sarathi": {"schedule": {"use": "sarathi", "tokens": 7}},
    "nexus": {"schedule": {"use": "nexus", "tokens": 8}},
    "prefix": {"kv.reuse": {"use": "paged-prefix"}, "schedule": {"use": "sarathi", "tokens": 16}},
    "drafts": {
        "loop": {"use": "speculative"},
        "draft": {"use": "prompt-lookup"},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    },
    "turns": {"loop": {"use": "first-finish", "samples": 2}},
}
PROMPTS = [np.random.default_rng(i).integers(1, 320, size) for i, size in enumerate((1, 2, 37, 64))]
MAKES = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def opened(toy, tmp_path_factory):
    def get(name="plain"):
        folder = tmp_path_factory.mktemp("scores") / name
        return accel.load(toy.write(folder, LOOPS[name], max_batch=4, max_context=200), threads=2)

    with made_once(get) as found:
        yield found


def near(model, prompt, scores, top):
    """They are those of `logits`, teacher-forced."""
    logits = model.logits(prompt[None])[0].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert len(scores) == prompt.size and scores[0] is None
    for place, line in enumerate(scores[1:], 1):
        token = int(prompt[place])
        best = np.argsort(-want[place - 1], kind="stable")[:top].tolist()
        assert next(iter(line)) == token and set(line) == {token, *best}
        told = [one.logprob for one in line.values()]
        assert np.allclose(told, [want[place - 1][one] for one in line], atol=2e-4)


@pytest.mark.parametrize("name", LOOPS)
def test_they_are_the_models_own_and_what_is_made_is_as_without(opened, name, monkeypatch):
    """In pieces, with drafts, where prompts are known already, and where requests take turns; few logits at once."""
    model = opened(name)
    monkeypatch.setattr(prompt_scores, "_MOST", 5 * model.facts.vocab_size)
    run, widths = Session.run, []

    def watched(self, tokens, *given, **more):
        if not more.get("last_only"):
            widths.append(np.shape(tokens)[1])
        return run(self, tokens, *given, **more)

    with Engine(model) as engine:
        want = [model.generate(one, sampling_params=MAKES).tokens[0] for one in PROMPTS]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "run", watched)
            asked = [Request(one, MAKES, prompt_logprobs=i % 3) for i, one in enumerate(PROMPTS)]
            tickets = [engine.submit(one) for one in asked]
            assert [[event.token for event in ticket] for ticket in tickets] == want
        assert max(widths) == 5
        for i, (ticket, one) in enumerate(zip(tickets, PROMPTS, strict=True)):
            near(model, one, ticket.prompt_logprobs, i % 3)
        assert engine.submit(Request([1], MAKES)).prompt_logprobs is None


@pytest.mark.parametrize("name", ["plain", "sarathi", "turns"])
def test_a_request_may_make_nothing(opened, name):
    model = opened(name)
    with Engine(model) as engine:
        for prompt in PROMPTS:
            ticket = engine.submit(Request(prompt, MAKES, prompt_logprobs=1, only_prompt=True))
            assert [(event.token, event.finish) for event in ticket] == [(-1, "length")]
            near(model, prompt, ticket.prompt_logprobs, 1)
            assert ticket.usage.completion_tokens == 0
        list(engine.submit(Request([1], MAKES)))  # the sweep behind the last one has ended
        assert engine.stats["running"] <= 1 and engine.stats["generated_tokens_total"] == 4
    assert engine.stats["kv_bytes"] == 0 and engine._batcher.ledger.free == engine._limits.blocks


def test_requests_that_run_again_score_once(opened):
    model = opened("sarathi")
    long = replace(MAKES, max_tokens=60)
    with Engine(model, blocks=9) as engine:
        tickets = [engine.submit(Request(one, long, prompt_logprobs=0)) for one in PROMPTS[2:] * 2]
        for ticket in tickets:
            list(ticket)
        assert engine.stats["preemptions_total"] > 0
    for ticket, prompt in zip(tickets, PROMPTS[2:] * 2, strict=True):
        near(model, prompt, ticket.prompt_logprobs, 0)


@pytest.mark.long
def test_a_prompt_that_has_to_run_whole_is_scored_beside():
    """Where the recipe shortens prompts, scores are of all of its tokens, and what is made is as without."""
    model = built("llama", use="gemfilter", tokens=12, layer=1)
    with Engine(model) as engine:
        prompt = np.random.default_rng(1).integers(3, 50, 40)
        want = model.generate(prompt, sampling_params=MAKES).tokens[0]
        assert not engine._limits.recompute
        ticket = engine.submit(Request(prompt, MAKES, prompt_logprobs=1))
        assert [event.token for event in ticket] == want
        near(model, prompt, ticket.prompt_logprobs, 1)


def test_bad_requests(opened):
    with Engine(opened()) as engine:
        for given, why in (({"prompt_logprobs": -1}, "prompt_logprobs = -1"),):
            with pytest.raises(InputError, match=why):
                engine.submit(Request([1, 2], MAKES, **given))
    with pytest.raises(InputError, match="only_prompt"):
        Request([1], only_prompt=True)
