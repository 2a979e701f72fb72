"""`accel-compile serve`: the openai client gets what `generate` gives, each mistake is an error of OpenAI's, and
nothing that clients do holds up others or stays behind.
"""

import ast
import asyncio
import json
import logging
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
import tokenizers
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from accel import cli
from accel.ir.errors import InputError
from accel.runtime.decode.logprobs import Logprob
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.serve.request import Event, Ticket
from accel.serve import gate
from accel.serve.limits import Access
from accel.serve.loading import Models
from accel.serve.metrics import Metrics
from accel.serve.models import source
from accel.serve.renderer import Frame
from accel.serve.replies import ChatReply, CompletionReply, Score, usage
from accel.serve.requests import _params
from accel.serve.schemas import CompletionRequest
from accel.serve.server import bound
from accel.serve.stream import EventStream

from . import serve_case

PROMPT = "import os\nimport sys\n\ndef main("
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
GREEDY = {"model": "artifact", "temperature": 0, "max_tokens": 12}
LONG = {"model": "artifact", "prompt": "def f(", "max_tokens": 400, "temperature": 1.5, "seed": 3}
LONG |= {"ignore_eos": True, "stream": True}
BODY = 1 << 20
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return serve_case.build(tmp_path_factory.mktemp("serve"), max_context=512, max_batch=3)


@pytest.fixture(scope="module")
def server(artifact):
    with serve_case.running([artifact], limits=limits()) as found:
        yield found


def limits(seconds=60.0):
    from accel.serve.limits import Limits

    return Limits(BODY, seconds)


@pytest.fixture(scope="module")
def model(server):
    return server.models[0]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(server):
    """No test leaves a request behind."""
    yield
    assert server.idle()


def metrics(http):
    """(name, labels) -> value."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


def error_of(answer, status):
    """OpenAI's error object, of an answer that is no page."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"} and "Traceback" not in answer.text
    return error


def test_a_completion_is_what_generate_gives(client, http, model):
    """Whole and streamed: text, log-probabilities, usage and finish; and the metrics count it."""
    before = metrics(http)
    alone = model.generate(PROMPT, 12, logprobs=3)
    asked = {**GREEDY, "prompt": PROMPT, "logprobs": 3}
    whole = client.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.text == alone.text[0] and choice.finish_reason == "length"
    assert whole.usage.prompt_tokens == len(model.tokenizer.encode(PROMPT))
    assert whole.usage.completion_tokens == 12 and whole.usage.total_tokens > 12
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 0
    lines = [list(line.values()) for line in alone.logprobs[0]]
    assert choice.logprobs.token_logprobs == [line[0].logprob for line in lines]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [choice.text[i:][:1] for i in choice.logprobs.text_offset] == [
        t[:1] for t in choice.logprobs.tokens
    ]
    assert [set(line.values()) for line in choice.logprobs.top_logprobs] == [
        {one.logprob for one in line} for line in lines
    ]
    *pieces, last, total = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(p.choices[0].text for p in pieces) == choice.text and len(pieces) > 5
    assert last.choices[0].finish_reason == "length" and total.usage == whole.usage
    scores = [x for p in pieces for x in p.choices[0].logprobs.token_logprobs]
    assert scores == choice.logprobs.token_logprobs
    assert len({p.id for p in (*pieces, last, total)}) == 1
    after = metrics(http)
    more = {key: after[key] - before.get(key, 0) for key in after}
    assert more["accel_requests_total", "artifact"] == 2
    assert more["accel_generated_tokens_total", "artifact"] == 24
    assert more["accel_prompt_tokens_total", "artifact"] == 2 * whole.usage.prompt_tokens
    assert more["accel_http_responses_total", "/v1/completions", "200"] == 2
    assert more["accel_time_to_first_token_seconds_count", "artifact"] == 2


def test_answers_are_counted_by_the_path_of_a_route(http):
    before = metrics(http)
    for path in ("/v1/models/artifact", "/v1/models/nobody", "/v1/models", "/v1/nothing"):
        http.get(path)
    after = metrics(http)
    assert {
        key[1:]: value - before.get(key, 0)
        for key, value in after.items()
        if key[0] == "accel_http_responses_total"
        and key[1] != "/metrics"
        and value != before.get(key, 0)
    } == {
        ("/v1/models/{name}", "200"): 1,
        ("/v1/models/{name}", "404"): 1,
        ("/v1/models", "200"): 1,
        ("other", "404"): 1,
    }


def test_a_chat_is_what_generate_gives(client, model):
    alone = model.generate(TALK, 12, logprobs=2).text[0]
    whole = client.chat.completions.create(messages=TALK, **GREEDY, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", alone)
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    assert bytes(b for one in choice.logprobs.content for b in one.bytes).decode() == alone
    parts = [{"type": "text", "text": PROMPT[:9]}, {"type": "text", "text": PROMPT[9:]}]
    talk = [TALK[0], {"role": "user", "content": parts}]
    first, *pieces, last = client.chat.completions.create(messages=talk, **GREEDY, stream=True)
    assert first.choices[0].delta.role == "assistant" and last.choices[0].finish_reason == "length"
    assert "".join(p.choices[0].delta.content for p in pieces) == alone
    opened = {"add_generation_prompt": True, "opening": "def "}
    other = client.chat.completions.create(
        messages=TALK, **GREEDY, extra_body={"chat_template_kwargs": opened}
    )
    same = model.generate(TALK, 12, chat_template_kwargs=opened).text[0]
    assert other.choices[0].message.content == same != alone


def test_samples_and_prompts_have_an_order(client, model):
    """`n` samples of a seed are those of `generate`, of several prompts, whole and streamed."""
    prompts = [PROMPT, "for i in"]
    alone = model.generate(prompts, 6, n=2, seed=7, temperature=0.9)
    asked = {"model": "artifact", "prompt": prompts, "max_tokens": 6, "n": 2, "seed": 7}
    whole = client.completions.create(**asked, temperature=0.9)
    assert [c.text for c in whole.choices] == alone.text and len(set(alone.text)) > 2
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    tokens = sum(len(model.tokenizer.encode(p)) for p in prompts)
    assert whole.usage.prompt_tokens == tokens, "a prompt counts once"
    texts = [""] * 4
    for chunk in client.completions.create(**asked, temperature=0.9, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == alone.text
    ids = model.tokenizer.encode("for i in")
    (own,) = client.completions.create(**GREEDY, prompt=ids).choices
    assert own.text == model.generate("for i in", 12).text[0]


def test_drafts_are_told_as_predictions():
    """Of all samples together, beside the tokens that were made."""
    tickets = [Ticket(7, print) for _ in range(2)]
    for ticket, drafts in zip(tickets, ((9, 4), (5, 0)), strict=True):
        ticket.put(Event(3, "a"))
        ticket.count(*drafts)
    told = openai.types.CompletionUsage(**usage(tickets, 1))
    assert (told.prompt_tokens, told.completion_tokens, told.total_tokens) == (7, 2, 9)
    details = told.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 10)


def test_log_probabilities_of_tokens_of_one_text():
    """A word at the beginning of a text reads as the one inside of it, and a byte as its character: the number told is
    that of the token that came.
    """
    words = {"<unk>": 0, "\u2581the": 1, "the": 2, "<0x41>": 3, "A": 4, "<0xFF>": 5, "</s>": 6}
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(words, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(inner.to_str().encode())
    told = [
        {1: Logprob(-0.5, 1), 2: Logprob(-3.0, 2)},
        {3: Logprob(-4.0, 3), 4: Logprob(-0.25, 1), 5: Logprob(-1.0, 2)},
        {6: Logprob(-2.0, 1)},
    ]
    scores = [Score(one, 0) for one in told]
    found = CompletionReply("m", tokenizer, top=2, usage=False)._scores(scores, 2)
    assert found["tokens"] == [" the", "A", "</s>"]
    assert found["token_logprobs"] == [-0.5, -4.0, -2.0]
    assert found["top_logprobs"][:2] == [
        {" the": -0.5, "the": -3.0},
        {"A": -4.0, "bytes:\\xff": -1.0},
    ]
    (first, *_) = ChatReply("m", tokenizer, top=2, usage=False)._scores(scores, 2)["content"]
    assert (first["token"], bytes(first["bytes"])) == (" the", b" the")


def test_engines_that_count_other_things_are_scraped_together():
    """An engine of several processes also counts the bytes that move between them."""
    plain = SimpleNamespace(name="a", engine=SimpleNamespace(stats={"running": 1}))
    apart = SimpleNamespace(
        name="b", engine=SimpleNamespace(stats={"running": 2, "moved_bytes": 3})
    )
    for order in ((plain, apart), (apart, plain)):
        text = Metrics(Models(order)).text.decode()
        assert 'accel_running{model="a"} 1.0' in text and 'accel_running{model="b"} 2.0' in text
        assert text.count("accel_moved_bytes{") == 1 and 'accel_moved_bytes{model="b"} 3.0' in text


def test_drafts_are_told_by_position():
    counts = {"drafts_total": 4, "drafted_total": 6, "accepted_total": 3}
    places = {"draft_accepted_total/1": 2, "draft_accepted_total/10": 1, "draft_drafted_total/1": 4}
    made = SimpleNamespace(name="a", engine=SimpleNamespace(stats={**counts, **places}))
    none = SimpleNamespace(name="b", engine=SimpleNamespace(stats=dict.fromkeys(counts, 0)))
    text = Metrics(Models([made, none])).text.decode()
    for line in (
        'accel_draft_accepted_total{model="a",position="1"} 2.0',
        'accel_draft_accepted_total{model="a",position="10"} 1.0',
        'accel_draft_drafted_total{model="a",position="1"} 4.0',
        'accel_draft_accepted_mean{model="a"} 0.75',
        'accel_drafts_total{model="b"} 0.0',
    ):
        assert f"{line}\n" in text
    assert text.count("accel_draft_accepted_mean{") == 1, "none of a model without drafts"


def test_a_stop_string_over_two_tokens(client, model):
    """It is found where it lies across tokens, and no piece of it is ever sent; one that almost comes is."""
    out = model.generate(PROMPT, 12)
    words = [model.tokenizer.decode([t]) for t in out.tokens[0]]
    place = next(i for i in range(3, 10) if len(words[i]) > 1 and len(words[i + 1]) > 1)
    stop = words[place][-1] + words[place + 1][:1]
    assert stop not in words
    want = out.text[0][: out.text[0].index(stop)]
    asked = {**GREEDY, "prompt": PROMPT}
    (whole,) = client.completions.create(**asked, stop=stop).choices
    assert (whole.text, whole.finish_reason) == (want, "stop")
    chunks = list(client.completions.create(**asked, stop=[stop, "\0"], stream=True))
    assert "".join(c.choices[0].text for c in chunks) == want
    assert chunks[-1].choices[0].finish_reason == "stop"
    (missed,) = client.completions.create(**asked, stop=stop + "\0").choices
    assert (missed.text, missed.finish_reason) == (out.text[0], "length")


def test_response_formats(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    asked = {**GREEDY, "max_tokens": 60, "temperature": 1, "seed": 2, "messages": TALK}
    found = client.chat.completions.create(**asked, response_format=form).choices[0]
    assert found.finish_reason == "stop" and json.loads(found.message.content)["a"] in (1, 2)
    loose = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert loose.choices[0].message.content.lstrip().startswith("{")


def test_no_limit_of_likely_tokens_as_vllm_writes_it(client, model):
    sampled = {"temperature": 1.2, "seed": 4, "max_tokens": 12}
    want = model.generate(PROMPT, 12, temperature=1.2, seed=4).text[0]
    for none in (0, -1):
        found = client.completions.create(
            model="artifact", prompt=PROMPT, **sampled, extra_body={"top_k": none}
        )
        assert found.choices[0].text == want


def test_penalties_lower_what_was_said(client, model):
    same = model.generate(PROMPT, 12, presence_penalty=2, frequency_penalty=2)
    found = client.completions.create(
        **GREEDY, prompt=PROMPT, presence_penalty=2, frequency_penalty=2
    )
    assert found.choices[0].text == same.text[0] != model.generate(PROMPT, 12).text[0]


def test_clients_at_once_get_what_each_gets_alone(client, model):
    prompts = ["def f(", "import", "class A:", "x = [", "return", "# the"]
    alone = model.generate(prompts, 12).text

    def ask(prompt):
        return client.completions.create(**GREEDY, prompt=prompt).choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_models(client, model):
    (one,) = client.models.list().data
    assert one.id == "artifact" and one.owned_by == "accel" and one.max_model_len == 512
    assert client.models.retrieve("artifact") == one
    with pytest.raises(openai.NotFoundError, match="did you mean 'artifact'"):
        client.models.retrieve("artefact")


def test_one_model_needs_no_name(http):
    for path, asked in (
        ("completions", {"prompt": PROMPT}),
        ("chat/completions", {"messages": TALK}),
    ):
        named = http.post(f"/v1/{path}", json={**GREEDY, **asked}).json()
        for more in ({}, {"model": None}):
            bare = {key: value for key, value in GREEDY.items() if key != "model"}
            found = http.post(f"/v1/{path}", json={**bare, **asked, **more}).json()
            assert found["model"] == "artifact" and found["choices"] == named["choices"]


def form(schema):
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


BAD = [  # fields that are changed, the status, the field that the error names, and words of it
    ({"model": 5}, 400, "model", "valid string"),
    ({"model": "artefact"}, 404, "model", "did you mean 'artifact'"),
    ({"model": "\ud800"}, 404, "model", "known: artifact"),
    ({"prompt": 5.5}, 400, "prompt", "give text, token ids"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": ["a", ""]}, 400, "prompt", "prompt 1 is empty"),
    ({"prompt": [1, 99999]}, 400, "prompt", "not in the vocabulary"),
    ({"prompt": "\udc00"}, 400, "prompt", "lone surrogate"),
    ({"prompt": "x " * 600}, 400, "prompt", "max_context is 512"),
    ({"prompt": "x y " * 50_000}, 400, "prompt", "far more tokens than max_context = 512"),
    ({"prompt": ["a", " " * 900_000]}, 400, "prompt", "max_context"),
    ({"prompt": [5] * 512}, 400, None, "no room"),
    ({"prompt": ["a"] * 9}, 400, "prompt", "at most 8 may wait"),
    ({"n": 4}, 400, "n", "from 1 to 3"),
    ({"n": 0}, 400, "n", "from 1 to 3"),
    ({"max_tokens": -1}, 400, "max_tokens", "out of range"),
    ({"max_tokens": "5"}, 400, "max_tokens", "valid integer"),
    ({"temperature": -1}, 400, "temperature", "out of range"),
    ({"temperature": float("nan")}, 400, "temperature", "out of range"),
    ({"top_p": True}, 400, "top_p", "valid number"),
    ({"top_k": -2}, 400, "top_k", "out of range"),
    ({"stop": 5}, 400, "stop", "valid string"),
    ({"stop": [""]}, 400, "stop", "non-empty"),
    ({"logprobs": 21}, 400, "logprobs", "20"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias", "token ids"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias", "vocabulary"),
    ({"presence_penalty": 3}, 400, "presence_penalty", "2"),
    ({"stream_options": []}, 400, "stream_options", ""),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", "missing"),
    ({"response_format": {"type": "xml"}}, 400, "response_format", "'text'"),
    (form({"name": "x"}), 400, "response_format", "response_format.json_schema.schema is missing"),
    (form({"schema": {"type": "no"}}), 400, "response_format", "response_format: json is not"),
    ({"echo": True, "suffix": "a"}, 400, "echo", "leave out one"),
    ({"suffix": "a"}, 400, "suffix", "has no tokens to fill in the middle"),
    ({"best_of": 3}, 400, "best_of", "not supported"),
]


def test_wrong_fields_are_named(http, server):
    before = server.engines[0].stats["requests_total"]
    for change, status, param, words in BAD:
        body = json.dumps({**GREEDY, "prompt": "a", **change})
        answer = http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        error = error_of(answer, status)
        assert (error["param"], words in error["message"]) == (param, True), (change, error)
    assert server.engines[0].stats["requests_total"] == before
    assert error_of(http.post("/v1/completions", json={**GREEDY, "prompt": [5] * 512}), 400)[
        "code"
    ] == ("context_length_exceeded")
    for talk, words in (
        ([], "messages"),
        ([{"content": "a"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": "x " * 600}], "max_context"),
        ([{"role": "user", "content": "x " * 60_000}], "far more tokens"),
    ):
        answer = http.post("/v1/chat/completions", json={**GREEDY, "messages": talk})
        assert words in error_of(answer, 400)["message"]
    none = {"messages": TALK, "max_completion_tokens": 0}
    error = error_of(http.post("/v1/chat/completions", json={**GREEDY, **none}), 400)
    assert error["param"] == "max_completion_tokens" and "tokens = 0" in error["message"]
    more = {"messages": TALK, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    error = error_of(http.post("/v1/chat/completions", json={**GREEDY, **more}), 400)
    assert error["param"] == "chat_template_kwargs"


def test_bodies_that_are_no_requests(http):
    kind = {"content-type": "application/json"}
    for body, status, words in (
        (b"{bad", 400, "not JSON"),
        (b"", 400, "no JSON object"),
        (b"[]", 400, "no JSON object"),
        (b'{"model": "\xff"}', 400, "not UTF-8 (byte 11)"),
        (b"[" * 100_000, 400, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400, "cannot be read"),
        (b'"' + b"x" * (10 << 20) + b'"', 413, "1,048,576 are allowed"),
    ):
        answer = http.post("/v1/completions", content=body, headers=kind)
        assert words in error_of(answer, status)["message"], body[:20]
    untyped = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert "Content-Type" in error_of(untyped, 400)["message"]
    error_of(http.get("/v1/nothing"), 404)
    assert http.put("/health").headers["allow"] == "GET"
    error_of(http.put("/health"), 405)


def test_no_body_breaks_the_server(http):
    """Requests with junk in a random field: each is answered as JSON, none by a failure."""
    rng = random.Random(5)
    junk = [None, True, -1, 0, 2**70, 1.5, "", "\ud800", "a\0b", [], [[]], [[], "a"], {}, {"a": {}}]
    junk += [[1, "a"], [None], {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/a"}}}]
    for kind, base in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": TALK})):
        fields = ["temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "top_k"]
        fields += ["min_p", "response_format", "stream", "stop_token_ids", "top_logprobs", *base]
        for field in fields:
            body = {**GREEDY, **base, "max_tokens": 1, field: rng.choice(junk)}
            head = {"content-type": "application/json"}
            answer = http.post(f"/v1/{kind}", content=json.dumps(body), headers=head)
            assert answer.status_code < 500, (body, answer.text)
            if answer.status_code != 200:
                error_of(answer, answer.status_code)


def test_requests_name_a_sampler(http, model):
    """Of completions and of chats: the tokens of `generate`; a wrong one is told with its field."""
    asked = {"use": "bregman-topk", "alpha": 1.0, "price": 0.2}
    warm = {**GREEDY, "temperature": 1.5, "seed": 3}
    for path, base, prompt in (
        ("completions", {"prompt": PROMPT}, PROMPT),
        ("chat/completions", {"messages": TALK}, TALK),
    ):
        given = model.generate(prompt, 12, temperature=1.5, seed=3, sampler=asked)
        plainly = model.generate(prompt, 12, temperature=1.5, seed=3)
        answer = http.post(f"/v1/{path}", json={**warm, **base, "sampler": asked}).json()
        (choice,) = answer["choices"]
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == given.text[
            0
        ]
        assert given.text != plainly.text
        for wrong, words in (
            ({"use": "typcal"}, "did you mean 'typical'"),
            ({"use": "typical", "mass": 7.0}, "mass is 7.0; give"),
            ("typical", "dictionary"),
        ):
            error = error_of(http.post(f"/v1/{path}", json={**warm, **base, "sampler": wrong}), 400)
            assert words in error["message"] and error["param"] == "sampler"


def test_a_server_has_a_sampler_for_requests_that_name_none(artifact):
    """As `serve --sampler` gives it; the control: another one that the request names."""
    asked = {"use": "bregman-topk", "alpha": 1.0, "price": 0.2}
    found = source(artifact, None, asked)
    assert found.again().sampler == asked
    with found.open() as served:
        for given, want in ((None, asked), ({"use": "eta"}, {"use": "eta"})):
            made = _params(CompletionRequest(prompt="a", sampler=given), served, None, ())
            assert made.sampler == want


def test_a_full_queue_and_clients_that_go_away(http, server):
    """429 once all waits are taken; whoever goes away, in its prompt or its stream, frees the place: the tokens that
    it asked for are not made.
    """
    before = server.engines[0].stats["generated_tokens_total"]
    with httpx.Client(base_url=server.url) as leaver:
        open_streams = [leaver.stream("POST", "/v1/completions", json=LONG) for _ in range(30)]
        entered = []
        for one in open_streams:
            answer = one.__enter__()
            entered.append(one)
            if answer.status_code != 200:
                break
        answer.read()
        assert error_of(answer, 429)["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1" and len(entered) > 8
        assert server.engines[0].stats["waiting"] == 8
        assert http.get("/health").json() == {"status": "ok"}
        for one in entered:
            one.__exit__(None, None, None)
    assert server.idle(10)
    made = server.engines[0].stats["generated_tokens_total"] - before
    assert made < 400 * 4, "of 3,600"
    address = (server.url.split("//")[1].split(":")[0], int(server.url.rpartition(":")[2]))
    body = json.dumps({**LONG, "stream": False}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    with socket.create_connection(address) as whole:
        whole.sendall(head.encode() + body)
        while not server.engines[0].stats["running"]:
            time.sleep(0.005)
    with socket.create_connection(address) as half:
        half.sendall(head.encode() + body[:10])
    assert server.idle(10)
    assert server.engines[0].stats["generated_tokens_total"] - before - made < 400


def test_a_reader_that_stops_reading():
    """It holds up its own response alone, and no longer than a request may take."""
    ended, sent = [], []

    async def chunks():
        for i in range(100):
            yield Frame({"i": i})

    async def stuck(message):
        sent.append(message)
        if len(sent) > 3:
            await asyncio.Event().wait()

    async def there():
        await asyncio.Event().wait()

    async def go():
        teller = SimpleNamespace(failed=lambda error: [Frame(error.body)])
        stream = EventStream(chunks(), teller, 0.2, lambda: ended.append(1))
        await asyncio.wait_for(stream({"type": "http"}, there, stuck), 10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accel.serve.stream.LAST_WORDS", 0.2)
        asyncio.run(go())
    assert ended == [1] and b'"code": "timeout"' in sent[-1]["body"]


def test_a_silent_stream_tells_that_it_goes_on():
    """Nothing comes before the first token of a long prompt: who is between would close the connection."""
    sent = []

    async def chunks():
        await asyncio.sleep(0.05)
        yield Frame({"i": 1})
        await asyncio.sleep(0.25)
        yield Frame("[DONE]")

    async def there():
        await asyncio.Event().wait()

    async def take(message):
        sent.append(message.get("body"))

    async def go():
        stream = EventStream(chunks(), SimpleNamespace(beat=b":\n\n"), 10, lambda: None)
        await stream({"type": "http"}, there, take)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accel.serve.stream.SILENCE", 0.1)
        asyncio.run(go())
    assert sent[:2] == [None, b'data: {"i": 1}\n\n'] and {*sent[2:-2]} == {b":\n\n"}
    assert sent[-2:] == [b"data: [DONE]\n\n", b""]


def test_limits_of_time_and_the_key(artifact):
    """A request that takes too long, whole and streamed; a body that does not come; a key that is wrong."""
    with (
        pytest.MonkeyPatch.context() as patch,
        serve_case.running([artifact], access=Access("s3cret\n"), limits=limits(0.3)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for wrong in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic s3cret"}):
            error = error_of(http.post("/v1/completions", json=LONG, headers=wrong), 401)
            assert error["code"] == "invalid_api_key"
        assert http.get("/health").status_code == http.get("/").status_code == 200
        http.headers["authorization"] = "Bearer s3cret"
        assert http.get("/v1/models").status_code == 200
        late = http.post("/v1/completions", json={**LONG, "stream": False})
        assert error_of(late, 504)["code"] == "timeout"
        *_, last, empty = http.post("/v1/completions", json=LONG).text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout" and not empty
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="took more than 0.3 s"):
                list(client.completions.create(**{k: v for k, v in LONG.items() if k != "ignore_eos"},
                                               extra_body={"ignore_eos": True}))  # fmt: skip
        patch.setattr(gate, "BODY_SECONDS", 0.1)

        def slowly():
            yield b"{"
            time.sleep(0.5)
            yield b"}"

        error_of(http.post("/v1/completions", content=slowly()), 408)
        assert server.idle()


def test_a_port_is_taken_before_anything_is_served():
    """So that "serving on" is true when it is printed, and another server is refused."""
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is in use"):
            bound("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), 5):
            pass


def test_sigterm_lets_streams_end(artifact):
    """Then the process ends; a port in use is said at once."""
    command = [
        sys.executable,
        "-m",
        "accel.cli",
        "serve",
        artifact,
        "--port",
        "0",
        "--threads",
        "1",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            line = run.stdout.readline()
            url = re.search(r"http://\S+", line)[0]
            port = url.rpartition(":")[2]
            taken = CliRunner().invoke(cli.app, ["serve", str(artifact), "--port", port])
            assert taken.exit_code == 1 and f"port {port} of 127.0.0.1 is in use" in taken.stderr
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                run.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert first.startswith("data: {") and rest[-1] == "data: [DONE]"
            assert len(rest) > 100, "all that was asked for"
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            assert run.wait(30) == 128 + signal.SIGTERM
            assert "Traceback" not in run.stderr.read()
        finally:
            run.kill()


def test_what_does_not_end_in_time_is_told_so(artifact, monkeypatch):
    """Requests whole and streamed, that run and that wait, when the time to end is over; the log has no traceback."""
    asked = [{**LONG, "n": 2, "stream": stream} for stream in (False, True, False, True)]
    with (
        serve_case.running([artifact], drain=0.1) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        said = []
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handle", said.append)
        found = [pool.submit(http.post, "/v1/completions", json=one) for one in asked]
        while server.engines[0].stats["requests_total"] < 2 * len(asked):
            time.sleep(0.005)
        server.tell()
        for one, answer in zip(asked, [one.result() for one in found], strict=True):
            if one["stream"]:
                *_, last, empty = answer.text.split("\n\n")
                assert not empty
                error = json.loads(last.removeprefix("data: "))["error"]
            else:
                error = error_of(answer, 503)
            assert error["code"] == "shutting_down"
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert not said


def test_what_cannot_be_served_is_one_line(artifact, tmp_path, monkeypatch):
    def said(*arguments):
        result = CliRunner().invoke(cli.app, ["serve", "--port", "0", *map(str, arguments)])
        (line,) = [one for one in result.stderr.splitlines() if one.startswith("error")]
        assert result.exit_code in (1, 2) and not result.stdout
        return line

    damaged = tmp_path / "artifact"
    shutil.copytree(artifact, damaged)
    with open(damaged / "weights.bin", "r+b") as file:
        file.write(b"\0\1\2\3")
    assert "weights.bin" in said(damaged)
    assert "nothing" in said(tmp_path / "nothing")
    assert "two artifacts are named artifact" in said(artifact, artifact)
    assert "there is no such file" in said(artifact, "--chat-template", "no.jinja")
    assert "did you mean 'typical'" in said(artifact, "--sampler", "typcal,mass=0.9")
    for host in ("no.such.host.invalid", "a..b", "a" * 70):
        assert "give an address of this machine" in said(artifact, "--host", host)
    for option in ("--drain", "--max-body"):
        assert option in said(artifact, option, "inf")
    assert "'nosuch' does not exist" in said(artifact, "--chat-template", "nosuch")
    (tmp_path / "wrong.jinja").write_text("{% for m in %}")
    assert "no Jinja template: line 1" in said(
        artifact, "--chat-template", tmp_path / "wrong.jinja"
    )
    assert "--api-key is empty" in said(artifact, "--api-key", " ")
    for module in [name for name in sys.modules if name.startswith("accel.serve")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "package fastapi, which is not installed" in said(artifact)
    assert "extra 'serve'" in said(artifact)


def test_the_base_install_needs_no_part_of_the_extra():
    """Only `accel.serve` and `accel.ray` import it, and only their commands, inside `extra`, import those."""
    parts = {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client", "ray", "pyarrow"}
    own = {ROOT / "api" / name for name in ("serve", "ray")}

    def imports(tree):
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from ((node, name) for name in names)

    found = set()
    for folder in ("ir", "passes", "lowering", "runtime", "api"):
        for path in (ROOT / folder).rglob("*.py"):
            if not own.isdisjoint(path.parents) or "__pycache__" in path.parts:
                continue
            text = path.read_text(encoding="utf-8")
            if not any(part in text for part in (*parts, "accel.serve", "accel.ray")):
                continue
            tree = ast.parse(text)
            for node, name in imports(tree):
                if name.split(".")[0] in parts or name.startswith(("accel.serve", "accel.ray")):
                    found.add((path.name, node in tree.body))
    assert found == {("serve.py", False), ("map.py", False)}


class Page(HTMLParser):
    """The ids, addresses and scripts of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.addresses, self.script, self._tag = set(), [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        found = dict(attrs)
        self.ids |= {found["id"]} if "id" in found else set()
        self.addresses += [found[k] for k in ("src", "href", "action") if k in found]

    def handle_data(self, data):
        self.script += data if self._tag == "script" else ""


def test_the_page_stands_alone(http):
    """It is one file that fetches nothing from elsewhere, and its script finds what it looks for."""
    answer = http.get("/")
    assert answer.text == files("accel.serve").joinpath("page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = Page(answer.text)
    assert page.addresses == ["data:,"] and "://" not in answer.text
    asked = set(re.findall(r'\$\("(\w+)"\)', page.script))
    assert len(asked) > 10 and asked <= page.ids
    classes = set(re.findall(r'querySelector\("\.(\w+)"\)', page.script))
    classes |= set(re.findall(r'tell\("(\w+)"', page.script))
    assert all(re.search(rf'class="[^"]*\b{one}\b', answer.text) for one in classes - {"empty"})
    fields = {*re.findall(r"model\.(\w+)|one\.(\w+)", page.script)}
    entry = http.get("/v1/models").json()["data"][0]
    known = {a or b for a, b in fields} & {"about", "chat", "methods", "grade", "sharing",
             "max_model_len", "plain_kv_bytes_per_token"}  # fmt: skip
    assert len(known) == 7 and known <= set(entry)
