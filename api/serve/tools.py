"""Tools that a client offers: what is asked of them, how the template is told, and what a reply is read as."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from accel.ir.errors import InputError, shown, unknown
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.runtime.inputs.chat import template_of
from accel.runtime.serve.reply.family import Family, Thinking, families, family_of, thinking_of
from accel.runtime.serve.reply.forms import Tool
from accel.runtime.serve.reply.grammar import grammar_of
from accel.runtime.serve.reply.machine import Reading
from accel.serve.errors import ApiError
from accel.serve.json_schema import check_schema
from accel.serve.models import Served
from accel.serve.schemas import ChatRequest

MOST = 128  # tools of a request, as OpenAI's
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEYS = ("name", "description", "parameters", "strict")  # of a function
_CHOICES = ("auto", "none", "required")
_PARTS = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)  # of a template, what is code
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Calling:
    """What a chat may call. `shown`: the tools as the template is told them, None without; `tools`: those that may be
    called; `ignored`: the places of what they hold that is not known.
    """

    shown: list[dict[str, Any]] | None
    ignored: Sequence[str]
    tools: Sequence[Tool]
    required: bool
    several: bool
    family: Family | None
    thinking: Thinking | None

    def reading(self, served: Served, begun: bool) -> Reading:
        """How replies are read; `begun`: the prompt ends where reasoning begins."""
        assert served.model.tokenizer is not None, "the command refuses models without"
        return Reading(served.model.tokenizer, self.family, self.thinking, self.tools, begun)

    def guide(
        self, reading: Reading, answer: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """What the reply has to be; `answer`: what an answer without a call has to be. Raises ApiError."""
        held = self.required or any(tool.strict for tool in self.tools)
        held = held or bool(self.tools and not self.several)
        plain = not (self.tools or self.thinking or (self.family and self.family.header))
        if not held and (answer is None or plain):
            return answer
        try:
            return grammar_of(reading, required=self.required, several=self.several, answer=answer)
        except InputError as error:
            raise ApiError(400, f"tools: {error}", param="tools") from None


def calling(asked: ChatRequest, served: Served) -> Calling:
    """What a request says of tools. Raises ApiError."""
    tools = _tools(asked.tools or [])
    shown, ignored = _known(asked.tools or [])
    choice = _choice(asked.tool_choice, [tool.name for tool in tools])
    if choice == "none":
        shown, tools = [], []
    source = _template(served, bool(shown))
    family = family_of(source)
    if shown:
        if not _knows_tools(source):
            raise _refused(
                "this model's chat template knows no tools; serve with a --chat-template that does"
            )
        if family is None:
            raise _refused(
                "this model's chat template writes calls in a way that is not known "
                f"(known: {', '.join(families())}); leave tools out, or serve with another --chat-template"
            )
    elif family is not None and family.header is None:
        family = None  # no calls are looked for
    named = choice not in (None, *_CHOICES)
    return Calling(
        shown or None,
        ignored,
        [tool for tool in tools if tool.name == choice] if named else tools,
        required=named or choice == "required",
        several=asked.parallel_tool_calls is not False and not named,
        family=family,
        thinking=thinking_of(source),
    )


def _refused(message: str, param: str = "tools") -> ApiError:
    return ApiError(400, message, param=param)


def _template(served: Served, tools: bool) -> str:
    tokenizer = served.model.tokenizer
    assert tokenizer is not None, "the command refuses models without"
    try:
        return template_of(tokenizer.config, served.chat_template, [] if tools else None)
    except InputError as error:
        raise ApiError(400, str(error), param="messages") from None


@lru_cache(maxsize=16)
def _knows_tools(source: str) -> bool:
    """Whether a template reads its variable `tools`."""
    return any(re.search(r"\btools\b", _QUOTED.sub("", part)) for part in _PARTS.findall(source))


def _known(offered: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Tools that are right, without what is not known in them, and the places of that."""
    shown, ignored = list[dict[str, Any]](), list[str]()
    for i, tool in enumerate(offered):
        function = tool["function"]
        known = {key: function[key] for key in _KEYS if key in function}
        shown.append({"type": "function", "function": known})
        ignored += [f"tools.{i}.{key}" for key in tool if key not in ("type", "function")]
        ignored += [f"tools.{i}.function.{key}" for key in function if key not in _KEYS]
    return shown, ignored


def _tools(offered: Sequence[Any]) -> list[Tool]:
    """What they are. Raises ApiError."""
    if len(offered) > MOST:
        raise _refused(f"tools: {len(offered)} were given; give at most {MOST}")
    found = dict[str, Tool]()
    for i, one in enumerate(offered):
        tool = _tool(one, f"tools[{i}]")
        if tool.name in found:
            raise _refused(f"tools: two are named {tool.name}; rename one")
        found[tool.name] = tool
    return list(found.values())


def _tool(offered: Any, place: str) -> Tool:
    function = offered.get("function") if isinstance(offered, Mapping) else None
    if not isinstance(offered, Mapping) or offered.get("type") != "function":
        kind = offered.get("type") if isinstance(offered, Mapping) else offered
        raise _refused(f'{place}: its type is {shown(kind)}; this server takes "function" only')
    if not isinstance(function, Mapping):
        raise _refused(f'{place}.function is no object; give {{"name": …, "parameters": …}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refused(
            f"{place}.function.name is {shown(name)}; give 1 to 64 of the characters a-z, A-Z, 0-9, _, . and -"
        )
    for key, kind, told in (("description", str, "text"), ("strict", bool, "true or false")):
        if not isinstance(function.get(key), kind | None):
            raise _refused(f"{place}.function.{key} is {shown(function[key])}; give {told}")
    schema = function.get("parameters")
    schema = _NO_ARGUMENTS if schema is None else schema
    try:
        check_schema(schema)
    except ValueError as error:
        raise _refused(f"{place}.function.parameters is no JSON schema: {error}") from None
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise _refused(f'{place}.function.parameters is not of type "object"; arguments are one')
    return Tool(name, {"type": "object", **schema}, bool(function.get("strict")))


def _choice(choice: Any, names: Sequence[str]) -> str | None:
    """Of _CHOICES, a tool's name, or None. Raises ApiError."""
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise _refused(unknown("tool_choice", choice, _CHOICES), "tool_choice")
        if choice == "required" and not names:
            raise _refused('tool_choice "required" goes with tools; give some', "tool_choice")
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type") != "function":
        raise _refused(
            'tool_choice is none of "auto", "none", "required" and {"type": "function", "function": {"name": …}}',
            "tool_choice",
        )
    if name not in names:
        raise _refused(unknown("tool", name, names), "tool_choice")
    return name


def as_templates_want(message: Mapping[str, Any], i: int) -> dict[str, Any]:
    """A message of a history as templates want it: arguments of calls as objects, and no content that is null where
    there are calls. Raises ApiError.
    """
    found = dict(message)
    if found.get("tool_calls") is None:
        found.pop("tool_calls", None)
    else:
        found["tool_calls"] = _calls(found["tool_calls"], f"messages[{i}].tool_calls")
    if found.get("content") is None and found.get("role") == "assistant":
        found["content"] = ""
    elif "content" in found and found["content"] is None:
        raise ApiError(400, f"messages[{i}].content is null; give text", param="messages")
    return found


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ApiError(400, f"{place} is no list", param="messages")
    found = []
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ApiError(
                400,
                f'{place}[{j}] is no call; give {{"id": …, "type": "function", "function": {{"name": …, "arguments": '
                "…}}",
                param="messages",
            )
        where = f"{place}[{j}].function.arguments"
        arguments = arguments_of(function.get("arguments"), where, "messages")
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def arguments_of(arguments: Any, place: str, param: str) -> Any:
    """The arguments of a call in a history, as text or as the object that they are. Raises ApiError."""
    if arguments in (None, ""):
        return {}
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{place} is no JSON: {error}", param=param) from None
    if not isinstance(found, dict):
        raise ApiError(400, f"{place} is no JSON object; give one, as text", param=param)
    return found
