"""What a text must be, in the words of OpenAI, vLLM and llama.cpp: it is held to it, or the request is refused."""

import json
import re

import httpx
import pytest

from accel.serve import constraints
from accel.serve.body import parsed
from accel.serve.schemas import REFUSED, ChatRequest, CompletionRequest

from . import serve_case
from .test_serve import error_of

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
WORD = "[0-9]{3}-[0-9]{2}"
LARK = 'start: "<" /[a-c]{4}/ ">"'
GBNF = '# a comment\nroot ::= "<" letter{4} ">"\nletter ::= [a-c]\n'
TAGGED = "<[a-c]{4}>"
JSON_TEXT = r'\{"a":[12]\}'
ASKED = {"model": "artifact", "temperature": 1.0, "seed": 3, "max_tokens": 40}

FORMS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, JSON_TEXT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON_TEXT),
    ({"structured_outputs": {"json": SCHEMA}}, JSON_TEXT),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON_TEXT),
    ({"structured_outputs": {"regex": WORD}}, WORD),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": LARK}}, TAGGED),
    ({"guided_json": SCHEMA}, JSON_TEXT),
    ({"guided_regex": WORD}, WORD),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": GBNF}, TAGGED),
    ({"json_schema": SCHEMA}, JSON_TEXT),
    ({"grammar": GBNF}, TAGGED),
    ({"grammar": LARK, "response_format": {"type": "text"}}, TAGGED),
    ({"grammar": "", "guided_regex": WORD}, WORD),
]
WRONG = [
    ({"guided_regex": "a", "grammar": LARK}, "grammar", "guided_regex and grammar say what"),
    ({"structured_outputs": {}}, "structured_outputs", "nothing given"),
    ({"structured_outputs": {"json": {}, "json_object": True}}, "structured_outputs", "give one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "not supported"),
    ({"guided_choice": []}, "guided_choice", "guided_choice: choice is []"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "guided_regex: regex is not valid"),
    ({"guided_json": "{"}, "guided_json", "guided_json: json is not JSON"),
    ({"json_schema": {"not": {}}}, "json_schema", "not"),
    ({"grammar": "root ::= foo"}, "grammar", "Rule 'foo' not found"),
    ({"grammar": 'root ::= ("a"'}, "grammar", "Expected ')'"),
    ({"grammar": "root ::= " + "(" * 9999 + '"a"' + ")" * 9999}, "grammar", "nested too deeply"),
    ({"grammar": "root ::= " + '"a" ' * 99_999}, "grammar", "give at most 131,072 of GBNF"),
    ({"grammar": "start: " + '"a" ' * 300_000}, "grammar", "give at most 1,048,576"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = serve_case.build(tmp_path_factory.mktemp("constraints"), max_context=128, max_batch=2)
    with serve_case.running([path]) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.mark.few(3)
@pytest.mark.parametrize(("given", "pattern"), FORMS, ids=lambda one: str(one)[:50])
def test_every_form_is_followed(http, given, pattern):
    answer = http.post("/v1/completions", json={**ASKED, "prompt": "A: ", **given})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"])
    assert "x-accel-ignored" not in answer.headers
    free = http.post("/v1/completions", json={**ASKED, "prompt": "A: "}).json()["choices"][0]
    assert not re.fullmatch(pattern, free["text"])


@pytest.mark.parametrize(("given", "param", "said"), WRONG, ids=lambda one: str(one)[:50])
def test_what_is_wrong_is_named(http, given, param, said):
    talk = {"messages": [{"role": "user", "content": "x"}]}
    error = error_of(http.post("/v1/chat/completions", json={**ASKED, **talk, **given}), 400)
    assert error["param"] == param and said in error["message"]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_what_a_text_is_not_held_to_is_refused(kind):
    base = {"model": "a", "prompt": "b", "messages": []}
    names = [name for name, field in kind.model_fields.items() if REFUSED in field.metadata]
    assert {"min_tokens", "structural_tag", "bad_words"} <= set(names)
    for name in names:
        with pytest.raises(constraints.ApiError, match=f"^{name} is not supported") as raised:
            parsed(json.dumps({**base, name: 5}).encode(), "application/json", kind)
        assert raised.value.param == name
        none = json.dumps({**base, name: None}).encode()
        assert parsed(none, "application/json", kind).asked.model == "a"


def test_a_field_that_is_not_known_is_told(http):
    given = {**ASKED, "prompt": "a", "max_tokens": 2, "user": "me", "top_n": 1, "a\r\nb: é": 2}
    given |= {"stream_options": {"include_usage": True, "often": 1}, "z" * 99: 0}
    for stream in (False, True):
        answer = http.post("/v1/completions", json={**given, "stream": stream})
        told = answer.headers["x-accel-ignored"].split(", ")
        assert told == ["top_n", "a??b???", "z" * 40, "stream_options.often"]


def test_a_field_that_is_not_known_is_refused_where_that_is_asked_for():
    body = json.dumps({"model": "a", "prompt": "b", "max_token": 5}).encode()
    with pytest.raises(constraints.ApiError, match="did you mean 'max_tokens'") as raised:
        parsed(body, "application/json", CompletionRequest, strict=True)
    assert raised.value.param == "max_token"
    known = json.dumps({"model": "a", "prompt": "b", "user": "c"}).encode()
    assert not parsed(known, "application/json", CompletionRequest, strict=True).unknown
