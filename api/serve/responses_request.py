"""OpenAI's requests for responses -> requests for chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from accel.ir.errors import shown, unknown
from accel.serve import requests
from accel.serve.errors import ApiError, in_words, unsupported
from accel.serve.history import History, as_chat, member
from accel.serve.models import Served
from accel.serve.requests import Asked
from accel.serve.schemas import ForReply, Listed, Refused, Schema, Unused
from accel.serve.tools import arguments_of

OPAQUE = "reasoning.encrypted_content"  # of `include`
SEALED = "accel:"  # what such a content of this server begins with
_WORDS = {  # of chats -> of this API
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    ".function": "",
    '"function": {"name": …}': '"name": …',
}
_STATELESS = ("previous_response_id", "conversation", "background", "prompt")
_TEXTS = ("input_text", "output_text", "text")
_KEYS = ("description", "parameters", "strict")  # of a function, beside its name
_JOIN = "__"  # between the name of a namespace and that of its function


class TextFormat(Schema):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class TextOptions(Schema):
    """Of the answer."""

    format: TextFormat | None = None
    verbosity: Unused = None


class Reasoning(Schema):
    """`summary`: whether the reasoning is given in the place of a summary too."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Unused = None


class ResponsesRequest(ForReply):
    """POST /v1/responses. The four after `include` ask for what a server stores; this one stores nothing."""

    input: str | Listed[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Listed[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Listed[str] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None  # as OpenAI's
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Refused = None
    max_tool_calls: Unused = None  # of tools that run on a server
    stream_options: Unused = None
    client_metadata: Unused = None
    user: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_retention: Unused = None


def read(asked: ResponsesRequest, served: Served, adapter: str | None) -> Asked:
    """What is asked of an engine. Raises ApiError, AccelError."""
    for name in _STATELESS:
        if getattr(asked, name):
            told = f"{name} is not supported: this server stores nothing; send all items as input"
            raise ApiError(400, told, param=name, code="unsupported_parameter")
    offered = Offered.of(asked.tools or [])
    words = {**_WORDS, **{f"tools[{i}]": place for i, place in enumerate(offered.places)}}
    with in_words(words):
        turns = _turns(asked)
        reasoning = asked.reasoning or Reasoning()
        chat = as_chat(
            asked,
            turns,
            max_completion_tokens=asked.max_output_tokens,
            tools=None if asked.tools is None else offered.chat,
            tool_choice=_choice(asked.tool_choice),
            parallel_tool_calls=asked.parallel_tool_calls,
            response_format=_format(asked.text),
            reasoning_effort=reasoning.effort,
            chat_template_kwargs=asked.chat_template_kwargs,
        )
        ignored = [*offered.ignored, *_ignored(asked)]
        return requests.of_chat(chat, served, adapter, words=words, ignored=ignored)


def _ignored(asked: ResponsesRequest) -> Sequence[str]:
    found = []
    for name in asked.include or ():
        if name == "message.output_text.logprobs":
            raise unsupported(f"include: {name}")
        found += [] if name == OPAQUE else [f"include.{name}"]
    return [*found, *(["truncation"] if asked.truncation == "auto" else [])]


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """The form of the answer, as chats have it."""
    if text is None or text.format is None:
        return None
    form, found = text.format, {"type": text.format.type}
    if form.type != "json_schema":
        return found
    if form.json_schema is None:
        raise ApiError(400, "text.format.schema is missing; give it", param="text")
    return {**found, "json_schema": {"name": form.name, "schema": form.json_schema}}


@dataclass
class Offered:
    """The tools of a request.

    Attributes:
        functions: as the client gave them, with the name of each one's namespace or "", by the name that the model
            knows them by.
        places: of the functions in the request.
        shown: those of the tools that something comes of, as a response repeats them.
        ignored: the places and types of those that are no functions. Codex offers some of them always, and to offer
            one is not to ask for its use; the model is not told of it.
    """

    functions: dict[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, tools: Sequence[Any]) -> Offered:
        """Raises ApiError."""
        found = cls()
        for i, tool in enumerate(tools):
            found._add(tool, f"tools[{i}]", "")
        return found

    def _add(self, tool: Any, place: str, namespace: str) -> None:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            told = f'{place} is {shown(tool)}; give {{"type": "function", "name": …}}'
            raise ApiError(400, told, param="tools")
        if kind == "namespace" and not namespace:
            space = member(tool, "name", str, place, "tools", needed=True)
            about = member(tool, "description", str, place, "tools")
            self.shown.append({"type": kind, "name": space, "description": about, "tools": []})
            for j, one in enumerate(member(tool, "tools", list, place, "tools")):
                self._add(one, f"{place}.tools[{j}]", space)
        elif kind == "function":
            name = member(tool, "name", str, place, "tools", needed=True)
            if (full := full_name(namespace, name)) in self.functions:
                raise ApiError(400, f"tools: two are named {full}; rename one", param="tools")
            self.functions[full] = (namespace, tool)
            self.places.append(place)
            known = {"type": kind, **{key: tool.get(key) for key in ("name", *_KEYS)}}
            (self.shown[-1]["tools"] if namespace else self.shown).append(known)
        else:
            self.ignored.append(f"{place.replace('[', '.').replace(']', '')}.{kind}")

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The functions as chats have them."""
        return [
            {"type": "function", "function": {"name": name, **{k: tool[k] for k in _KEYS if k in tool}}}
            for name, (_, tool) in self.functions.items()
        ]  # fmt: skip


def full_name(namespace: str, name: str) -> str:
    """The name that the model knows a function of a namespace by."""
    return f"{namespace.removesuffix(_JOIN)}{_JOIN}{name}" if namespace else name


def _choice(choice: Any) -> Any:
    """The choice of a tool, as chats have it. Raises ApiError."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "function":
        told = f"tool_choice is of type {shown(choice.get('type'))}; this server takes "
        raise ApiError(
            400, f'{told}"auto", "none", "required" and {{"type": "function", "name": …}}',
            param="tool_choice",
        )  # fmt: skip
    name = full_name(
        member(choice, "namespace", str, "tool_choice", "tool_choice"),
        member(choice, "name", str, "tool_choice", "tool_choice", needed=True),
    )
    return {"type": "function", "function": {"name": name}}


def _turns(asked: ResponsesRequest) -> History:
    """Raises ApiError."""
    turns = History("input")
    if asked.instructions:
        turns.system(asked.instructions)
    if isinstance(asked.input, str):
        turns.user(asked.input)
        return turns
    for i, item in enumerate(asked.input):
        _item(item, f"input[{i}]", turns)
    return turns


def _item(item: Mapping[str, Any], place: str, turns: History) -> None:
    """One item of the input. Raises ApiError."""
    kind = item.get("type", "message")
    if kind == "message":
        say = {"user": turns.user, "assistant": turns.said}
        say |= dict.fromkeys(("system", "developer"), turns.system)
        role = str(item.get("role"))
        if role not in say:
            raise ApiError(400, unknown(f"{place}.role", role, say), param="input")
        say[role](_texts(item.get("content"), f"{place}.content"))
    elif kind == "function_call":
        name, identity, arguments, namespace = (
            member(item, key, str, place, "input", needed=key in ("name", "call_id"))
            for key in ("name", "call_id", "arguments", "namespace")
        )
        found = arguments_of(arguments, f"{place}.arguments", "input")
        turns.call(identity, full_name(namespace, name), found)
    elif kind == "function_call_output":
        text = _texts(item.get("output"), f"{place}.output")
        turns.result(item.get("call_id"), text, place)
    elif kind == "reasoning":
        if text := _thought(item, place):
            turns.thought(text)
    else:
        known = "message, function_call, function_call_output and reasoning"
        told = f"{place} is of type {shown(kind)}; this server takes {known}"
        raise ApiError(400, told, param="input")


def _thought(item: Mapping[str, Any], place: str) -> str:
    """What an item of reasoning holds: all of it, or a summary; nothing of what other servers sealed."""
    for key, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = member(item, key, list, place, "input")
        if parts:
            return _texts(parts, f"{place}.{key}", (kind, "text"))
    sealed: str = member(item, "encrypted_content", str, place, "input")
    return sealed.removeprefix(SEALED) if sealed.startswith(SEALED) else ""


def _texts(content: Any, place: str, kinds: Sequence[str] = _TEXTS) -> str:
    """A text, or parts of it. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        told = f"{place} is {shown(content)}; give text or a list of parts"
        raise ApiError(400, told, param="input")
    found = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind == "refusal":
            found.append(member(part, "refusal", str, f"{place}[{j}]", "input"))
            continue
        if not isinstance(part, Mapping) or kind not in kinds:
            told = f"{place}[{j}] is of type {shown(kind)}; this server takes {kinds[0]}"
            raise ApiError(400, told, param="input")
        found.append(member(part, "text", str, f"{place}[{j}]", "input", needed=True))
    return "".join(found)
