"""splitwise: prompts run in one process and are decoded in another; tokens do not change, and bytes are the state's."""

import json
import signal
import time
from dataclasses import replace
from queue import SimpleQueue
from types import MappingProxyType

import numpy as np
import pytest
import torch

import accel
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.errors import AccelError, InputError, RecipeError
from accel.runtime.decode.logprobs import Logprob
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.schedule import Place, Route
from accel.runtime.schedule.splitwise import Splitwise
from accel.runtime.serve.engine import Engine, Full, Request
from accel.runtime.serve.phases import Phases, serving
from accel.runtime.serve.request import Event, Ticket
from accel.runtime.serve.wire import (
    event_from_json,
    event_to_json,
    prompt_logprobs_from_json,
    request_from_json,
    request_to_json,
)

from ...once import made_once
from ..test_prompt_scores import near

# guesses are checked at once; what is looked up only where it would have stood, which in text of this model is rare
DRAFTS = {"loop": {"use": "jacobi"}}


def places(*told):
    return [Place(home, pending, held, capacity=100) for home, pending, held in told]


def test_routes():
    """Of the page: the least loaded process of its pool, then of the mixed ones, then of the other pool."""
    route = Splitwise(queue=50).route
    both = [("prompt", 0, 0), ("prompt", 10, 0), ("token", 0, 60), ("token", 0, 20)]
    assert route(places(*both), 30, 40) == Route(0, 3)
    assert route(places(("prompt", 30, 0), *both[1:]), 30, 40) == Route(1, 3), "the fewest pending"
    full = [("prompt", 40, 0), ("token", 0, 20)]
    assert route(places(*full), 30, 40) == Route(1, 1), "a token process becomes mixed"
    assert places(("token", 5, 20))[0].role == places(("prompt", 5, 20))[0].role == "mixed"
    assert route(places(*full, ("mixed", 5, 0)), 30, 40) == Route(2, 1), "mixed ones come first"
    assert route(places(("prompt", 0, 0), ("token", 0, 70)), 30, 40) == Route(0, 0)
    assert route(places(("prompt", 0, 0)), 60, 70) == Route(0, 0), "an empty queue takes any prompt"
    none = places(("prompt", 40, 90), ("token", 60, 90))
    assert route(none, 30, 40) == Route(0, 0), "nobody can: the fewest pending does both"


@pytest.mark.parametrize(
    "options", [{"prompt": -1}, {"queue": 0}, {"prompt": 0}, {"prompt": 0, "token": 0}]
)
def test_bad_options(options):
    with pytest.raises(RecipeError, match="splitwise"):
        Splitwise(**options)


def test_one_process_is_an_engine():
    assert Splitwise(prompt=0, token=0, mixed=1).homes == ("mixed",)
    assert Splitwise().homes == ("prompt", "token")


# A row that goes from engine to engine, in this process


def through(prompts, decodes, request):
    """The events of a request whose prompt runs in one engine, and that is decoded in another; and what moved."""
    heard = SimpleQueue()

    def listen(ticket, event):
        heard.put(event)

    prompts.submit(request, listener=listen, hands=True)
    found, handed = [], None
    while True:
        event = heard.get(timeout=60)
        if isinstance(event, BaseException):
            raise event
        if hasattr(event, "state"):
            handed = event
            decodes.submit(request, listener=listen, handoff=handed)
            continue
        found.append(event)
        if event.finish:
            return found, handed


@pytest.fixture(scope="module")
def opened(toy, tmp_path_factory):
    def get(name="splitwise", **options):
        tables = {"schedule": {"use": "splitwise", **options}} | (
            DRAFTS if name == "drafts" else {}
        )
        folder = tmp_path_factory.mktemp("splitwise") / name
        return accel.load(toy.write(folder, tables, max_batch=4, max_context=200))

    with made_once(get) as found:
        yield found


def asked(count=6):
    found = []
    for i in range(count):
        prompt = np.random.default_rng(i).integers(1, 320, 5 + 4 * i)
        params = SamplingParams(
            max_tokens=1 + 5 * i,
            temperature=0.8 * (i % 2),
            repetition_penalty=1.3 if i == 3 else 1.0,
            logit_bias={7: -np.inf} if i == 3 else None,
            seed=i,
            stop=["e"] if i == 4 else None,
            logprobs=1 if i == 2 else None,
        )
        found.append(Request(prompt, params, sample=i % 3 if i % 2 else 0))
    return found


def want(model, one):
    params = replace(one.params, n=one.sample + 1)
    out = model.generate(one.prompt, sampling_params=params)
    at = one.sample
    return out.tokens[at], out.text[at], out.finish_reason[at]


def payload(handed):
    """Bytes of arrays that move."""
    return len(handed.state) - 8 - int.from_bytes(handed.state[:8], "little")


def law(model, one, events):
    tokens, text, finish = want(model, one)
    assert [e.token for e in events] == tokens, "tokens of another"
    assert "".join(e.text for e in events) == text
    assert events[-1].finish == finish


def test_rows_move_and_their_bytes_are_those_of_the_state(opened, monkeypatch):
    """Tokens, texts and samples are those of one engine; what moves is the state of the prompt's tokens."""
    model = opened("drafts")
    with Engine(model) as prompts, Engine(model) as decodes:
        for one in asked():
            law(model, one, through(prompts, decodes, one)[0])
        assert decodes.stats["drafted_total"] > 0
    model = opened()
    with Engine(model) as prompts, Engine(model) as decodes:
        for one in asked():
            events, handed = through(prompts, decodes, one)
            law(model, one, events)
            if handed is None:
                assert len(events) == 1
                continue
            layers = model.facts.layers
            state = sum(2 * layer.num_kv_heads * layer.head_dim * 4 for layer in layers)
            state += 8  # the position of each slot
            assert payload(handed) == state * one.prompt.size, (
                "other bytes than 2 L G D floats a token"
            )
        assert prompts.stats["kv_bytes"] == decodes.stats["kv_bytes"] == 0
        for engine in (prompts, decodes):
            engine._batcher.ledger.check()
            assert engine._batcher.ledger.free == engine._batcher.ledger.blocks
        monkeypatch.setattr(
            "accel.runtime.decode.row.Row.numbers",
            lambda row: {"tokens": row.tokens, "rng": np.random.default_rng(9).bit_generator.state},
        )
        with pytest.raises(AssertionError, match="tokens of another"):
            one = asked()[5]
            law(model, one, through(prompts, decodes, one)[0])


@pytest.mark.long
def test_a_codecs_own_tensors_move():
    """What moves is what the report says of a token: codes, scales and a position."""
    tables = {"kv.codec": {"use": "kv-int8"}}
    model = accel.optimize(
        small_model("llama"), tables, target="eager", max_batch=2, max_context=256
    )
    with model, Engine(model) as prompts, Engine(model) as decodes:
        prompt = np.random.default_rng(0).integers(1, model.facts.vocab_size, 70)
        one = Request(prompt, SamplingParams(max_tokens=9, temperature=0.7, seed=3))
        events, handed = through(prompts, decodes, one)
        want = model.generate(prompt, sampling_params=one.params)
        assert [event.token for event in events] == want.tokens[0]
        assert payload(handed) == model.report["kv_bytes_per_token"] * prompt.size


def test_a_request_as_json():
    params = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        logit_bias={3: -np.inf},
        sampler=MappingProxyType({"use": "typical", "mass": np.float64(0.5)}),
        stop=["a"],
        stop_token_ids=np.array([4]),
    )
    told = request_to_json(
        Request("text", params, None, None, 2, frozenset({7, 5}), 3, True), np.array([1, 2])
    )
    again = request_from_json(json.loads(json.dumps(told)))
    assert (again.prompt_logprobs, again.only_prompt) == (3, True)
    assert again.prompt.tolist() == [1, 2] and again.sample == 2
    assert again.marks == {5, 7}
    assert again.params.sampler == params.sampler
    assert again.params.logit_bias == params.logit_bias and again.params.temperature == 0.5
    several = SamplingParams(stop={"a"}, stop_token_ids=torch.tensor([4]))
    told = request_to_json(Request("text", several), np.array([1]))["params"]
    assert (told["stop"], told["stop_token_ids"]) == (["a"], [4])
    for wrong in (
        Request([1], SamplingParams(logits_processors=[lambda ids, logits: logits])),
        Request([1], encoder_input=[1]),
    ):
        with pytest.raises(InputError, match="cannot go to another process"):
            request_to_json(wrong, np.array([1]))


def test_an_event_as_json():
    for event in (Event(7, "a", None, None, True), Event(8, "", {8: Logprob(-0.5, 1)}, "stop")):
        ticket = Ticket(3, print)
        told = event_to_json(event, ticket)
        assert event_from_json(json.loads(json.dumps(told))) == event and len(told) < 9
        ticket.prompt_logprobs = [None, {5: Logprob(-1.5, 2, "a")}]
        told = json.loads(json.dumps(event_to_json(event, ticket)))["prompt_logprobs"]
        assert prompt_logprobs_from_json(told) == ticket.prompt_logprobs
        for _ in range(2):
            ticket.put(event)
        assert "prompt_logprobs" not in event_to_json(event, ticket), "told again"


# Processes


def test_two_processes(opened):
    """The one test of them that always runs."""
    model = opened("drafts")
    engine = serving(model, max_batch=3, max_waiting=2)
    with engine:
        assert isinstance(engine, Phases) and "1 prompt, 1 token" in engine.how
        repeats = Request(np.tile(np.arange(1, 8), 6), SamplingParams(max_tokens=24))  # is drafted
        requests = [*asked(), repeats]
        tickets = [engine.submit(one) for one in requests]
        for one, ticket in zip(requests, tickets, strict=True):
            law(model, one, list(ticket))
        end = time.monotonic() + 10  # a request ends before its process says that it has room
        while engine.stats["running"] and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.bytes_sent > 0 and engine.stats["running"] == 0
        told, end = engine.stats, end + 60
        for name in ("drafted", "accepted"):
            assert sum(getattr(one.usage, name) for one in tickets) == told[f"{name}_total"]
        scored = Request(requests[3].prompt, requests[3].params, prompt_logprobs=1)
        for one in (scored, replace(scored, only_prompt=True)):
            ticket = engine.submit(one)
            assert len(list(ticket)) == (1 if one.only_prompt else 16)
            near(model, one.prompt, ticket.prompt_logprobs, 1)
        long = SamplingParams(max_tokens=150, ignore_eos=True)
        ticket = engine.submit(Request([1, 2, 3], long))
        ticket.cancel()
        assert list(ticket)[-1].finish in ("cancelled", "length")
        with pytest.raises(InputError, match="n = 2"):
            engine.submit(Request([1], SamplingParams(n=2, temperature=1.0)))
        token = engine._processes[1].child
        token.send_signal(signal.SIGSTOP)
        tickets = []
        with pytest.raises(Full, match="2 requests wait already"):
            for _ in range(9):
                tickets.append(engine.submit(Request([1, 2, 3], long)))
        token.kill()
        ends = []
        for ticket in tickets:
            try:
                ends.append(list(ticket)[-1].finish)
            except AccelError as error:
                assert "token process that served this request ended (exit code -9)" in str(error)
                ends.append("gone")
        # the token process has room for 624 tokens; what came later is decoded where its prompt ran
        assert ends == ["gone"] * 4 + ["length"] * 4
        law(model, requests[2], list(engine.submit(requests[2])))  # by the process that is left
        engine._processes[0].wire.send({"do": "nothing"})  # it fails, says so and ends
        while not engine._processes[0].gone and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(AccelError, match="all processes of this engine have ended") as none:
            engine.submit(requests[2])
        assert not isinstance(none.value, InputError), "the request is right"
    with pytest.raises(InputError, match="closed"):
        engine.submit(requests[0])


@pytest.mark.long
def test_more_processes_and_what_they_refuse(opened, toy, tmp_path):
    model = opened("four", prompt=2, token=1, mixed=1)
    with serving(model) as engine:
        requests = asked() * 3
        tickets = [engine.submit(one) for one in requests]
        for one, ticket in zip(requests, tickets, strict=True):
            law(model, one, list(ticket))
        engine.close(drain=False)
    tables = {"schedule": {"use": "splitwise"}, "loop": {"use": "first-finish", "samples": 2}}
    search = toy.write(tmp_path / "search", tables, max_batch=4, max_context=200)
    with accel.load(search) as model, pytest.raises(InputError, match="no rounds"):
        serving(model)
