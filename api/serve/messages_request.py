"""Anthropic's requests for messages -> requests for chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from accel.ir.errors import shown, unknown
from accel.serve import requests
from accel.serve.errors import ApiError, in_words
from accel.serve.history import History, as_chat, member
from accel.serve.models import Served
from accel.serve.requests import Asked
from accel.serve.schemas import ChatRequest, ForReply, Listed, Refused, Schema, Unused

_WORDS = {  # of chats -> of this API
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
    ".function.parameters": ".input_schema",
    ".function": "",
    '"required"': '"any"',
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(Schema):
    """Whether the model thinks before it answers, where its chat template leaves that open."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Unused = None


class OutputFormat(Schema):
    """A schema that the text must follow."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(Schema):
    """What the answer is."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(ForReply):
    """POST /v1/messages/count_tokens."""

    messages: Listed[dict[str, Any]]
    system: str | Listed[dict[str, Any]] | None = None
    tools: Listed[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the place of an older version
    stop_sequences: Listed[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    container: Refused = None
    mcp_servers: Refused = None
    cache_control: Unused = None
    metadata: Unused = None
    inference_geo: Unused = None
    speed: Unused = None
    user_profile_id: Unused = None
    workspace_id: Unused = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int


def read(asked: MessagesRequest, served: Served, adapter: str | None) -> Asked:
    """What is asked of an engine. Raises ApiError, AccelError."""
    with in_words(_WORDS):
        chat = _chat(asked, max_completion_tokens=asked.max_tokens)
        return requests.of_chat(chat, served, adapter, words=_WORDS, ignored=_ignored(asked))


def count(asked: CountRequest, served: Served) -> int:
    """Tokens of the prompt. Raises ApiError, AccelError."""
    with in_words(_WORDS):
        return len(requests.chat_tokens(_chat(asked), served))


def _ignored(asked: CountRequest) -> Sequence[str]:
    budget = asked.thinking is not None and asked.thinking.budget_tokens is not None
    return ["thinking.budget_tokens"] if budget else []


def _chat(asked: CountRequest, **fields: Any) -> ChatRequest:
    history = History("messages")
    if asked.system:
        history.system(_texts(asked.system, "system", "system"))
    for i, message in enumerate(asked.messages):
        _message(message, f"messages[{i}]", history)
    choice, several = _choice(asked.tool_choice)
    config = asked.output_config or OutputConfig()
    form = config.format or asked.output_format
    if form is not None:
        schema = {"name": "answer", "schema": form.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    variables = dict(asked.chat_template_kwargs or {})
    if asked.thinking is not None:
        variables.setdefault("enable_thinking", asked.thinking.type != "disabled")
    return as_chat(
        asked,
        history,
        **fields,
        stop=asked.stop_sequences,
        tools=None if asked.tools is None else [_tool(*one) for one in enumerate(asked.tools)],
        tool_choice=choice,
        parallel_tool_calls=several,
        reasoning_effort="xhigh" if config.effort == "max" else config.effort,
        chat_template_kwargs=variables,
        goes_on=True,
    )


def _message(message: Mapping[str, Any], place: str, history: History) -> None:
    """A message, and all that its blocks hold. Raises ApiError."""
    role, content = message.get("role"), message.get("content")
    say = {"user": history.user, "assistant": history.said, "system": history.system}.get(str(role))
    if say is None:
        told = unknown(f"{place}.role", str(role), ("user", "assistant", "system"))
        raise ApiError(400, told, param="messages")
    if isinstance(content, str):
        return say(content)
    if not isinstance(content, list):
        told = f"{place}.content is {shown(content)}; give text or a list of blocks"
        raise ApiError(400, told, param="messages")
    for j, block in enumerate(content):
        where = f"{place}.content[{j}]"
        kind = _kind(block, where, "messages")
        if kind == "text":
            say(member(block, "text", str, where, "messages", needed=True))
        elif kind == "tool_result" and role == "user":
            _result(block, where, history)
        elif kind == "tool_use" and role == "assistant":
            identity, name = (
                member(block, key, str, where, "messages", needed=True) for key in ("id", "name")
            )
            history.call(identity, name, member(block, "input", dict, where, "messages"))
        elif kind == "thinking" and role == "assistant":
            history.thought(member(block, "thinking", str, where, "messages"))
        elif kind != "redacted_thinking" or role != "assistant":
            known = {"user": "text and tool_result", "system": "text"}
            takes = known.get(str(role), "text, thinking, redacted_thinking and tool_use")
            told = f"{where} is of type {shown(kind)}; this server takes {takes} of the {role}"
            raise ApiError(400, told, param="messages")


def _result(block: Mapping[str, Any], place: str, history: History) -> None:
    """What a call gave; a template has no place for whether it failed."""
    content = block.get("content")
    text = _texts(content, f"{place}.content", "messages") if content else ""
    if member(block, "is_error", bool, place, "messages"):
        text = f"Error: {text}"
    history.result(block.get("tool_use_id"), text, place)


def _texts(content: Any, place: str, param: str) -> str:
    """A text, or blocks of it. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} is {shown(content)}; give text or blocks", param=param)
    found = []
    for j, block in enumerate(content):
        if (kind := _kind(block, where := f"{place}[{j}]", param)) != "text":
            told = f"{where} is of type {shown(kind)}; this server takes text here"
            raise ApiError(400, told, param=param)
        found.append(member(block, "text", str, where, param, needed=True))
    return "\n\n".join(found)


def _kind(block: Any, place: str, param: str) -> Any:
    if not isinstance(block, Mapping):
        told = f'{place} is {shown(block)}; give {{"type": "text", "text": …}}'
        raise ApiError(400, told, param=param)
    return block.get("type")


def _tool(i: int, tool: Any) -> dict[str, Any]:
    """A tool as chats have it. Raises ApiError for one that Anthropic's own servers or models know."""
    if not isinstance(tool, Mapping):
        raise ApiError(400, f"tools[{i}] is {shown(tool)}; give an object", param="tools")
    if tool.get("type") not in (None, "custom"):
        told = f"tools[{i}] is of type {shown(tool['type'])}, which this server does not have; "
        told += "give tools with an input_schema"
        raise ApiError(400, told, param="tools")
    if "input_schema" not in tool:
        raise ApiError(400, f"tools[{i}].input_schema is missing; give it", param="tools")
    function = {key: tool[key] for key in ("name", "description", "strict") if key in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """The choice of a tool, and whether there may be several calls. Raises ApiError."""
    if choice is None:
        return None, None
    alone = member(choice, "disable_parallel_tool_use", bool, "tool_choice", "tool_choice")
    several = False if alone else None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, several
    if kind not in _CHOICES:
        told = unknown("tool_choice.type", str(kind), (*_CHOICES, "tool"))
        raise ApiError(400, told, param="tool_choice")
    return _CHOICES[kind], several
