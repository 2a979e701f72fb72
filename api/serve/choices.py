"""OpenAI's choices as an answer: of completions and of chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from accel.runtime.serve.engine import Event, Ticket
from accel.runtime.serve.reply.machine import Machine
from accel.serve import requests
from accel.serve.errors import ApiError
from accel.serve.extras import Extras
from accel.serve.renderer import Frame, Object, Renderer
from accel.serve.replies import Choice, Reply
from accel.serve.requests import Asked
from accel.serve.schemas import Generation

DONE = Frame("[DONE]")


class Choices(Renderer):
    """A choice for each ticket, written as a kind of reply says."""

    def __init__(
        self,
        kind: type[Reply],
        sent: Generation,
        asked: Asked,
        tickets: Sequence[Ticket],
        began: float,
    ):
        """`sent`: the client's request; `began`: when it came, of `time.perf_counter`."""
        served = asked.served
        assert served.model.tokenizer is not None, "the command refuses models without"
        self._usage = bool(sent.stream_options and sent.stream_options.include_usage)
        self._reply = kind(
            sent.model or served.name,
            served.model.tokenizer,
            top=requests.top(sent),
            usage=self._usage,
        )
        self._tickets, self._prompts = tickets, len(asked.prompts)
        self._choices = [Choice(Machine(asked.reading)) for _ in tickets]
        self._extras = Extras(asked, tickets, began)
        self._streams = bool(sent.stream)

    def begin(self) -> Iterator[Frame]:
        """The role, where there is one."""
        for i in range(len(self._choices)):
            if (first := self._reply.first(i)) is not None:
                yield Frame(self._extras.chunk(first))

    def take(self, i: int, event: Event) -> Iterator[Frame]:
        """Chunks of choice i."""
        self._extras.take(i, event)
        parts, scores = self._choices[i].take(event, self._tickets[i].usage)
        if self._streams:
            for piece in self._reply.pieces(i, parts, scores):
                yield Frame(self._extras.chunk(piece))

    def end(self) -> Iterator[Frame]:
        """The usage, where it was asked for."""
        if self._usage:
            yield Frame(self._extras.chunk(self._reply.total(self._tickets, self._prompts)))
        yield DONE

    def failed(self, error: ApiError) -> Iterable[Frame]:
        """The error object."""
        return [Frame(error.body)]

    def whole(self) -> Object:
        """All choices."""
        return self._extras.whole(self._reply.whole(self._choices, self._tickets, self._prompts))
