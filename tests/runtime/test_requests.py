"""Random requests through every loop that gives plain decoding's tokens: text, ends, log-probabilities and errors are
those of each request alone, whoever shares its calls.
"""

from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.judge import Judge
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import in_rounds
from accel.runtime.loop.autoregressive import Autoregressive
from accel.runtime.serve.engine import Engine
from accel.runtime.serve.request import Request

from ..request_case import WORDS, Says, model_of, request

MODEL = {"draft": {"use": "model"}}


def drafting(draft, tree="chain", length="fixed", **options):
    return {
        "loop": {"use": "speculative"}, "draft": {"use": draft, **options}, "tree": {"use": tree},
        "length": {"use": length}, "verify": {"use": "sample-match"},
    }  # fmt: skip


LOOPS = {
    "lookahead": {"loop": {"use": "lookahead", "window": 2, "ngram": 3, "guesses": 2}},
    "jacobi": {"loop": {"use": "jacobi", "block": 4}},
    "fastcot": {"loop": {"use": "fastcot", "window": 4, "passes": 99}},
    "pearl": {"loop": {"use": "pearl"}, **MODEL},
    "specbranch": {"loop": {"use": "specbranch", "threshold": 0.1}, **MODEL},
    "steps": {
        "loop": {"use": "lookahead-reasoning", "steps": 2, "step_tokens": 3, "width": 2},
        **MODEL,
    },
    "samples": {"loop": {"use": "first-finish", "samples": 1}},
    "beams": {"loop": {"use": "beam-patience", "beams": 1}},
    "retro": {"loop": {"use": "retro-attention", "window": 3}},
    "prompt-lookup": drafting("prompt-lookup", length="tetris"),
    "suffix-tree": drafting("suffix-tree", length="cost-optimal"),
    "stack": drafting("stack", union=True),
    "stand": drafting("stand"),
    "token-recycling": drafting("token-recycling", "static"),
    "model": drafting("model", length="hf-assist"),
    "eagle-tree": drafting("model", "eagle-tree"),
    "dyspec": drafting("model", "dyspec", "bass"),
    "staged-spec": drafting("staged-spec"),
}
CASES = [pytest.param(n, marks=() if n < 4 else pytest.mark.long, id=str(n)) for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer(toy):
    return Tokenizer(toy.path / "tokenizer.json")


def told(sample):
    """All that is told of a text; of one that failed, up to there."""
    row = sample.row
    whole = (sample.script.text(row.tokens), sample.finish_reason, sample.stop_reason)
    scores = [{t: (one.logprob, one.rank) for t, one in at.items()} for at in row.logprobs]
    return row.tokens, scores, str(row.error) if row.error else whole


def alone(model, prompt, params):
    sample, loop = model.prepare(prompt, params).sample, Autoregressive()
    with model.session() as session, suppress(InputError):
        list(loop.tokens(session, [sample.row], DecodeContext()))
    return told(sample)


def together(model, requests):
    """All of them in one session."""
    loop, context = model.decoding()
    context = replace(context, judge=Judge(lambda drafted, own: False))
    samples = [model.prepare(*one).sample for one in requests]
    rows = [one.row for one in samples]
    with model.session(len(rows)) as session:
        if not in_rounds(loop):
            list(loop.tokens(session, rows, context))
            return [told(one) for one in samples]
        with closing(loop.rounds(session, rows, context)) as rounds:
            list(rounds.start())
            while rounds.live:
                rounds.run()
                held = [row.seen.size - 1 for row in rows]
                assert [held[i] for i in rounds.live] == session.lengths[rounds.live].tolist()
    return [told(one) for one in samples]


def served(model, requests):
    """By an engine, whose requests join and leave."""
    found = []
    with Engine(model) as engine:
        for ticket in [engine.submit(Request(*one)) for one in requests]:
            tokens, scores, text, end = [], [], "", None
            try:
                for event in ticket:
                    tokens.append(event.token)
                    text += event.text
                    if event.logprobs is not None:
                        at = event.logprobs.items()
                        scores.append({t: (one.logprob, one.rank) for t, one in at})
                    end = event.finish
                found.append((tokens, scores, (text, end, ticket.stop_reason)))
            except InputError as error:
                found.append((tokens, scores, str(error)))
    return found


@pytest.mark.few(18)
@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("name", LOOPS)
def test_a_request_gets_what_plain_decoding_gives_it(toy, tokenizer, name, seed):
    rng, tables = np.random.default_rng([seed, *name.encode()]), LOOPS[name]
    active = np.array([tokenizer.vocabulary[word] for word in WORDS])
    context, eos = int(rng.choice([24, 40, 64])), ((0,), (0, int(active[1])), ())[seed % 3]
    program, draft = Says(toy.vocab, active, seed), None
    if "use" in tables.get("draft", {}) and tables["draft"]["use"] in ("model", "staged-spec"):
        beside = Says(toy.vocab + seed % 2, active, seed, noise=0.6, wrong=seed % 4 == 3)
        draft = model_of(beside, tokenizer, {}, int(rng.choice([context, context // 2])), eos=eos)
        draft._costs = replace(draft._costs, seconds=(0.01,) * len(draft._costs.tokens))
    model = model_of(program, tokenizer, tables, context, draft, eos)
    loop, free = model._loop, rng.random() < 0.5
    model._context = lambda judge=None: DecodeContext(
        model._methods, None if free else model.costs, model, model._store,
        Judge(lambda drafted, own: False) if "judge" in loop.takes else None,
    )  # fmt: skip
    asked = {"grammar": not loop.writes, "sampled": name != "beams", "failing": in_rounds(loop)}
    requests = [request(rng, active, context, **asked) for _ in range(4)]
    want = [alone(model, *one) for one in requests]
    if not in_rounds(loop):  # they raise what fails, for all of their rows
        good = [i for i, one in enumerate(want) if not isinstance(one[2], str)]
        requests, want = [requests[i] for i in good], [want[i] for i in good]
    if requests:
        assert together(model, requests) == want
    assert served(model, requests) == want
