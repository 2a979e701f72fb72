"""OpenAI's responses as answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence

from accel.runtime.serve.engine import Ticket
from accel.runtime.serve.reply.parts import Reasoning, ToolCall
from accel.serve.blocks import Block, Blocks
from accel.serve.errors import ApiError
from accel.serve.renderer import Frame, Object
from accel.serve.requests import TEMPERATURE, Asked
from accel.serve.responses_request import OPAQUE, SEALED, Offered, ResponsesRequest

_PREFIXES = {Reasoning: "rs", ToolCall: "fc"}


class ResponseReply(Blocks):
    """Of POST /v1/responses."""

    def __init__(
        self, sent: ResponsesRequest, asked: Asked, tickets: Sequence[Ticket], began: float
    ):
        """`sent`: the client's request."""
        super().__init__(asked, tickets)
        self._offered = Offered.of(sent.tools or [])
        self._sums = bool(sent.reasoning and sent.reasoning.summary)
        self._seals = OPAQUE in (sent.include or ())
        self._ids: list[str] = []  # of the blocks' items
        self._sequence = 0
        self._failed = False
        self._head = _head(sent, asked, self._offered)
        self._head_text = json.dumps(self._head)[
            1:-1
        ]  # it grows with the body; a stream repeats it

    def begin(self) -> Iterator[Frame]:
        """The response without its output."""
        yield self._of_response("created", self._rest("in_progress"))
        yield self._of_response("in_progress", self._rest("in_progress"))

    def opened(self, block: Block) -> Iterator[Frame]:
        """An item, and the part that its text is."""
        prefix = _PREFIXES.get(type(block.first), "msg")
        self._ids.append(f"{prefix}_{uuid.uuid4().hex}")
        item = self._item(block, "in_progress")
        yield self._frame("response.output_item.added", output_index=block.index, item=item)
        if isinstance(block.first, ToolCall):
            return
        if isinstance(block.first, Reasoning) and self._sums:
            part = {"type": "summary_text", "text": ""}
            yield self._of_summary("part.added", block, part=part)
        yield self._of_part("response.content_part.added", block, part=_part(block))

    def more(self, block: Block, text: str) -> Iterator[Frame]:
        """A delta."""
        if isinstance(block.first, ToolCall):
            yield self._of_item("response.function_call_arguments.delta", block, delta=text)
        elif isinstance(block.first, Reasoning):
            if self._sums:
                yield self._of_summary("text.delta", block, delta=text)
            yield self._of_part("response.reasoning_text.delta", block, delta=text)
        else:
            yield self._of_part("response.output_text.delta", block, delta=text, logprobs=[])

    def closed(self, block: Block) -> Iterator[Frame]:
        """All of an item's text, part, and the item."""
        text = block.text
        if isinstance(block.first, ToolCall):
            yield self._of_item(
                "response.function_call_arguments.done", block, name=block.first.name, arguments=text
            )  # fmt: skip
        elif isinstance(block.first, Reasoning):
            if self._sums:
                part = {"type": "summary_text", "text": text}
                yield self._of_summary("text.done", block, text=text)
                yield self._of_summary("part.done", block, part=part)
            yield self._of_part("response.reasoning_text.done", block, text=text)
        else:
            yield self._of_part("response.output_text.done", block, text=text, logprobs=[])
        if not isinstance(block.first, ToolCall):
            yield self._of_part("response.content_part.done", block, part=_part(block))
        item = self._item(block, self._status(block))
        yield self._frame("response.output_item.done", output_index=block.index, item=item)

    def end(self) -> Iterator[Frame]:
        """All of the response."""
        yield self._of_response(self._end, self._rest(self._end))

    def failed(self, error: ApiError) -> Iterable[Frame]:
        """The response as far as it came."""
        self._failed = True
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        told = {"code": code, "message": error.body["error"]["message"]}
        yield self._of_response("failed", {**self._rest("failed"), "error": told})

    def whole(self) -> Object:
        """All of it."""
        return {**self._head, **self._rest(self._end)}

    @property
    def _end(self) -> str:
        return "incomplete" if self.finish == "length" else "completed"

    def _status(self, block: Block) -> str:
        """Whether an item is whole: the last one of an answer that was cut off is not."""
        cut = (self._failed or self.finish == "length") and block is self.blocks[-1]
        return "incomplete" if cut else "completed"

    def _item(self, block: Block, status: str) -> Object:
        identity, first = {"id": self._ids[block.index]}, block.first
        if isinstance(first, ToolCall):
            call = {"call_id": first.id, "name": first.name, "arguments": block.text}
            namespace, tool = self._offered.functions.get(first.name, ("", {}))
            if namespace:
                call |= {"name": tool["name"], "namespace": namespace}
            return {**identity, "type": "function_call", "status": status, **call}
        parts = [_part(block)] if status != "in_progress" else []
        if isinstance(first, Reasoning):
            summed = [{"type": "summary_text", "text": block.text}] if self._sums and parts else []
            sealed = {"encrypted_content": SEALED + block.text} if self._seals else {}
            held = {"summary": summed, "content": parts, **sealed}
            return {**identity, "type": "reasoning", "status": status, **held}
        return {**identity, "type": "message", "status": status, "role": "assistant", "content": parts}  # fmt: skip

    def _rest(self, status: str) -> Object:
        """What of a response is not of its request."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended = status != "in_progress"
        output = [self._item(block, self._status(block)) for block in self.blocks] if ended else []
        return {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": cut,
            "output": output,
            "usage": self._usage if ended else None,
        }

    @property
    def _usage(self) -> Object:
        told = self.usage
        return {
            "input_tokens": told.prompt_tokens,
            "input_tokens_details": {"cached_tokens": told.reused, "cache_write_tokens": 0},
            "output_tokens": told.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.thought},
            "total_tokens": told.prompt_tokens + told.completion_tokens,
        }

    def _frame(self, kind: str, **fields: object) -> Frame:
        self._sequence += 1
        return Frame({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)

    def _of_response(self, kind: str, rest: Object) -> Frame:
        kind, self._sequence = f"response.{kind}", self._sequence + 1
        head = f'{{"type": "{kind}", "sequence_number": {self._sequence - 1}, "response": '
        return Frame(f"{head}{{{self._head_text}, {json.dumps(rest)[1:]}}}", kind)

    def _of_item(self, kind: str, block: Block, **fields: object) -> Frame:
        place = {"item_id": self._ids[block.index], "output_index": block.index}
        return self._frame(kind, **place, **fields)

    def _of_part(self, kind: str, block: Block, **fields: object) -> Frame:
        return self._of_item(kind, block, content_index=0, **fields)

    def _of_summary(self, kind: str, block: Block, **fields: object) -> Frame:
        return self._of_item(f"response.reasoning_summary_{kind}", block, summary_index=0, **fields)


def _part(block: Block) -> Object:
    if isinstance(block.first, Reasoning):
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _head(sent: ResponsesRequest, asked: Asked, offered: Offered) -> Object:
    """What a response says of its request."""
    text, reasoning = sent.text, sent.reasoning
    choice = sent.tool_choice
    if isinstance(choice, Mapping):  # no more of it than was looked at
        choice = {key: choice[key] for key in ("type", "name", "namespace") if key in choice}
    form = text.format.model_dump(by_alias=True) if text and text.format else {"type": "text"}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": sent.instructions,
        "max_output_tokens": sent.max_output_tokens,
        "metadata": sent.metadata or {},
        "model": sent.model or asked.served.name,
        "parallel_tool_calls": sent.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": "default",
        "store": False,
        "temperature": TEMPERATURE if sent.temperature is None else sent.temperature,
        "text": {"format": form},
        "tool_choice": choice or "auto",
        "tools": offered.shown,
        "top_p": 1.0 if sent.top_p is None else sent.top_p,
        "truncation": sent.truncation or "disabled",
    }
