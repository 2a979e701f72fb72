"""A text that is made, and the session that it is made in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from accel.runtime.decode.prompt_scores import PromptScores
from accel.runtime.decode.row import Row
from accel.runtime.model.transcript import Transcript
from accel.runtime.session.session import Session


@dataclass(frozen=True)
class Sample:
    """One text that is made: its row, its script, and which of the row's end tokens are the model's own."""

    row: Row
    script: Transcript
    own_ends: frozenset[int]

    @property
    def finish_reason(self) -> str | None:
        """See `Output`; None while it runs."""
        reasons = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
        return reasons.get(self.row.finish)

    @property
    def stop_reason(self) -> int | str | None:
        """See `Output`."""
        if self.row.finish == "eos" and (token := self.row.tokens[-1]) not in self.own_ends:
            return token
        return self.script.stop if self.row.finish == "stop" else None


@dataclass(frozen=True)
class Prepared:
    """A sample that is to be made, and how to open the empty session of one row that it is made in. `scores`: of its
    prompt, where they are asked for. `known`: how many tokens of the prompt need not run, after what ran so far.
    """

    sample: Sample
    open: Callable[[], Session]
    known: Callable[[], int]
    scores: PromptScores | None = None
