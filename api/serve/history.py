"""The turns of a conversation in another API's form -> messages of chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from accel.ir.errors import shown
from accel.serve.errors import ApiError
from accel.serve.schemas import ChatRequest, ForReply

_BETWEEN = "\n\n"  # texts of one message that came apart


class History:
    """Messages so far. What follows in the same role is one message: many templates ask for turns."""

    def __init__(self, param: str):
        """`param`: the field that holds the turns."""
        self.param = param
        self._calls: dict[str, str] = {}  # the name of each call's tool, by its id
        self.messages: list[dict[str, Any]] = []

    def system(self, text: str) -> None:
        """What the model is told."""
        self._more("system", text)

    def user(self, text: str) -> None:
        """What a person said."""
        self._more("user", text)

    def said(self, text: str) -> None:
        """What the model said."""
        self._more("assistant", text)

    def thought(self, text: str) -> None:
        """What the model thought before it said more."""
        message = self._at("assistant")
        before = message.get("reasoning_content", "")
        message["reasoning_content"] = _joined(before, text)

    def call(self, identity: str, name: str, arguments: Mapping[str, Any]) -> None:
        """What the model called."""
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls = self._at("assistant").setdefault("tool_calls", [])
        calls.append({"id": identity, "type": "function", "function": function})
        self._calls[identity] = name

    def result(self, identity: Any, text: str, place: str) -> None:
        """What a call gave. Raises ApiError where no call has this id."""
        if not isinstance(identity, str) or identity not in self._calls:
            told = f"{place}: no call before it has the id {shown(identity)}"
            raise ApiError(400, told, param=self.param)
        told = {"tool_call_id": identity, "name": self._calls[identity], "content": text}
        self.messages.append({"role": "tool", **told})

    def _at(self, role: str) -> dict[str, Any]:
        """The message of a role that goes on, or a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _more(self, role: str, text: str) -> None:
        message = self._at(role)
        message["content"] = _joined(message["content"], text)


def _joined(before: str, text: str) -> str:
    return f"{before}{_BETWEEN}{text}" if before and text else before + text


def as_chat(asked: ForReply, history: History, **fields: Any) -> ChatRequest:
    """A request as one for a chat; `fields`: of it, beside those that every request has. Raises ApiError."""
    if not history.messages:
        raise ApiError(400, f"{history.param} is empty; give a message", param=history.param)
    shared = {name: getattr(asked, name) for name in ForReply.model_fields}
    return ChatRequest.model_validate({**shared, **fields, "messages": history.messages})


def field(
    value: Any, name: str, kind: type[Any], place: str, param: str, *, needed: bool = False
) -> Any:
    """A field of an object in a request, of this type; one that is missing is empty. Raises ApiError."""
    found = value.get(name)
    if found is None and not needed:
        return kind()
    if not isinstance(found, kind):
        told = {str: "text", list: "a list", dict: "an object", bool: "true or false"}[kind]
        raise ApiError(400, f"{place}.{name} is {shown(found)}; give {told}", param=param)
    return found
