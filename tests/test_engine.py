"""Requests of one engine: each gets the tokens that it gets alone."""

import numpy as np

from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.serve.engine import Engine, Request

from .prefill_case import built

PROMPTS = [np.random.default_rng(i).integers(3, 50, 5 + 3 * i) for i in range(6)]


def params(i):
    return SamplingParams(max_tokens=4 + i, temperature=float(i % 2), seed=i)


def test_requests_get_the_tokens_that_they_get_alone():
    model = built("llama")
    with Engine(model) as engine:
        tickets = [engine.submit(Request(p, params(i))) for i, p in enumerate(PROMPTS)]
        for i, (ticket, prompt) in enumerate(zip(tickets, PROMPTS, strict=True)):
            events = list(ticket)
            want = model.generate(prompt, sampling_params=params(i))
            assert [e.token for e in events] == want.tokens[0]
            assert events[-1].finish == want.finish_reason[0]
            assert {e.finish for e in events[:-1]} <= {None}
            assert ticket.usage.completion_tokens == len(events)
