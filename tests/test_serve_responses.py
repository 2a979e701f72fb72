"""OpenAI's responses, with the openai client: whole and streamed answers are the same and follow its models, tools in
two turns, reasoning, what Codex sends, streams that are left, and each mistake is an error of OpenAI's.
"""

import json
from functools import partial

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from accel.serve.limits import Limits
from accel.serve.models import Served

from . import serve_case, serve_tools_case
from .serve_tools_case import WEATHER

TOOLS = [
    {"type": "function", "name": "weather", "description": "Weather.", "parameters": WEATHER, "strict": False},
    {"type": "function", "name": "now"},
]  # fmt: skip
ASKED = {"model": "hermes", "input": "Weather in Oslo?", "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
DEEP = '{"a":' * 900 + "1" + "}" * 900
ANY = {"id", "created_at", "completed_at", "call_id"}  # of an object, what no two have in common
EVENTS = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_tools_case.serving(tmp_path_factory.mktemp("responses")) as running:
        yield running


@pytest.fixture
def client(served):
    served.engine.script = []
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as found:
        yield found
    assert served.idle()


@pytest.fixture
def say(served, client):
    return partial(serve_tools_case.script, served)


@pytest.fixture
def prompt(served):
    """The text of the last prompt."""
    return lambda: served.models[0].tokenizer.decode(served.engine.prompt)


def bare(value):
    """An answer without what no two have in common."""
    if isinstance(value, dict):
        return {key: bare(one) for key, one in value.items() if key not in ANY}
    return [bare(one) for one in value] if isinstance(value, list) else value


def events_of(url, body):
    """The objects of a stream as they were sent: named as they are typed, numbered, each of the client's model."""
    with httpx.Client(base_url=f"{url}/v1", timeout=60) as http:
        sent = http.post("/responses", json={**body, "stream": True})
    assert sent.status_code == 200, sent.text
    found = []
    for one in sent.text.rstrip("\n").split("\n\n"):
        name, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(found)
        EVENTS.validate_json(json.dumps(event), strict=True)
        found.append(event)
    return found


def both(client, **asked):
    """The answer, whole; what a stream's pieces make, and its last event, are the same."""
    asked = ASKED | asked
    raw = client.responses.with_raw_response.create(**asked)
    Response.model_validate_json(raw.content, strict=True)
    whole, items, open_item = json.loads(raw.content), [], None
    sent = {key: value for key, value in asked.items() if key != "extra_body"}
    events = events_of(
        str(client.base_url).removesuffix("/v1/"), sent | asked.get("extra_body", {})
    )
    assert [one["type"] for one in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None and event["output_index"] == len(items)
            open_item, pieces = event["item"]["id"], {}
            continue
        assert event["output_index"] == len(items)
        if kind == "output_item.done":
            assert event["item"]["id"] == open_item
            open_item, _ = None, items.append(event["item"])
            continue
        assert event["item_id"] == open_item
        what, _, how = kind.rpartition(".")
        if how == "delta":
            pieces[what] = pieces.get(what, "") + event["delta"]
        elif how == "done" and "text" in event:
            assert pieces.pop(what) == event["text"]
        elif how == "done" and "arguments" in event:
            assert pieces.pop(what, "") == event["arguments"]
    assert open_item is None and bare(items) == bare(whole["output"])
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert last["response"]["output"] == items and bare(last["response"]) == bare(whole)
    return Response.model_validate(whole)


def told(response):
    """What an answer says."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, json.loads(item.arguments)))
        else:
            found += [part.text for part in item.content]
    return [*found, response.status]


def test_an_answer(client, say, prompt):
    say("Hi there.")
    talk = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {"role": "user", "content": "Say."},
    ]  # fmt: skip
    response = both(client, input=talk, instructions="Be brief.", tools=[], metadata={"a": "b"})
    assert told(response) == ["Hi there.", "completed"] and response.output_text == "Hi there."
    said = "system: Be brief.\n\nBe kind.user: Helloassistant: Yes?user: Say.assistant:"
    assert prompt() == said
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 20
    assert response.metadata == {"a": "b"} and response.tool_choice == "auto"
    assert response.model_extra["store"] is False and response.instructions == "Be brief."


def test_what_is_repeated_may_be_no_text(served, client):
    """JSON escapes a lone surrogate, which UTF-8 lacks."""
    body = json.dumps(
        {"model": "hermes", "input": "a", "max_output_tokens": 2, "metadata": {"é": "\ud800"}}
    )
    with httpx.Client(base_url=served.url, headers={"content-type": "application/json"}) as http:
        answer = http.post("/v1/responses", content=body)
    assert answer.status_code == 200 and "é".encode() in answer.content
    assert json.loads(answer.content)["metadata"] == {"é": "\ud800"}


def test_what_is_not_known_is_not_repeated(served, client):
    """It may be nested more deeply than JSON is written."""
    deep = json.loads(DEEP)
    space = {"type": "namespace", "name": "n", "tools": [{**TOOLS[1], "x": deep}], "x": deep}
    choice = {"type": "function", "name": "weather", "x": deep}
    tools = [{**TOOLS[0], "x": deep}, space]
    body = {**ASKED, "tools": tools, "tool_choice": choice, "max_output_tokens": 2}
    with httpx.Client(base_url=served.url, timeout=60) as http:
        answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    Response.model_validate_json(answer.content, strict=True)
    assert [one["name"] for one in answer.json()["tools"]] == ["weather", "n"]
    assert "x" not in answer.json()["tool_choice"]


def test_the_clients_stream(client, say):
    """The client puts the answer together, and parses its schema."""
    say("<think>Hm.</think>Well.\n", CALL)
    with client.responses.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert kinds[-1] == "response.completed" and "response.reasoning_text.delta" in kinds
    assert told(last) == ["Hm.", "Well.", ("weather", {"city": "Oslo", "days": 1}), "completed"]


def test_a_forced_call(client):
    """By name, and any of them: its arguments follow the schema."""
    asked = {"temperature": 0, "parallel_tool_calls": False, "tools": TOOLS[:1]}
    for choice in ({"type": "function", "name": "weather"}, "required"):
        response = both(client, **asked, tool_choice=choice)
        (call,) = [item for item in response.output if item.type == "function_call"]
        arguments = json.loads(call.arguments)
        assert call.name == "weather" and arguments["city"] in ("Oslo", "Rome")
        assert arguments["days"] in range(10) and response.status == "completed"
    free = both(client, **asked, tool_choice="none", max_output_tokens=30)
    assert all(item.type != "function_call" for item in free.output), "control: it calls nothing"


def test_two_turns(client, say, prompt):
    """All items of the answer go back with what the calls gave: nothing is stored."""
    more = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    say("<think>Hm.</think>I look.\n", CALL, more)
    first = both(client)
    assert told(first)[1:4] == ["I look.", ("weather", {"city": "Oslo", "days": 1}), ("now", {})]
    one, other = (item.call_id for item in first.output if item.type == "function_call")
    outputs = [
        {"type": "function_call_output", "call_id": one, "output": "7 °C"},
        {"type": "function_call_output", "call_id": other,
         "output": [{"type": "input_text", "text": "12:00"}]},
    ]  # fmt: skip
    talk = [{"role": "user", "content": "Weather in Oslo?"}]
    say("It is 7 °C.")
    talk += [item.model_dump(exclude_none=True) for item in first.output]
    response = both(client, input=[*talk, *outputs])
    assert told(response) == ["It is 7 °C.", "completed"]
    assert prompt().endswith(
        f"assistant: I look.{CALL}{more.strip()}tool: 7 °Ctool: 12:00assistant:"
    )


def test_reasoning(client, say, prompt, served):
    """Whole, as a summary where one is asked for, and sealed for a client that keeps nothing else."""
    opened = {"chat_template_kwargs": {"opening": "<think>\n"}}
    say("Let me think.\n</think>\n\nYes.")
    response = both(client, tools=[], extra_body=opened)
    assert told(response) == ["Let me think.", "Yes.", "completed"]
    assert response.output[0].summary == [] and response.output[0].encrypted_content is None
    assert response.usage.output_tokens_details.reasoning_tokens > 2
    asked = {"reasoning": {"effort": "low", "summary": "auto"}}
    asked["include"] = ["reasoning.encrypted_content"]
    say("<think>Let me think.</think>Yes.")
    response = both(client, **asked, tools=[])
    assert response.output[0].summary[0].text == response.output[0].content[0].text
    assert response.reasoning.effort == "low" and prompt().endswith("assistant:low")
    sealed = response.output[0].model_dump(include={"type", "id", "encrypted_content"})
    given = [{"type": "reasoning", "id": "x", "summary": [], "encrypted_content": "gAAA"}]
    for items, thought in (
        ([{**sealed, "summary": []}], "Let me think."),
        (given, "\n\n"),
        ([{**given[0], "summary": [{"type": "summary_text", "text": "Short."}]}], "Short."),
    ):
        talk = [{"role": "user", "content": "Well?"}, *items, {"role": "user", "content": "So?"}]
        with httpx.Client(base_url=served.url) as http:
            body = {"model": "thoughts", "input": talk}
            assert http.post("/v1/responses", json=body).status_code == 200
        assert prompt() == f"Well?{thought}So?"


def test_an_answer_of_a_form(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = both(client, text={"format": form}, tools=[], temperature=0)
    assert json.loads(response.output_text)["a"] in (1, 2) and response.text.format.name == "x"


def test_how_it_ends(client, say, served):
    say("one two three four")
    response = both(client, max_output_tokens=1)
    assert response.status == "incomplete" and response.output[-1].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    say(CALL)
    response = both(client, max_output_tokens=len(served.engine.script) - 8)
    (call,) = response.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    assert '{"city": "Oslo", "days": 1}'.startswith(call.arguments)
    served.engine.script = [1]  # the end
    assert told(both(client)) == ["completed"]


CODEX = {  # what it sends for a model that it does not know
    "model": "hermes",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "Ask first."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Context."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
    ],
    "tools": [
        {"type": "function", "name": "shell_command", "description": "Run.", "strict": False,
         "parameters": {"type": "object", "properties": {"command": {"type": "string"},
                        "timeout_ms": {"type": "number"}},
                        "required": ["command"], "additionalProperties": False}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__files", "description": "Files.",
         "tools": [{"type": "function", "name": "read", "description": "Read.", "strict": False,
                    "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
}  # fmt: skip


def test_what_codex_sends(served, client, prompt):
    """Tools that a server would run are left out and named, and those of a namespace have its name before theirs."""
    metadata = {"extra_body": {"client_metadata": {"x": "y"}}}
    raw = client.responses.with_raw_response.create(**CODEX, **metadata, max_output_tokens=3)
    assert raw.headers["x-accel-ignored"] == "tools.1.web_search"
    assert "mcp__files__read" in prompt() and "web_search" not in prompt()
    assert "system: You are a coding agent.\n\nAsk first.user: Context.\n\nGo." in prompt()
    response = Response.model_validate_json(raw.content, strict=True)
    assert [tool.type for tool in response.tools] == ["function", "namespace"]
    named = {"type": "function", "name": "read", "namespace": "mcp__files"}
    called = both(client, **CODEX | {"tool_choice": named}, temperature=0)
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert (call.name, call.namespace, call.arguments) == ("read", "mcp__files", "{}")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "text"}
    talk = [*CODEX["input"], call.model_dump(exclude_none=True), output]
    client.responses.create(**CODEX | {"input": talk}, max_output_tokens=3)
    assert '{"name": "mcp__files__read", "arguments": {}}' in prompt()
    found = [Served("hermes", served.models[0], served.engine)]
    with (
        serve_case.listening(found, limits=Limits(strict=True)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        answer = http.post("/v1/responses", json=CODEX)
        assert (
            answer.status_code == 400 and "tools.1.web_search" in answer.json()["error"]["message"]
        )


def test_a_stream_that_is_left(client, served):
    """Its row is free for others, from within the stream's first events on."""
    asked = ASKED | {"tools": [], "extra_body": {"ignore_eos": True}}
    for events in (1, 8):
        with client.responses.create(**asked, stream=True) as stream:
            for _ in range(events):
                next(stream)
        assert served.idle(5)


def test_a_stream_that_fails(served, client):
    """The time is over: the last event says so, with what came."""
    found = [Served("hermes", served.models[0], served.engine)]
    asked = {**ASKED, "tools": [], "ignore_eos": True}
    with serve_case.listening(found, limits=Limits(seconds=0.2)) as server:
        events = events_of(server.url, asked)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.failed" and last["status"] == "failed"
    assert last["error"]["code"] == "server_error" and "more than 0.2 s" in last["error"]["message"]
    assert last["output"][-1]["status"] == "incomplete" and last["usage"]["output_tokens"] > 0


def changed(**tool):
    return {"tools": [{**TOOLS[0], **tool}]}


def items(*more):
    return {"input": [{"role": "user", "content": "a"}, *more]}


CALLED = {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "7"}
IMAGE = {"type": "input_image", "image_url": "x"}
BAD = [  # fields that are changed, the field that the error names, and words of it
    ({"input": None}, "input", "input"),
    ({"input": []}, "input", "input is empty"),
    ({"input": [5]}, "input", "must be a valid dictionary"),
    (items({"role": "tool", "content": "a"}), "input", "input[1].role 'tool' does not exist; known: assistant, dev"),
    (items({"role": "user", "content": 5}), "input", "input[1].content is 5; give text or a list of parts"),
    (items({"role": "user", "content": [IMAGE]}), "input", "input[1].content[0] is of type 'input_image'; this"),
    (items({"role": "user", "content": [5]}), "input", "input[1].content[0] is of type 5"),
    (items({"role": "user", "content": [{"type": "input_text"}]}), "input", "content[0].text is None; give text"),
    (items({"type": "item_reference", "id": "x"}), "input", "input[1] is of type 'item_reference'"),
    (items({"type": "custom_tool_call"}), "input", "input[1] is of type 'custom_tool_call'"),
    (items(OUTPUT), "input", "input[1]: no call before it has the id 'a'"),
    (items(CALLED, {**OUTPUT, "output": [IMAGE]}), "input", "input[2].output[0] is of type 'input_image'"),
    (items({**CALLED, "arguments": "{a"}), "input", "input[1].arguments is no JSON"),
    (items({**CALLED, "arguments": "[]"}), "input", "input[1].arguments is no JSON object"),
    (items({**CALLED, "arguments": {}}), "input", "input[1].arguments is {}; give text"),
    (items({**CALLED, "name": None}), "input", "input[1].name is None; give text"),
    (items({"type": "reasoning", "summary": "a"}), "input", "input[1].summary is 'a'; give a list"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two are named weather"),
    ({"tools": [{**TOOLS[0], "name": f"t{i}"} for i in range(1000)]}, "tools", "1000 were given; give at most 128"),
    ({"tools": [5]}, "tools", "tools[0] is 5"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].name is None; give text"),
    ({"tools": [{"type": "web_search"}, {**TOOLS[0], "name": "a b"}]}, "tools", "tools[1].name is 'a b'"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{**TOOLS[0], "name": "a b"}]}]}, "tools",
     "tools[0].tools[0].name is 'n__a b'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "goes with tools"),
    (changed(name="\ud800"), "tools", "1 to 64"),
    (changed(parameters={"type": "obj"}), "tools", "tools[0].parameters is no JSON schema: it.type is 'obj'"),
    (changed(strict="yes"), "tools", "tools[0].strict is 'yes'"),
    ({"tool_choice": "always"}, "tool_choice", "tool_choice 'always' does not exist"),
    ({"tool_choice": 5}, "tool_choice", '{"type": "function", "name": …}'),
    ({"tool_choice": {"type": "function", "name": "wether"}}, "tool_choice", "did you mean 'weather'"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice is of type 'web_search'"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "this server stores nothing"),
    ({"conversation": {"id": "x"}}, "conversation", "this server stores nothing"),
    ({"background": True}, "background", "not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs", "not supported"),
    ({"top_logprobs": 3}, "top_logprobs", "not supported"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "text.format.schema is missing"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "obj"}}}}, "text", "text: "),
    ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type"),
    ({"reasoning": {"effort": "most"}}, "reasoning", "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"metadata": {"a": 1}}, "metadata", "metadata"),
    ({"metadata": {str(i): "a" for i in range(17)}}, "metadata", "it has more than 16 entries"),
    (items({**CALLED, "arguments": DEEP}, {**OUTPUT, "output": "so " * 2000}), "input", "tokens"),
    ({"input": "so " * 2000}, "input", "max_context"),
    ({"model": "plain"}, "tools", "knows no tools"),
    ({"model": "unknown"}, "tools", "is not known"),
]  # fmt: skip


def test_wrong_fields_are_named(client, served):
    before = served.engines[0].stats["requests_total"]
    head = {"content-type": "application/json"}
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for change, param, words in BAD:
            body = json.dumps({**ASKED, **change})
            answer = http.post("/v1/responses", content=body, headers=head)
            error = answer.json().get("error", {})
            assert (answer.status_code, error.get("param")) == (400, param), (change, answer.text)
            assert words in error["message"], (words, error)
    assert served.engines[0].stats["requests_total"] == before
    with pytest.raises(openai.NotFoundError, match="did you mean 'hermes'"):
        client.responses.create(**ASKED | {"model": "herme"})
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**ASKED | {"input": "so " * 2000})
    assert raised.value.code == "context_length_exceeded"
