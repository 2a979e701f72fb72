"""The stream of one prompt's text or tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from accel.runtime.decode.logprobs import Logprob
from accel.runtime.inputs.ints import Ints
from accel.runtime.model.meter import Meter
from accel.runtime.model.sample import Sample


class Stream:
    """Iterator over the text pieces or token ids of one prompt. `stats` is available at any time; `close()`
    ends it early.
    """

    def __init__(self, pieces: Iterator[Any], meter: Meter, sample: Sample):
        self._pieces = pieces
        self._meter = meter
        self._sample = sample

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._pieces)

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far. With drafting these can be a few more than were yielded."""
        return list(self._sample.row.tokens)

    @property
    def prompt(self) -> Ints:
        """The ids [n] that the model reads before them."""
        return self._sample.row.prompt

    @property
    def logprobs(self) -> list[dict[int, Logprob]]:
        """Of `tokens`, as in `Output`; empty if they were not requested."""
        return list(self._sample.row.logprobs)

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended, as in `Output`; None while it goes on."""
        return self._sample.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """What ended it, as in `Output`."""
        return self._sample.stop_reason

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics so far, as in `Output.stats`."""
        return self._meter.stats([self._sample.row])

    def through(self, change: Callable[[Iterator[Any]], Iterator[Any]]) -> Stream:
        """The same stream, whose pieces `change` passes on. This one must not be used any more."""
        return Stream(change(self._pieces), self._meter, self._sample)

    def close(self) -> None:
        """End the generation and free the session."""
        if isinstance(self._pieces, Generator):
            self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
