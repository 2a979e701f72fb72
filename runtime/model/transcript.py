"""The text of a row, as its tokens make it certain."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import StopMatcher, Tokenizer


class Transcript:
    """The text of one row behind its prompt, decoded incrementally, cut at the first stop string. The text of a token
    of `marks` is left out, and what came before it is certain then.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: tuple[str, ...],
        prompt: Ints,
        marks: frozenset[int] = frozenset(),
    ):
        self.marks = marks
        self._tokenizer = tokenizer
        self._prompt = tokenizer.end_of(prompt.tolist()) if tokenizer else []
        self._stream = tokenizer.stream(self._prompt) if tokenizer else None
        self._matcher = StopMatcher(stops) if stops else None
        self._pieces: list[str] = []
        self._taken = 0
        self._finished = False

    def __call__(self, token: int) -> bool:
        """Take one token; whether the text has reached a stop string."""
        assert self._stream is not None
        if token in self.marks and self._tokenizer is not None:
            self._pieces.append(self._rest())
            self._stream = self._tokenizer.stream(self._prompt)
            return self._matcher is not None and self._matcher.stopped
        piece, stopped = self._stream.push(token), False
        if self._matcher is not None:
            piece, stopped = self._matcher.push(piece)
        self._pieces.append(piece)
        return stopped

    def end(self) -> bool:
        """See `row.Watch`."""
        if self._matcher is None:
            return False
        self._end()
        return self._matcher.stopped

    def branch(self) -> Transcript | None:
        """See `row.Watch`. Its text is of the tokens from here on."""
        if self._matcher is None or self._stream is None:
            return None
        other = copy(self)
        other._stream, other._matcher, other._pieces = (
            self._stream.branch(),
            copy(self._matcher),
            [],
        )
        return other

    @property
    def stop(self) -> str | None:
        """The stop string that was reached."""
        return None if self._matcher is None else self._matcher.reason

    def take(self, tokens: int | None = None) -> str:
        """The text that became final since the last call, or with the next so many tokens of it."""
        end = len(self._pieces) if tokens is None else self._taken + tokens
        fresh = "".join(self._pieces[self._taken : end])
        self._taken = min(end, len(self._pieces))
        return fresh

    def finish(self) -> str:
        """The remaining text at the end of a row."""
        self._end()
        return self.take()

    def _end(self) -> None:
        """Take what was held back."""
        if not self._finished and self._stream is not None:
            self._finished = True
            self._pieces.append(self._rest())

    def _rest(self) -> str:
        """What was held back, now that nothing follows it."""
        assert self._stream is not None
        piece = self._stream.finish()
        if self._matcher is None:
            return piece
        passed, stopped = self._matcher.push(piece)
        return passed if stopped else passed + self._matcher.finish()[0]

    def text(self, tokens: list[int]) -> str:
        """All of it; `tokens` are those that were pushed."""
        if self._matcher is None and self._tokenizer is not None:
            return self._tokenizer.decode_behind(self._prompt, tokens)
        self.finish()
        return "".join(self._pieces)


def pieces(tokens: Iterator[int], script: Transcript | None) -> Iterator[Any]:
    """Token ids as they come, or the text that they make certain."""
    for token in tokens:
        if script is None:
            yield token
        elif piece := script.take():
            yield piece
    if script is not None and (piece := script.finish()):
        yield piece
