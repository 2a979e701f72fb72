"""What an engine takes and gives: a request, its ticket, and the events of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from accel.ir.errors import AccelError, InputError
from accel.runtime.decode.logprobs import Logprob
from accel.runtime.decode.sampling_params import SamplingParams

CANCELLED = "cancelled"


class Full(AccelError):
    """The engine's queue is full: the same request may be taken later."""


@dataclass(frozen=True)
class Request:
    """One text to be made.

    Args:
        prompt: token ids [n], or text.
        params: as of `generate`; `n` is 1.
        adapter: as of `generate`.
        encoder_input: as of `generate`, for an encoder-decoder model.
        sample: which sample of the prompt: request i of a seed gets the tokens of sample i of `generate(n=…)`.
        marks: token ids whose text is left out of the events'; each has an event with `mark`.
        prompt_logprobs: tell the log-probability of each token of the prompt and of this many likeliest ones in its
            place (`Ticket.prompt_logprobs`); None: none.
        only_prompt: make nothing: the request ends where its prompt is scored, with an event without a token.
    """

    prompt: Any
    params: SamplingParams = field(default_factory=SamplingParams)
    adapter: str | None = None
    encoder_input: Any = None
    sample: int = 0
    marks: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None
    only_prompt: bool = False

    def __post_init__(self) -> None:
        if self.only_prompt and self.prompt_logprobs is None:
            raise InputError("only_prompt ends where the prompt is scored; give prompt_logprobs")


@dataclass(frozen=True)
class Event:
    """A token of a request.

    Attributes:
        token: its id; -1 for the end of a request that was cancelled or makes nothing, which has no token.
        text: what is certain of the text since the event before; "" without a tokenizer.
        logprobs: of this token, as in `Output.logprobs`; None if they were not requested.
        finish: None while the request runs, then why it ended: "stop" (an end token, a stop string, the end of a
            grammar), "length" (`max_tokens`, or the context is full) or "cancelled".
        mark: whether the token is one of the request's marks, and no stop string ended the text before it.
    """

    token: int
    text: str
    logprobs: dict[int, Logprob] | None = None
    finish: str | None = None
    mark: bool = False


@dataclass(frozen=True)
class Usage:
    """Tokens of a request so far: those of its prompt, those that were made, those that were drafted, and of these
    those that stood. A preempted request's drafts count on. `reused`: tokens of the prompt that did not run, because
    `kv.reuse` had their keys and values.
    """

    prompt_tokens: int
    completion_tokens: int
    drafted: int = 0
    accepted: int = 0
    reused: int = 0


@dataclass(frozen=True)
class Handed:
    """A request whose prompt has run and which goes on in another engine of the same model.

    Attributes:
        state: its row of the session, as `Session.export_row` gives it.
        numbers: its tokens and random numbers, as `Row.numbers` gives them.
    """

    state: bytes
    numbers: Mapping[str, Any]


class Ticket:
    """A request that an engine took. Its events are given once, to whichever thread asks; any thread may cancel it."""

    def __init__(
        self,
        prompt_tokens: int,
        on_cancel: Callable[[], None],
        listener: Callable[[Ticket, Event | Handed | BaseException], None] | None = None,
    ):
        """`listener`: gets the events, in the engine's thread, in place of who iterates."""
        self._events = SimpleQueue[Event | BaseException]()
        self._listener = listener
        self._on_cancel = on_cancel
        self._prompt_tokens, self._made = prompt_tokens, 0
        self._drafted = self._accepted = self._reused = 0
        self._ended = False
        self.cancelled = False
        """Whether `cancel` was called."""
        self.stop_reason: int | str | None = None
        """What ended it, as in `Output`; known when the last event was given."""
        self.prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        """Of each token of the prompt (None for the first), known with the first event; None: not asked for."""

    def __iter__(self) -> Iterator[Event]:
        """Events as they come, until one has a `finish`. Raises what made the request fail."""
        while not self._ended:
            event = self._events.get()
            if isinstance(event, BaseException):
                self._ended = True
                raise event
            self._ended = event.finish is not None
            yield event

    def cancel(self) -> None:
        """End the request at the next round's border. No effect on one that ended."""
        self.cancelled = True
        self._on_cancel()

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self._prompt_tokens, self._made, self._drafted, self._accepted, self._reused)

    def count(self, drafted: int, accepted: int) -> None:
        """So many tokens were drafted so far, and so many of them stood; of the engine."""
        self._drafted, self._accepted = drafted, accepted

    def reuse(self, tokens: int) -> None:
        """So many tokens of its prompt did not run; of the engine. Where it is handed over, the first one knows."""
        self._reused = max(self._reused, tokens)

    def put(self, event: Event | BaseException) -> None:
        """Give an event to whoever iterates; of the engine."""
        self._made += isinstance(event, Event) and event.token >= 0
        if self._listener is None:
            self._events.put(event)
        else:
            self._listener(self, event)

    def hand(self, handed: Handed) -> None:
        """The request goes on elsewhere; of an engine that was asked for it."""
        assert self._listener is not None
        self._listener(self, handed)
