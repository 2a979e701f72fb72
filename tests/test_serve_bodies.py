"""What a body costs before it is refused, and what a client is told of it."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pydantic
import pytest

from accel.ir.errors import unknown
from accel.runtime.decode import structured_outputs
from accel.serve import body
from accel.serve.schemas import ChatRequest, CompletionRequest

from . import serve_case

LONG = 2000
JUNK = [
    [0] * LONG,
    [[]] * LONG,
    [None] * LONG,
    ["a"] * LONG,
    {str(i): [] for i in range(LONG)},
    {"type": {str(i): 0 for i in range(LONG)}},
    [{1: 0}] * LONG,
]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_a_long_wrong_field_is_a_few_errors(kind):
    """Of every field, however many entries are wrong."""
    for field in kind.model_fields:
        for junk in JUNK:
            try:
                kind.model_validate({field: junk})
            except pydantic.ValidationError as error:
                assert error.error_count() < 12, (field, error.error_count())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    artifact = serve_case.build(tmp_path_factory.mktemp("bodies"), max_context=64, max_batch=2)
    with serve_case.running([artifact]) as found:
        yield found


def test_health_answers_while_a_body_is_read(server, monkeypatch):
    """Bodies are read beside the event loop."""
    begun, go = threading.Event(), threading.Event()
    real = json.loads

    def slowly(text, **more):
        begun.set()
        assert go.wait(20)
        return real(text, **more)

    monkeypatch.setattr(body.json, "loads", slowly)
    with httpx.Client(base_url=server.url, timeout=20) as http, ThreadPoolExecutor(1) as pool:
        asked = {"model": "nobody", "messages": [0] * LONG}
        answer = pool.submit(http.post, "/v1/chat/completions", json=asked)
        assert begun.wait(20)
        try:
            assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
        finally:
            go.set()
        told = real(answer.result().text)["error"]
    assert told["param"] == "messages" and len(told["message"]) < 200


def test_a_body_of_too_many_values_is_refused_unread(monkeypatch):
    """The reader of JSON lets no other thread run; commas within strings are no values."""
    most = 1000
    values = b'{"model": "a", "prompt": [' + b"1," * most + b"1]}"
    text = json.dumps({"model": "a", "prompt": '1,"' * most}).encode()
    assert body.parsed(text, "application/json", CompletionRequest, most).asked.model == "a"
    monkeypatch.setattr(body.json, "loads", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(body.ApiError, match="more than 1,000 values") as raised:
        body.parsed(values, "application/json", CompletionRequest, most)
    assert raised.value.status == 413


@pytest.mark.parametrize("text", [b'"' + b'\\"' * 400_000, b'"\\', b'"a\\\n", "', b'"\\\\"'])
def test_strings_are_found_in_one_go(text):
    """Also one that has no end: in steps of their square the first would take minutes."""
    assert not body._STRING.sub(b"", text).strip(b", ")


def test_lines_of_a_grammar_are_read_in_one_go():
    assert not structured_outputs._GBNF.search("\n" * 1_000_000)
    assert structured_outputs._GBNF.search("\n# a\n root ::= b")


def test_a_near_name_of_a_long_one_costs_little():
    before = time.process_time()
    said = unknown("model", "artifact" * 500_000, ["artifact"])
    assert time.process_time() - before < 0.5 and len(said) < 200  # 4 s where all of it is compared


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        (b'{"model": "a", "prompt": "b", "stop": [5]}', "stop", "stop.0: it must be a valid string"),
        (b'{"model": "a", "prompt": "b", "logprobs": 21}', "logprobs", "20"),
        (b'{"model": "a", "prompt": "b", "stop_token_ids": ["a"]}', "stop_token_ids", "stop_token_ids.0: it must"),
        (b'{"seed": ' + b"9" * 5000 + b"}", None, "a number has more than"),
    ],
)  # fmt: skip
def test_no_words_of_libraries(given, param, said):
    with pytest.raises(body.ApiError) as raised:
        body.parsed(given, "application/json", CompletionRequest)
    message = raised.value.message
    assert said in message and raised.value.param == param
    for word in ("Input should", "list[", "dict[", "sys.", "pydantic", "int()"):
        assert word not in message
