"""Anthropic's messages, with the anthropic client: whole and streamed answers are the same and follow its models, tools
in two turns, reasoning, stop sequences, streams that are left, and each mistake is an error of its own class.
"""

import json
import threading
from functools import partial

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from accel.serve.limits import Access

from . import serve_tools_case
from .serve_tools_case import TOOLS as OPENAI_TOOLS
from .serve_tools_case import WEATHER

TALK = [{"role": "user", "content": "Weather in Oslo?"}]
TOOLS = [
    {"name": "weather", "description": "Weather.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
]
ASKED = {"model": "hermes", "messages": TALK, "tools": TOOLS, "max_tokens": 100}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
EVENTS = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_tools_case.serving(tmp_path_factory.mktemp("messages")) as running:
        yield running


@pytest.fixture
def client(served):
    served.engine.script = []
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as found:
        yield found
    assert served.idle()


@pytest.fixture
def say(served, client):
    return partial(serve_tools_case.script, served)


@pytest.fixture
def prompt(served):
    """The text of the last prompt."""
    return lambda: served.models[0].tokenizer.decode(served.engine.prompt)


def events_of(url, body, path="/v1/messages"):
    """Each event's name and object, as they were sent."""
    with httpx.Client(base_url=url, timeout=60) as http:
        sent = http.post(path, json={**body, "stream": True})
    assert sent.status_code == 200, sent.text
    lines = [one.split("\n") for one in sent.text.rstrip("\n").split("\n\n")]
    assert all(len(one) == 2 for one in lines)
    named = [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in lines]
    assert all(name == one["type"] for name, one in named)
    return named


def both(client, **asked):
    """The answer, whole; the streamed one, which the client puts together, is the same."""
    asked = ASKED | asked
    whole = client.messages.create(**asked)
    Message.model_validate(whole.model_dump(), strict=True)
    with client.messages.stream(**asked) as stream:
        last = stream.get_final_message()
    leave = {"id", "content"}
    assert last.model_dump(exclude=leave) == whole.model_dump(exclude=leave)
    for one, other in zip(last.content, whole.content, strict=True):
        more = {"id"} if one.type == "tool_use" else set()
        assert one.model_dump(exclude={"parsed_output", *more}) == other.model_dump(exclude=more)
    return whole


def told(message):
    """What an answer says, and why it ended."""
    found = []
    for block in message.content:
        text = getattr(block, "text", None) or getattr(block, "thinking", None)
        found.append(text if block.type != "tool_use" else (block.name, block.input))
    return [*found, message.stop_reason]


def test_an_answer(client, say, prompt):
    say("Hi there.")
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}] * 2
    beta = {"anthropic-beta": "a-2025-01-01", "anthropic-version": "2023-06-01"}
    talk = [
        *TALK,
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}]},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "so?"}]},
        {"role": "system", "content": "Now."},
        {"role": "user", "content": "Say."},
    ]  # fmt: skip
    asked = {"system": system, "messages": talk, "extra_headers": beta, "tools": anthropic.omit}
    message = both(client, **asked, metadata={"user_id": "me"})
    assert told(message) == ["Hi there.", "end_turn"] and message.stop_sequence is None
    said = "system: Be brief.\n\nBe brief.user: Weather in Oslo?assistant: Well.user: And\n\nso?\n\nNow.\n\nSay."
    assert prompt() == f"{said}assistant:"
    usage = message.usage
    assert usage.input_tokens > 20 and usage.output_tokens > 2
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)


def test_every_event_is_the_clients(client, say, served):
    """Named as its data, of its model strictly, in the order that Anthropic publishes."""
    say("<think>\nHm.\n</think>\n\nLet me see.\n", CALL)
    events = events_of(served.url, ASKED)
    assert ("ping", {"type": "ping"}) in events
    events = [data for name, data in events if name != "ping"]
    for event in events:
        EVENTS.validate_json(json.dumps(event), strict=True)
    order = [event["type"] for event in events]
    assert order[0] == "message_start" and order[-2:] == ["message_delta", "message_stop"]
    kinds, open_block = [], None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(kinds)
            open_block, _ = event["index"], kinds.append(event["content_block"]["type"])
        assert event["index"] == open_block
        if event["type"] == "content_block_stop":
            open_block = None
    assert open_block is None and kinds == ["thinking", "text", "tool_use"]
    pieces = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    arguments = [one["partial_json"] for one in pieces if one["type"] == "input_json_delta"]
    assert len(arguments) > 3 and json.loads("".join(arguments)) == {"city": "Oslo", "days": 1}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 2


def test_a_forced_call(client):
    """By name, and any of them: its arguments follow the schema."""
    asked = {"extra_body": {"temperature": 0}, "tools": TOOLS[:1]}
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
        choice["disable_parallel_tool_use"] = True
        message = both(client, **asked, tool_choice=choice)
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use" and call.name == "weather"
        assert call.input["city"] in ("Oslo", "Rome") and call.input["days"] in range(10)
    free = both(client, **asked, tool_choice={"type": "auto"})
    assert all(block.type != "tool_use" for block in free.content), "control: it calls nothing"


def test_two_turns(client, say, prompt):
    """Calls and what they gave go back, and the template writes them as it does those of chat completions."""
    more = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    say("<think>Hm.</think>I look.\n", CALL, more)
    first = both(client)
    calls = [("weather", {"city": "Oslo", "days": 1}), ("now", {})]
    assert told(first) == ["Hm.", "I look.", *calls, "tool_use"]
    one, other = (block.id for block in first.content if block.type == "tool_use")
    results = [
        {"type": "tool_result", "tool_use_id": one, "content": [{"type": "text", "text": "7 °C"}]},
        {"type": "tool_result", "tool_use_id": other, "content": "no clock", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    said = [block.model_dump() for block in first.content]
    hidden = {"type": "redacted_thinking", "data": "x"}
    say("It is 7 °C.")
    for content in (said, [hidden, *said]):
        answer = {"role": "assistant", "content": content}
        message = both(client, messages=[*TALK, answer, {"role": "user", "content": results}])
        assert told(message) == ["It is 7 °C.", "end_turn"]
        end = f"assistant: I look.{CALL}{more.strip()}tool: 7 °Ctool: Error: no clockuser: Go on.assistant:"
        assert prompt().endswith(end)


def test_thinking(client, say, prompt):
    """What the template knows of it is asked for; the client is told what nothing comes of."""
    say("Let me think.\n</think>\n\nYes.")
    opened = {"chat_template_kwargs": {"opening": "<think>\n"}}
    message = both(client, extra_body=opened, tools=anthropic.omit)
    assert told(message) == ["Let me think.", "Yes.", "end_turn"]
    assert message.usage.output_tokens_details.thinking_tokens > 2
    kinds = {"disabled": "False", "adaptive": "True", "enabled": "True"}
    for kind, end in kinds.items():
        say("Yes.")
        budget = {"budget_tokens": 1024} if kind == "enabled" else {}
        raw = client.messages.with_raw_response.create(**ASKED, thinking={"type": kind, **budget})
        assert prompt().endswith(f"assistant:{end}")
        assert raw.headers.get("x-accel-ignored") == ("thinking.budget_tokens" if budget else None)
    both(client, output_config={"effort": "max"})
    assert prompt().endswith("assistant:xhigh")


def test_an_answer_of_a_form(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    for place in ("output_config", "output_format"):
        more = {place: {"format": form} if place == "output_config" else form, "temperature": 0}
        message = client.messages.create(**ASKED | {"tools": []}, extra_body=more)
        assert json.loads(message.content[-1].text)["a"] in (1, 2)


def test_how_it_ends(client, say, served):
    say("one two three")
    stopped = both(client, stop_sequences=["two", "never"])
    assert told(stopped) == ["one ", "stop_sequence"] and stopped.stop_sequence == "two"
    assert told(both(client, max_tokens=1))[-1] == "max_tokens"
    say(CALL)
    for left in (4, 9):
        message = both(client, max_tokens=len(served.engine.script) - left)
        *_, (name, arguments), reason = told(message)
        assert (name, reason) == ("weather", "max_tokens")
        assert arguments.items() <= {"city": "Oslo", "days": 1}.items()
    say('<tool_call>{"name": "now", "arguments": {a}}</tool_call>')
    (block,) = client.messages.create(**ASKED).content
    assert (block.name, block.input) == ("now", {"INVALID_JSON": "{a}"})
    long = [{"role": "user", "content": "so " * 900}]
    full = client.messages.create(**ASKED | {"messages": long, "max_tokens": 20000, "tools": []},
                                  extra_body={"ignore_eos": True})  # fmt: skip
    assert full.stop_reason == "model_context_window_exceeded"


def test_an_answer_that_goes_on(client, say, prompt):
    """The assistant's text at the end is the beginning of the answer."""
    say(" 7 °C.")
    talk = [*TALK, {"role": "assistant", "content": "It is"}]
    assert told(both(client, messages=talk)) == [" 7 °C.", "end_turn"]
    assert prompt().endswith("assistant: It is")


def test_tokens_are_counted(client, say):
    """As many as the prompt of the same message has; past the context too."""
    say("Yes.")
    for more in ({}, {"system": "Be brief."}, {"tools": []}):
        asked = {key: value for key, value in (ASKED | more).items() if key != "max_tokens"}
        count = client.messages.count_tokens(**asked)
        MessageTokensCount.model_validate(count.model_dump(), strict=True)
        usage = client.messages.create(**asked, max_tokens=2).usage
        assert count.input_tokens == usage.input_tokens
    long = [{"role": "user", "content": "so " * 1500}]
    assert client.messages.count_tokens(**asked | {"messages": long}).input_tokens > 1024
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as raised:
        client.messages.create(**ASKED | {"messages": long})
    assert raised.value.type == "invalid_request_error"


def test_a_stream_that_is_left(client, served):
    """Its row is free for others, from within the stream's first events on."""
    asked = ASKED | {"tools": [], "max_tokens": 900}
    for events in (1, 6):
        with client.messages.create(
            **asked, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            for _ in range(events):
                next(stream)
        assert served.idle(5)


def changed(**tool):
    return {"tools": [{**TOOLS[0], **tool}]}


def said(*blocks, role="assistant"):
    return {"messages": [*TALK, {"role": role, "content": list(blocks)}]}


def use(**change):
    return {"type": "tool_use", "id": "a", "name": "now", "input": {}, **change}


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "7"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
DEEP = json.loads('{"a":' * 900 + "1" + "}" * 900)
NOT_COUNTED = {"max_tokens", "temperature", "stop_sequences", "output_config"}
BAD = [  # fields that are changed, and words of the error
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role 'tool' does not exist"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5; give text or"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
    (said(5), "messages[1].content[0] is 5"),
    (said({"type": "text"}), "messages[1].content[0].text is None; give text"),
    (said(IMAGE, role="user"), "messages[1].content[0] is of type 'image'; this server takes text and tool_result"),
    (said({"type": "document"}, role="user"), "of type 'document'"),
    (said(use(), role="user"), "of type 'tool_use'"),
    (said(RESULT), "of type 'tool_result'"),
    (said(use(input=[])), "messages[1].content[0].input is []; give an object"),
    (said(use(input='{"a')), "input is '{\"a'; give an object"),
    (said(use(name=None)), "name is None; give text"),
    (said(use(input=DEEP)), "prompt is too long: "),
    (said(RESULT, role="user"), "messages[1].content[0]: no call before it has the id 'a'"),
    (said({**RESULT, "tool_use_id": [1]}, role="user"), "has the id [1]"),
    (said({**RESULT, "content": [IMAGE]}, role="user"), "content[0].content[0] is of type 'image'"),
    ({"system": [IMAGE]}, "system[0] is of type 'image'"),
    ({"system": 5}, "system: "),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "two are named weather"),
    ({"tools": [{**TOOLS[0], "name": f"t{i}"} for i in range(1000)]}, "1000 were given; give at most 128"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is of type 'web_search_20250305'"),
    ({"tools": [OPENAI_TOOLS[0]]}, "tools[0] is of type 'function'"),
    ({"tools": [5]}, "tools[0] is 5"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
    (changed(name="a b"), "tools[0].name is 'a b'"),
    (changed(name="\ud800"), "1 to 64"),
    (changed(input_schema={"type": "obj"}), "tools[0].input_schema is no JSON schema: it.type is 'obj'"),
    (changed(input_schema=[]), "tools[0].input_schema is no JSON schema"),
    (changed(strict="yes"), "tools[0].strict is 'yes'"),
    ({"tool_choice": {"type": "always"}}, "tool_choice.type 'always' does not exist; known: any, auto, none, tool"),
    ({"tool_choice": {"type": "tool", "name": "wether"}}, "did you mean 'weather'"),
    ({"tool_choice": {"type": "any"}, "tools": []}, 'tool_choice "any" goes with tools'),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use is 1"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "obj"}}}}, "output_config: "),
    ({"stop_sequences": [5]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences has 65"),
    ({"temperature": -1}, "temperature"),
    ({"container": "x"}, "container is not supported"),
    ({"model": "plain"}, "knows no tools"),
    ({"model": "unknown"}, "is not known"),
]  # fmt: skip


def test_wrong_fields_are_named(client, served):
    before = served.engines[0].stats["requests_total"]
    head = {"content-type": "application/json"}
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for change, words in BAD:
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                if path.endswith("tokens") and ({*change} & NOT_COUNTED or "too long" in words):
                    continue
                body = json.dumps({**ASKED, **change})
                answer = http.post(path, content=body, headers=head)
                assert answer.status_code == 400, (change, answer.text)
                error = answer.json()
                assert error["type"] == "error" and error["error"].keys() == {"type", "message"}
                assert error["error"]["type"] == "invalid_request_error"
                assert words in error["error"]["message"], (words, error)
    assert served.engines[0].stats["requests_total"] == before


def test_errors_are_the_clients(client, served):
    """Each status is an exception of its class; elsewhere errors are OpenAI's."""
    with pytest.raises(anthropic.NotFoundError, match="did you mean 'hermes'") as raised:
        client.messages.create(**ASKED | {"model": "herme"})
    assert raised.value.type == "not_found_error"
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for path, status, kind in (
            ("/v1/messages/batches", 404, "not_found_error"),
            ("/v1/messages", 405, "invalid_request_error"),
        ):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        wrong = http.post("/v1/messages", content=b"{")
        assert wrong.status_code == 400 and wrong.json()["type"] == "error"
        host = http.post("/v1/messages", json=ASKED, headers={"host": "evil.example"})
        assert host.status_code == 403 and host.json()["error"]["type"] == "permission_error"
        other = http.get("/v1/messagesx").json()
        assert "type" not in other and other["error"]["code"] is None


def test_errors_of_the_gates(served, tmp_path):
    """The key, the body and a full queue."""
    from accel.serve.limits import Limits
    from accel.serve.models import Served

    from . import serve_case

    model, scripted = served.models[0], served.engine
    found = [Served("hermes", model, scripted)]
    limits = Limits(body=4096)
    with (
        serve_case.listening(found, access=Access("s3cret"), limits=limits) as server,
        anthropic.Anthropic(base_url=server.url, api_key="s3cret", max_retries=0) as client,
    ):
        assert client.messages.create(**ASKED | {"max_tokens": 2}).role == "assistant"
        with pytest.raises(anthropic.AuthenticationError) as raised:
            client.with_options(api_key="other").messages.create(**ASKED)
        assert raised.value.type == "authentication_error"
        by_token = anthropic.Anthropic(base_url=server.url, auth_token="s3cret", max_retries=0)
        with by_token:
            assert by_token.messages.count_tokens(model="hermes", messages=TALK).input_tokens
        large = [{"role": "user", "content": "a" * 5000}]
        with pytest.raises(anthropic.APIStatusError) as raised:
            client.messages.create(**ASKED | {"messages": large})
        assert raised.value.status_code == 413
        assert raised.value.body["error"]["type"] == "request_too_large"
        streams = [
            client.messages.create(**ASKED | {"tools": [], "max_tokens": 900}, stream=True,
                                   extra_body={"ignore_eos": True})
            for _ in range(10)
        ]  # fmt: skip
        with pytest.raises(anthropic.RateLimitError) as raised:
            client.messages.create(**ASKED)
        assert raised.value.type == "rate_limit_error"
        for stream in streams:
            stream.close()
    assert served.idle()


def test_an_error_within_a_stream(served, client):
    """The time is over: the event is Anthropic's, and the last."""
    from accel.serve.limits import Limits
    from accel.serve.models import Served

    from . import serve_case

    found = [Served("hermes", served.models[0], served.engine)]
    with (
        serve_case.listening(found, limits=Limits(seconds=0.2)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
    ):
        asked = ASKED | {"tools": [], "max_tokens": 900}
        stream = client.messages.create(**asked, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(anthropic.APIStatusError) as raised:
            for _ in stream:
                pass
        assert raised.value.body["error"]["type"] == "timeout_error"
    assert threading.active_count() < 60 and served.idle()
