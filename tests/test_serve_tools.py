"""Tools in chat completions, with the openai client: a forced call follows its schema, a reply's tokens are calls,
reasoning and text, whole and streamed, and each mistake is an error of OpenAI's.
"""

import json
from functools import partial

import anthropic
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessage

import accel
from accel.runtime.serve.reply.family import families

from . import serve_case, serve_tools_case
from .serve_tools_case import TOOLS, WEATHER

NO_THOUGHTS = {"4093": -100}  # <think>
TALK = [{"role": "user", "content": "Weather in Oslo?"}]
ASKED = {"model": "hermes", "messages": TALK, "tools": TOOLS, "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve_tools_case.serving(tmp_path_factory.mktemp("tools")) as running:
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


def both(client, **asked):
    """The message and the end of a reply, whole; the streamed one is the same."""
    whole = client.chat.completions.create(**ASKED | asked).choices[0]
    message = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    chunks = list(client.chat.completions.create(**ASKED | asked, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    for chunk in chunks:
        (choice,) = chunk.choices
        message["role"] = choice.delta.role or message["role"]
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(message["tool_calls"]):
                assert call.id and call.type == "function" and call.function.arguments == ""
                message["tool_calls"].append([call.function.name, ""])
            else:
                assert (call.id, call.function.name) == (None, None)
            assert call.index == len(message["tool_calls"]) - 1
            message["tool_calls"][call.index][1] += call.function.arguments
    assert choice.finish_reason == whole.finish_reason
    assert message == {
        "role": "assistant",
        "content": whole.message.content or "",
        "reasoning_content": getattr(whole.message, "reasoning_content", ""),
        "tool_calls": [[c.function.name, c.function.arguments] for c in whole.message.tool_calls or []],
    }  # fmt: skip
    return whole.message, whole.finish_reason


def calls(message):
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]


def holds(arguments):
    return (
        {*arguments} == {"city", "days"}
        and arguments["city"] in ("Oslo", "Rome")
        and arguments["days"] in range(10)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["hermes", "mistral"])
def test_a_forced_call(client, model):
    """By name, and any of them: its arguments follow the schema."""
    named = {"type": "function", "function": {"name": "weather"}}
    message, reason = both(client, model=model, tool_choice=named, logit_bias=NO_THOUGHTS)
    ((name, arguments),) = calls(message)
    assert (name, reason, message.content) == ("weather", "tool_calls", None) and holds(arguments)
    for seed in (3, 4):
        message, reason = both(
            client,
            model=model,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            logit_bias=NO_THOUGHTS,
        )
        ((name, arguments),) = calls(message)
        assert reason == "tool_calls" and (holds(arguments) if name == "weather" else name == "now")
    (free,) = client.chat.completions.create(**ASKED | {"model": model}, max_tokens=30).choices
    assert free.message.tool_calls is None, "control: this model calls nothing by itself"


def test_two_turns(client, served, say):
    """The call and its answer go back, and the template writes them as the model did."""
    named = {"type": "function", "function": {"name": "weather"}}
    first, _ = both(client, tool_choice=named, logit_bias=NO_THOUGHTS)
    answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "7 °C"}
    for said in (
        first.model_dump(),
        {"role": "assistant", "tool_calls": first.model_dump()["tool_calls"]},
    ):
        say("It is 7 °C.")
        message, reason = both(client, messages=[*TALK, said, answer])
        assert (message.content, message.tool_calls, reason) == ("It is 7 °C.", None, "stop")
        prompt = served.models[0].tokenizer.decode(served.engine.prompt)
        called = json.dumps({"name": "weather", "arguments": calls(first)[0][1]})
        assert f"<tool_call>\n{called}\n</tool_call>" in prompt and "tool: 7 °C" in prompt
        assert '"description": "Weather."' in prompt and "None" not in prompt


def test_calls_of_a_free_reply(client, say):
    text = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
    more = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    wanted = [("weather", {"city": "Oslo", "days": 1}), ("now", {})]
    say(text, more)
    message, reason = both(client)
    assert (message.content, calls(message), reason) == ("Let me see.", wanted, "tool_calls")
    assert len({call.id for call in message.tool_calls}) == 2
    say([text])
    message, reason = both(client)
    assert (message.content, message.tool_calls, reason) == (text, None, "stop")
    say(text)
    message, reason = both(client, tool_choice="none")
    assert (message.content, message.tool_calls, reason) == (text, None, "stop")
    say('Yes [TOOL_CALLS] [{"name": "now", "arguments": {}}]')
    message, reason = both(client, model="mistral")
    assert (message.content, calls(message), reason) == ("Yes", [("now", {})], "tool_calls")
    assert len(message.tool_calls[0].id) == 9


def test_an_unfinished_call(client, say, served):
    say('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>')
    size = len(served.engine.script)
    for tokens in (1, size // 2, size - 8):
        message, reason = both(client, max_tokens=tokens)
        assert reason == "length"
        if message.tool_calls:
            ((name, arguments),) = [
                (c.function.name, c.function.arguments) for c in message.tool_calls
            ]
            assert name == "weather" and '{"city": "Oslo", "days": 1}'.startswith(arguments)
        else:
            assert message.content.startswith("<tool_call>")
    assert message.tool_calls and arguments != '{"city": "Oslo", "days": 1}'


def test_a_stop_string_before_a_call(client, say):
    """A stop string that is sure only at the marker ends the reply before it."""
    say('abc<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    message, reason = both(client, stop=["bc", "abcd"])
    assert (message.content, message.tool_calls, reason) == ("a", None, "stop")
    message, reason = both(client, stop=["abcd"])
    assert (message.content, calls(message), reason) == ("abc", [("now", {})], "tool_calls")


def test_strict_tools_and_one_call_at_most(client):
    """Text may come, and a call that begins follows its schema: the marker is forced, the rest is the model's."""
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    begin = {**NO_THOUGHTS, "4091": 100}  # <tool_call>
    message, reason = both(client, logit_bias=begin, max_tokens=120, tools=strict)
    assert reason == "length" and len(message.tool_calls) > 1
    message.tool_calls.pop()
    assert all(name == "weather" and holds(arguments) for name, arguments in calls(message))
    one = {"parallel_tool_calls": False, "tools": TOOLS[:1]}
    message, reason = both(client, logit_bias=begin, max_tokens=120, **one)
    ((_, arguments),) = calls(message)
    assert reason == "tool_calls" and holds(arguments)


def test_reasoning(client, say, served):
    say("<think>\nLet me think.\n</think>\n\nYes.")
    message, reason = both(client)
    assert (message.content, message.reasoning_content, reason) == ("Yes.", "Let me think.", "stop")
    say("Let me think.\n</think>\n\nYes.")
    opened = {"chat_template_kwargs": {"opening": "<think>\n"}}
    message, reason = both(client, extra_body=opened, tools=openai.omit)
    assert (message.content, message.reasoning_content, reason) == ("Yes.", "Let me think.", "stop")
    for effort, told in (("low", "assistant:low"), ("none", "assistant:noneFalse")):
        say("Yes.")
        both(client, reasoning_effort=effort)
        assert served.models[0].tokenizer.decode(served.engine.prompt).endswith(told)
    say(["<think>a</think>b"])
    assert both(client)[0].content == "<think>a</think>b"


def test_channels_without_tools(client, say):
    """Each message says in its header what it is; an answer of a form is the last one."""
    say("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.")
    message, reason = both(client, model="harmony", tools=openai.omit)
    assert (message.content, message.reasoning_content, reason) == ("Yes.", "hm", "stop")
    say("<|channel|>final<|message|>", '{"a": 1}')
    form = {"type": "json_object"}
    message, _ = both(client, model="harmony", tools=openai.omit, response_format=form)
    assert message.content == '{"a": 1}'


def test_an_answer_of_a_form_beside_tools(client):
    """With tools and reasoning the answer is JSON still."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    ban = {"4091": -100, "4093": -100}
    for tools in (TOOLS, openai.omit):
        message, reason = both(client, tools=tools, response_format=form, logit_bias=ban)
        assert json.loads(message.content)["a"] in (1, 2) and reason == "stop"


def test_log_probabilities_of_calls(client, say, served):
    """Of each token, the markers too."""
    say('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    size = len(served.engine.script) + 1
    asked = {**ASKED, "logprobs": True, "top_logprobs": 1}
    (whole,) = client.chat.completions.create(**asked).choices
    assert len(whole.logprobs.content) == size
    chunks = client.chat.completions.create(**asked, stream=True)
    told = [c.choices[0].logprobs for c in chunks]
    assert sum(len(one.content) for one in told if one) == size


def changed(**function):
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def forced(schema):
    return {**changed(parameters={"properties": {"a": schema}}), "tool_choice": "required"}


CALLED = {"type": "function", "id": "a", "function": {"name": "now", "arguments": "{}"}}


def history(**change):
    call = {**CALLED, "function": {**CALLED["function"], **change}}
    return {"messages": [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]}


DEEP = {"type": "object"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
BAD = [  # fields that are changed, the field that the error names, and words of it
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two are named weather"),
    ({"tools": [TOOLS[0]] * 1000}, "tools", "1000 were given; give at most 128"),
    ({"tools": [5]}, "tools", "tools[0]: its type is 5"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is no object"),
    ({"tools": [{"type": "web_search"}]}, "tools", "takes \"function\" only"),
    (changed(name="a b"), "tools", "tools[0].function.name is 'a b'"),
    (changed(name="x" * 65), "tools", "1 to 64"),
    (changed(name="\ud800"), "tools", "1 to 64"),
    (changed(parameters=[]), "tools", "neither an object"),
    (changed(parameters={"type": "obj"}), "tools", "it.type is 'obj'"),
    (changed(parameters={"type": "string"}), "tools", "not of type \"object\""),
    (changed(parameters={"properties": {"a": {"type": "int"}}}), "tools", "it.properties.a.type is 'int'"),
    (changed(parameters={"properties": []}), "tools", "it.properties is []"),
    (changed(parameters={"required": "a"}), "tools", "it.required is 'a'"),
    (changed(parameters={"properties": {"a": {"minimum": "1"}}}), "tools", "it.properties.a.minimum"),
    (changed(parameters={"anyOf": []}), "tools", "it.anyOf"),
    (changed(parameters={"properties": {"a": 5}}), "tools", "it.properties.a is 5"),
    (changed(parameters=DEEP), "tools", "more than 32 levels"),
    (changed(strict="yes"), "tools", "strict is 'yes'"),
    (changed(description=5), "tools", "description is 5"),
    ({"tool_choice": "always"}, "tool_choice", "tool_choice 'always' does not exist; known: auto"),
    ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "tool_choice", "did you mean 'weather'"),
    ({"tool_choice": 5}, "tool_choice", "none of"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "goes with tools"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"model": "plain"}, "tools", "knows no tools"),
    ({"model": "unknown"}, "tools", f"is not known (known: {', '.join(families())})"),
    (history(arguments="{a"), "messages", "messages[1].tool_calls[0].function.arguments is no JSON"),
    (history(arguments="[]"), "messages", "is no JSON object"),
    (history(name=None), "messages", "messages[1].tool_calls[0] is no call"),
    ({"messages": [*TALK, {"role": "assistant", "tool_calls": 5}]}, "messages", "is no list"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "messages[0].content is null"),
    (forced({"const": "</think>"}), "tools", "'</think>'"),
    (forced({"$ref": "#/$defs/b"}), "tools", "tools: "),
]  # fmt: skip


def test_wrong_fields_are_named(client, served):
    before = served.engines[0].stats["requests_total"]
    head = {"content-type": "application/json"}
    with httpx.Client(base_url=served.url, timeout=60) as http:
        for change, param, words in BAD:
            body = json.dumps({**ASKED, "max_tokens": 4, **change})
            answer = http.post("/v1/chat/completions", content=body, headers=head)
            error = answer.json().get("error", {})
            assert (answer.status_code, error.get("param")) == (400, param), (change, answer.text)
            assert words in error["message"], (words, error)
        none = http.post("/v1/completions", json={"prompt": "a"})
        assert (
            none.status_code == 400
            and "give one of hermes, mistral" in none.json()["error"]["message"]
        )
    assert served.engines[0].stats["requests_total"] == before


def test_a_developer_speaks_as_the_system(client, served, say):
    """As in the other two APIs: at the beginning it is the system message, later the user's."""

    def prompt(*talk):
        say("Yes.")
        messages = [{"role": role, "content": content} for role, content in talk]
        both(client, messages=messages, tools=openai.omit)
        return served.models[0].tokenizer.decode(served.engine.prompt)

    assert prompt(("developer", "Be kind."), ("user", "Hi")) == "system: Be kind.user: Hiassistant:"
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    told = prompt(("system", "Be brief."), ("developer", parts), ("developer", ""), ("user", "Hi"))
    assert told == "system: Be brief.\n\nBe kind.user: Hiassistant:"
    told = prompt(
        ("user", "Hi"), ("assistant", "Yes?"), ("developer", "Be kind."), ("user", "Say.")
    )
    assert told == "user: Hiassistant: Yes?user: Be kind.\n\nSay.assistant:"
    assert prompt(("user", "a"), ("user", "b")) == "user: auser: bassistant:", "control"


def test_templates_are_told_of_known_keys_only(client, served, say):
    """What is not known may be nested more deeply than a template writes; its names are told in the header."""
    deep, plain = json.loads('{"a":' * 900 + "1" + "}" * 900), TOOLS[0]["function"]
    tools = [{**TOOLS[0], "x": deep, "function": {**plain, "y": deep, "cache": 1}}, TOOLS[1]]
    with httpx.Client(base_url=served.url, timeout=60) as http:
        found = []
        for offered in (TOOLS, tools):
            say("Yes.")
            answer = http.post("/v1/chat/completions", json={**ASKED, "tools": offered})
            assert answer.status_code == 200, answer.text
            found.append((served.engine.prompt.tolist(), answer.headers.get("x-accel-ignored")))
        names = "tools.0.x, tools.0.function.y, tools.0.function.cache"
        assert found == [(found[0][0], None), (found[0][0], names)]
        asked = {"model": "hermes", "messages": TALK, "tools": tools}
        assert http.post("/tokenize", json=asked).json()["tokens"] == found[0][0]


def test_messages_of_clients_are_taken(client):
    """As the openai client gives them back, with fields that are null."""
    said = ChatCompletionMessage(role="assistant", content=None, tool_calls=None, refusal=None)
    talk = [*TALK, said.model_dump(), {"role": "user", "content": "Well?"}]
    assert client.chat.completions.create(**ASKED | {"messages": talk}, max_tokens=2).choices
    none = history(arguments="")["messages"]
    assert client.chat.completions.create(**ASKED | {"messages": none}, max_tokens=2).choices


QUESTIONS = (
    ("Oslo", 2, "What will the weather be in Oslo in 2 days?"),
    ("Rome", 5, "And in Rome in 5 days?"),
)
LAST = "Say in one sentence what the weather will be."
CITIES = {**WEATHER, "properties": {**WEATHER["properties"], "city": {"type": "string"}}}
CITY_WEATHER = {"name": "weather", "description": "The weather of a city."}


@pytest.fixture(scope="module")
def qwen(real_model, tmp_path_factory):
    """A server of Qwen2.5-Coder-0.5B."""
    model, folder = real_model("qwen-coder-0.5b"), tmp_path_factory.mktemp("real")
    options = {"max_context": 1024, "max_batch": 1, "verify": False}
    accel.optimize(model, "base", out=folder / "qwen", **options).close()
    with serve_case.running([folder / "qwen"]) as running:
        yield running


@pytest.mark.long
def test_a_real_model_in_two_turns(qwen):
    """Qwen2.5-Coder calls a tool because it must, and answers with what the tool said."""
    tools = [{"type": "function", "function": {**CITY_WEATHER, "parameters": CITIES}}, TOOLS[1]]
    asked = {"tools": tools, "temperature": 0, "max_tokens": 80, "model": "qwen"}
    must = {"tool_choice": "required", "parallel_tool_calls": False}
    talk = []
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="any", max_retries=0) as client:
        for city, days, question in QUESTIONS:
            talk += [{"role": "user", "content": question}]
            called, reason = both(client, messages=talk, **asked, **must)
            wanted = ("weather", {"city": city, "days": days})
            assert (reason, calls(called)) == ("tool_calls", [wanted])
            result = {"tool_call_id": called.tool_calls[0].id, "content": "Hail, 7 °C."}
            talk += [called.model_dump(), {"role": "tool", **result}]
        talk += [{"role": "user", "content": LAST}]
        said, reason = both(client, messages=talk, **asked, tool_choice="none")
        assert reason == "stop" and "7" in said.content


@pytest.mark.long
def test_a_real_model_in_anthropics_messages(qwen):
    """The same conversation, streamed."""
    tools = [
        {**CITY_WEATHER, "input_schema": CITIES},
        {"name": "now", "input_schema": {"type": "object"}},
    ]
    asked = {"tools": tools, "max_tokens": 80, "model": "qwen", "extra_body": {"temperature": 0}}
    must, talk = {"type": "any", "disable_parallel_tool_use": True}, []
    with anthropic.Anthropic(base_url=qwen.url, api_key="any", max_retries=0) as client:
        for city, days, question in QUESTIONS:
            talk += [{"role": "user", "content": question}]
            with client.messages.stream(**asked, messages=talk, tool_choice=must) as stream:
                message = stream.get_final_message()
            (call,) = message.content
            assert (call.name, call.input) == ("weather", {"city": city, "days": days})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "Hail, 7 °C."}
            talk += [{"role": "assistant", "content": message.content}]
            talk += [{"role": "user", "content": [result]}]
        talk[-1]["content"].append({"type": "text", "text": LAST})
        said = client.messages.create(**asked, messages=talk, tool_choice={"type": "none"})
        assert said.stop_reason == "end_turn" and "7" in said.content[0].text


@pytest.mark.long
def test_a_real_model_in_openais_responses(qwen):
    """The same conversation, streamed."""
    tools = [
        {"type": "function", **CITY_WEATHER, "parameters": CITIES},
        {"type": "function", "name": "now"},
    ]
    asked = {"tools": tools, "temperature": 0, "max_output_tokens": 80, "model": "qwen"}
    must, talk = {"tool_choice": "required", "parallel_tool_calls": False}, []
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="any", max_retries=0) as client:
        for city, days, question in QUESTIONS:
            talk += [{"role": "user", "content": question}]
            with client.responses.stream(**asked, input=talk, **must) as stream:
                (call,) = stream.get_final_response().output
            assert (call.name, json.loads(call.arguments)) == (
                "weather",
                {"city": city, "days": days},
            )
            output = {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": "Hail, 7 °C.",
            }
            talk += [call.model_dump(exclude={"parsed_arguments"}, exclude_none=True), output]
        talk += [{"role": "user", "content": LAST}]
        said = client.responses.create(**asked, input=talk, tool_choice="none")
        assert said.status == "completed" and "7" in said.output_text
