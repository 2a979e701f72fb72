"""What a reply is made of. Whoever answers a client writes these in the client's form."""

from __future__ import annotations

from dataclasses import dataclass

from accel.runtime.serve.request import Usage


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """More of a call: `arguments` are the next characters of a JSON object.

    Attributes:
        index: of the reply's calls, from 0. Calls follow one another.
        id: names the call in the messages that follow.
        name: of the tool.
        arguments: what came since the part before; "" begins a call.
    """

    index: int
    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class Finish:
    """The end, once. `reason`: "stop", "length" or "tool_calls"."""

    reason: str
    usage: Usage


Part = Reasoning | Text | ToolCall | Finish
