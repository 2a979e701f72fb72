"""A request on its way through an engine: what it waits for, what runs it, what its ticket was told."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from accel.runtime.decode.prompt_scores import PromptScores
from accel.runtime.decode.rounds import Rounds
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.model.sample import Prepared
from accel.runtime.schedule import Task
from accel.runtime.serve.request import CANCELLED, Event, Handed, Ticket
from accel.runtime.session.session import Session


@dataclass(eq=False)
class Job:
    """A request: `session` and `rounds` are its own until it joins others, or for good where none can join; `tokens`:
    what a loop without rounds gives; `length`: tokens that run before it decodes, of which `computed` ran.

    `handoff`: what another engine ran of it; its tokens are known, and were told. `hands`: this engine runs its prompt,
    and hands it over then. `only_prompt`: nothing is made.
    """

    id: int
    prepared: Prepared
    ticket: Ticket
    arrived: float
    handoff: Handed | None = None
    hands: bool = False
    only_prompt: bool = False

    def __post_init__(self) -> None:
        if self.prepared.scores is not None:
            self.ticket.prompt_logprobs = self.prepared.scores.lines
        self.session: Session | None = None
        self.rounds: Rounds | None = None
        self.tokens: Generator[Any] | None = None
        self.length = int(self.row.prompt.size)
        self.most = self.length + (0 if self.hands or self.only_prompt else self.row.left)
        self.handed = False
        self.computed = self._told = 0
        if self.handoff is not None:
            self.row.resume(self.handoff.numbers)
            self._told = len(self.row.tokens)
            self.prepared.sample.script.take(self._told)
            if self.row.scored:  # of what was told already
                self.row.logprobs.extend({} for _ in self.row.tokens)

    @property
    def row(self) -> Row:
        return self.prepared.sample.row

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it, or nobody waits for that."""
        return bool(self.row.finish) or self.ticket.cancelled

    def task(self, blocks: int, hits: int = 0) -> Task:
        """It as a schedule sees it."""
        return Task(self.id, self.length, self.most, self.computed, blocks, self.arrived, hits)

    @property
    def left(self) -> Ints:
        """Tokens [n] that are to run before it decodes."""
        return self.row.seen[self.computed : self.length]

    @property
    def ahead(self) -> int:
        """How many of these are its prompt's."""
        return max(0, int(self.row.prompt.size) - self.computed)

    def hand(self) -> None:
        """Its prompt has run: it goes on elsewhere. Raises SavedSessionError."""
        assert self.session is not None
        self.ticket.hand(Handed(self.session.export_row(), self.row.numbers()))
        self.handed = True

    @property
    def scores(self) -> PromptScores | None:
        """Of its prompt, where some are still to be found."""
        found = self.prepared.scores
        return None if found is None or found.whole else found

    def run(self, tokens: Ints) -> None:
        """Run tokens [n] of its prompt in its session, and score what follows them where that is asked for."""
        assert self.session is not None
        if (scores := self.scores) is not None:
            scores.run(self.session, tokens)
        else:
            self.session.run(tokens[None], last_only=True)

    def stop(self) -> None:
        """Its prompt has run, and nothing is made."""
        self.row.finish = "length"
        self.ticket.put(Event(-1, "", finish="length"))

    def ran(self, tokens: int) -> None:
        """So many more tokens of its prompt ran."""
        self.computed += tokens

    def again(self) -> None:
        """It lost what it held, and is to run from its first token on: of what it made, all but the last."""
        self.length = int(self.row.seen.size) - (1 if self.row.tokens else 0)
        self.computed = 0
        self.close()

    def tell(self) -> int:
        """Give the ticket what the row took since; how many tokens."""
        sample, row, before = self.prepared.sample, self.row, self._told
        finish = sample.finish_reason
        self.ticket.count(row.drafting["drafted"], row.drafting["accepted"])
        for at in range(before, len(row.tokens)):
            last = finish is not None and at == len(row.tokens) - 1
            text = sample.script.take(1)
            if last:
                self.ticket.stop_reason = sample.stop_reason
                text += sample.script.finish()
            logprobs, token = row.logprobs[at] if row.scored else None, row.tokens[at]
            stopped = last and row.finish == "stop"
            mark = token in sample.script.marks and not stopped
            self.ticket.put(Event(token, text, logprobs, finish if last else None, mark))
        self._told = len(row.tokens)
        if row.tokens:
            self.computed = max(self.computed, int(row.seen.size) - 1)
        return self._told - before

    def end(self, error: BaseException | None = None) -> None:
        """Tell the ticket that no more comes, where it does not know: the request failed, or was cancelled."""
        if error is not None:
            self.ticket.put(error)
        elif not self.row.finish and not self.handed:
            self.ticket.put(Event(-1, self.prepared.sample.script.finish(), None, CANCELLED))

    def close(self) -> None:
        """Free what is its own."""
        tokens, rounds, session = self.tokens, self.rounds, self.session
        self.tokens = self.rounds = self.session = None
        if tokens is not None:
            tokens.close()
        if rounds is not None:
            rounds.close()
        if session is not None:
            session.close()
