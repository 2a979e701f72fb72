"""Answers that are a list of blocks, in the order in which they came: reasoning, text, calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from accel.runtime.serve.engine import Event, Ticket, Usage
from accel.runtime.serve.reply.machine import Machine
from accel.runtime.serve.reply.parts import Finish, Reasoning, Text, ToolCall
from accel.serve.renderer import Frame, Renderer
from accel.serve.requests import Asked


@dataclass
class Block:
    """`first`: the part that began it; `text`: all of it so far, of a call its arguments."""

    index: int
    first: Reasoning | Text | ToolCall
    text: str = ""

    def takes(self, part: Reasoning | Text | ToolCall) -> bool:
        """Whether a part is more of it."""
        if isinstance(part, ToolCall):
            return isinstance(self.first, ToolCall) and self.first.index == part.index
        return type(part) is type(self.first)


class Blocks(Renderer):
    """The one answer to a request.

    Attributes:
        blocks: so far.
        finish: why it ended, as of `Finish`; None until then.
        thought: tokens of reasoning.
    """

    def __init__(self, asked: Asked, tickets: Sequence[Ticket]):
        (self._ticket,) = tickets
        self._machine = Machine(asked.reading)
        self.blocks: list[Block] = []
        self.finish: str | None = None
        self.thought = 0

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._ticket.usage

    def take(self, i: int, event: Event) -> Iterator[Frame]:
        """The parts that a token makes certain, as blocks."""
        for part in self._machine.take(event, self.usage):
            if isinstance(part, Finish):
                self.finish = part.reason
                yield from self._close()
            else:
                yield from self._part(part)
        last = self.blocks[-1].first if self.blocks else None
        self.thought += event.token >= 0 and isinstance(last, Reasoning)

    def _part(self, part: Reasoning | Text | ToolCall) -> Iterator[Frame]:
        if not self.blocks or not self.blocks[-1].takes(part):
            yield from self._close()
            self.blocks.append(Block(len(self.blocks), part))
            yield from self.opened(self.blocks[-1])
        block = self.blocks[-1]
        if more := part.arguments if isinstance(part, ToolCall) else part.text:
            block.text += more
            yield from self.more(block, more)

    def _close(self) -> Iterator[Frame]:
        if self.blocks:
            yield from self.closed(self.blocks[-1])

    @abstractmethod
    def opened(self, block: Block) -> Iterable[Frame]:
        """What begins a block."""

    @abstractmethod
    def more(self, block: Block, text: str) -> Iterable[Frame]:
        """What adds to it."""

    @abstractmethod
    def closed(self, block: Block) -> Iterable[Frame]:
        """What ends it; it is the last one where `finish` is known."""
