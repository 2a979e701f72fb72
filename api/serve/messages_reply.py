"""Anthropic's messages as answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from pydantic import TypeAdapter

from accel.runtime.serve.engine import Ticket
from accel.runtime.serve.reply.parts import Reasoning, ToolCall
from accel.serve.blocks import Block, Blocks
from accel.serve.errors import ApiError
from accel.serve.messages_request import MessagesRequest
from accel.serve.renderer import Frame, Object
from accel.serve.requests import Asked

_PING = Frame({"type": "ping"}, "ping")
_UNSIGNED = "unsigned"  # clients drop thoughts without a signature
_NO_JSON = "INVALID_JSON"  # Anthropic's name for arguments that are none
_OBJECT = TypeAdapter(dict[str, Any])
_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


class MessageReply(Blocks):
    """Of POST /v1/messages."""

    beat: ClassVar[bytes] = _PING.bytes

    def __init__(
        self, sent: MessagesRequest, asked: Asked, tickets: Sequence[Ticket], began: float
    ):
        """`sent`: the client's request."""
        super().__init__(asked, tickets)
        self._most, self._stops = sent.max_tokens, sent.stop_sequences or ()
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": sent.model or asked.served.name,
        }

    def begin(self) -> Iterator[Frame]:
        """The message without its content."""
        empty: Object = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _frame("message_start", message={**self._head, **empty, "usage": self._usage})
        yield _PING

    def opened(self, block: Block) -> Iterator[Frame]:
        """An empty block."""
        first = block.first
        empty: Object = {"type": "text", "text": ""}
        if isinstance(first, Reasoning):
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        elif isinstance(first, ToolCall):
            empty = {"type": "tool_use", "id": first.id, "name": first.name, "input": {}}
        yield _frame("content_block_start", index=block.index, content_block=empty)

    def more(self, block: Block, text: str) -> Iterator[Frame]:
        """A delta."""
        if isinstance(block.first, ToolCall):
            yield self._delta(block, type="input_json_delta", partial_json=text)
        elif isinstance(block.first, Reasoning):
            yield self._delta(block, type="thinking_delta", thinking=text)
        else:
            yield self._delta(block, type="text_delta", text=text)

    def closed(self, block: Block) -> Iterator[Frame]:
        """The end of a block."""
        if isinstance(block.first, Reasoning):
            yield self._delta(block, type="signature_delta", signature=_UNSIGNED)
        yield _frame("content_block_stop", index=block.index)

    def end(self) -> Iterator[Frame]:
        """Why it ended, and what it took."""
        yield _frame("message_delta", delta=self._ended, usage=self._usage)
        yield _frame("message_stop")

    def failed(self, error: ApiError) -> Iterable[Frame]:
        """The error object."""
        return [Frame(error.anthropic, "error")]

    def whole(self) -> Object:
        """All of it."""
        content = [_content(block) for block in self.blocks]
        return {**self._head, "content": content, **self._ended, "usage": self._usage}

    @staticmethod
    def _delta(block: Block, **delta: str) -> Frame:
        return _frame("content_block_delta", index=block.index, delta=delta)

    @property
    def _ended(self) -> Object:
        stop = self._ticket.stop_reason
        if isinstance(stop, str) and stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        full = self.usage.completion_tokens < self._most
        cut = "model_context_window_exceeded" if full else "max_tokens"
        return {"stop_reason": _REASONS.get(str(self.finish), cut), "stop_sequence": None}

    @property
    def _usage(self) -> Object:
        """Tokens of the prompt that were read anew, that were known, and those that were made."""
        told = self.usage
        return {
            "input_tokens": told.prompt_tokens - told.reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": told.reused,
            "output_tokens": told.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.thought},
        }


def _frame(kind: str, **fields: object) -> Frame:
    return Frame({"type": kind, **fields}, kind)


def _content(block: Block) -> Object:
    if isinstance(block.first, Reasoning):
        return {"type": "thinking", "thinking": block.text, "signature": _UNSIGNED}
    if isinstance(block.first, ToolCall):
        call = {"id": block.first.id, "name": block.first.name, "input": _arguments(block.text)}
        return {"type": "tool_use", **call}
    return {"type": "text", "text": block.text}


def _arguments(text: str) -> Object:
    """Arguments, of a call that was cut off as far as they came: as Anthropic's client reads a stream of them."""
    try:
        return _OBJECT.validate_json(text or "{}", experimental_allow_partial=True)
    except ValueError:
        return {_NO_JSON: text}
