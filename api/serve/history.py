"""The turns of a conversation in another API's form -> messages of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.ir.errors import shown
from accel.serve.errors import ApiError
from accel.serve.schemas import ChatRequest, ForReply

DEVELOPER = "developer"
_BETWEEN = "\n\n"  # texts of one message that came apart


@dataclass
class _Turn:
    """A message whose texts come apart."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    of_call: dict[str, str] = field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any]:
        """It as chats have it."""
        found: dict[str, Any] = {"role": self.role, **self.of_call}
        found["content"] = _BETWEEN.join(text for text in self.texts if text)
        if self.thoughts:
            found["reasoning_content"] = _BETWEEN.join(self.thoughts)
        if self.calls:
            found["tool_calls"] = self.calls
        return found


class History:
    """A conversation so far. What follows in the same role is one message: many templates ask for turns."""

    def __init__(self, param: str):
        """`param`: the field that holds the turns."""
        self.param = param
        self._calls: dict[str, str] = {}  # the name of each call's tool, by its id
        self._turns: list[_Turn] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As chats have them."""
        return [turn.message for turn in self._turns]

    def system(self, text: str) -> None:
        """What the model is told, wherever (`developers`)."""
        self._at(DEVELOPER).texts.append(text)

    def user(self, text: str) -> None:
        """What a person said."""
        self._at("user").texts.append(text)

    def said(self, text: str) -> None:
        """What the model said."""
        self._at("assistant").texts.append(text)

    def thought(self, text: str) -> None:
        """What the model thought before it said more."""
        self._at("assistant").thoughts.append(text)

    def call(self, identity: str, name: str, arguments: Mapping[str, Any]) -> None:
        """What the model called."""
        function = {"name": name, "arguments": arguments}
        calls = self._at("assistant").calls
        calls.append({"id": identity, "type": "function", "function": function})
        self._calls[identity] = name

    def result(self, identity: Any, text: str, place: str) -> None:
        """What a call gave. Raises ApiError where no call has this id."""
        if not isinstance(identity, str) or identity not in self._calls:
            told = f"{place}: no call before it has the id {shown(identity)}"
            raise ApiError(400, told, param=self.param)
        of_call = {"tool_call_id": identity, "name": self._calls[identity]}
        self._turns.append(_Turn("tool", [text], of_call=of_call))

    def _at(self, role: str) -> _Turn:
        """The message of a role that goes on, or a new one."""
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(_Turn(role))
        return self._turns[-1]


def developers(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages without the role `developer`, which few templates know. It is the system's at the beginning; many
    templates take that there only, so later it is the user's. One message comes of it and what is beside it in that
    role. Contents are texts.
    """
    found, told = (
        list[Mapping[str, Any]](),
        False,
    )  # whether the last one is, or holds, a developer's
    for message in messages:
        role, before = message.get("role"), told
        told = role == DEVELOPER
        if told:
            role = "system" if all(one.get("role") == "system" for one in found) else "user"
        if found and found[-1].get("role") == role and (told or before):
            texts = (found[-1].get("content"), message.get("content"))
            found[-1] = {**found[-1], "content": _BETWEEN.join(filter(None, texts))}
            told = True
        else:
            found.append({**message, "role": role})
    return found


def as_chat(
    asked: ForReply, history: History, *, goes_on: bool = False, **fields: Any
) -> ChatRequest:
    """A request as one for a chat. `goes_on`: the answer does with a text of the model at the end; `fields`: of it,
    beside those that every request has. Raises ApiError.
    """
    if not (messages := history.messages):
        raise ApiError(400, f"{history.param} is empty; give a message", param=history.param)
    last = messages[-1]
    if goes_on and last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        fields["continue_final_message"] = True
    shared = {name: getattr(asked, name) for name in ForReply.model_fields}
    return ChatRequest.model_validate({**shared, **fields, "messages": messages})


def member(
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
