"""One sequence being decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from typing import Any, Protocol

import numpy as np

from accel.ir.errors import InputError
from accel.runtime.call import Logits
from accel.runtime.decode.logprobs import Logprob
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample import Sampler

STAGES = (
    "draft",
    "verify",
    "host",
)  # where a round's time goes: drafters, calls of the model, all else


def tokens_of(ids: Ints, vocab_size: int) -> Ints:
    """Of ids [n] those of a vocabulary; all of them are the same array."""
    known = ids < vocab_size
    return ids if known.all() else ids[known]


class Watch(Protocol):
    """What sees each token of a row."""

    def __call__(self, token: int) -> bool:
        """Whether a stop string was reached with it."""

    def end(self) -> bool:
        """No more tokens come: whether a stop string was in what waited for them."""

    def branch(self) -> Watch | None:
        """Another that goes on from here by itself; None where there is nothing to wait for."""


class Row:
    """One sequence being decoded: what it has, how it picks tokens, when it ends. The same for
    every loop.

    `finish` is "" while it runs, then why it ended: "eos", "stop" (a stop string, or the end of a grammar), "length",
    "context" or "failed" (`error`). Rows with the same array as `prompt` are samples of one prompt, which runs once for
    them.
    """

    def __init__(
        self,
        prompt: Ints,
        sampler: Sampler,
        rng: np.random.Generator,
        *,
        limit: int,
        max_context: int,
        eos: Collection[int] = (),
        watch: Watch | None = None,
        score: Callable[[int, Logits], dict[int, Logprob]] | None = None,
        vocab_size: int | None = None,
    ):
        """`limit`: most new tokens; `watch` sees each one; `score`: what `logprobs` are to hold of a token and the
        logits [V] that it follows from (None: nothing). `vocab_size`: V; None: all ids of the prompt are tokens.
        """
        room = min(limit, max_context - prompt.size)
        self.prompt = prompt
        self.sampler = sampler
        self.rng = rng
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.drafting = Counter[str]()  # figures of a loop that drafts
        self.drafts = Counter[
            tuple[int, int]
        ]()  # of chains: tokens drafted, and how many of them stood
        self.seconds: dict[str, float] = {}  # of a group's drafts, on its first row: stage -> time
        self.draft_kv_bytes = (
            0  # most bytes of state that a group's drafters hold, on its first row
        )
        self.began = 0.0  # when its prompt had run, by perf_counter
        self.finish = "" if room > 0 else "context"
        self.error: Exception | None = None  # what made it fail
        self._ids = np.concatenate([prompt, np.zeros(max(room, 0), np.int64)])
        self._room = room
        self.prompt_text = prompt if vocab_size is None else tokens_of(prompt, vocab_size)
        self._at_end = "length" if room == limit else "context"
        self._eos = frozenset(eos)
        self._watch = watch
        self._score = score

    @property
    def seen(self) -> Ints:
        """Prompt and new tokens so far, [n]; a view, not to be kept."""
        return self._ids[: self.prompt.size + len(self.tokens)]

    @property
    def text(self) -> Ints:
        """The tokens of `seen`, without the ids of the prompt that are none of the vocabulary; not to be kept."""
        if self.prompt_text is self.prompt:
            return self.seen
        return np.concatenate([self.prompt_text, np.array(self.tokens, np.int64)])

    @property
    def left(self) -> int:
        """New tokens that there is still room for."""
        return self._room - len(self.tokens)

    def ends(self, token: int) -> bool:
        """Whether it is one of the tokens that end the row."""
        return token in self._eos

    def pick(self, logits: Logits) -> int:
        """The sampler's choice from logits [V] that follow `seen`."""
        return self.sampler(logits, self.seen, self.rng)

    def accept(self, token: int, logits: Logits | None) -> None:
        """Take a token as the next one; sets `finish` where it is the last. logits [V]: what the model gave for it,
        None where the loop cannot tell. Raises InputError where log-probabilities are to be told of it.
        """
        if self._score is not None:
            if logits is None:
                raise InputError("this loop gives no logprobs; leave logprobs unset")
            self.logprobs.append(self._score(token, logits))
        self._take(token)

    def accept_all(self, tokens: Iterable[tuple[int, Logits]]) -> None:
        """Take tokens, each with its logits as in `accept`, up to the row's end; an error fails it behind those
        before.
        """
        try:
            for token, logits in tokens:
                self.accept(token, logits)
                if self.finish:
                    return
        except Exception as error:
            self.fail(error)

    def end(self) -> None:
        """The text is over: nothing follows what it has."""
        if not self.finish:
            if self._watch is not None:
                self._watch.end()
            self.finish = "stop"

    def fail(self, error: Exception) -> None:
        """It cannot go on, because of an error of its own: of its sampler, its processors or its text."""
        self.finish, self.error = "failed", error

    def follow(self, branch: Row) -> None:
        """Take all that a branch of this row took since."""
        self.logprobs = list(branch.logprobs)
        for token in branch.tokens[len(self.tokens) :]:
            self._take(token)

    def _take(self, token: int) -> None:
        self._ids[self.prompt.size + len(self.tokens)] = token
        self.tokens.append(token)
        stopped = self._watch is not None and self._watch(token)
        if token in self._eos:
            self.finish = "eos"
        elif stopped or self.sampler.complete(self.seen):
            self.finish = "stop"
        elif len(self.tokens) == self._room:
            stopped = self._watch is not None and self._watch.end()
            self.finish = "stop" if stopped else self._at_end

    def numbers(self) -> dict[str, Any]:
        """All that a row of the same request lacks to go on from here, as JSON: its tokens and its random numbers."""
        return {"tokens": list(self.tokens), "rng": self.rng.bit_generator.state}

    def resume(self, numbers: Mapping[str, Any]) -> None:
        """Go on from where another row of the same request was, which gave `numbers`; this one has no token yet. Texts
        and grammars see its tokens again; log-probabilities are told of later ones only.
        """
        for token in numbers["tokens"]:
            self._take(token)
        self.rng.bit_generator.state = numbers["rng"]

    def clock(self, draft: float, verify: float, whole: float) -> None:
        """Add the seconds of a round: those of the drafters, of the call that checks, and of all of it."""
        for stage, spent in zip(STAGES, (draft, verify, whole - draft - verify), strict=True):
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are to be told of its tokens."""
        return self._score is not None

    def branch(self, rng: np.random.Generator | None = None, with_logprobs: bool = True) -> Row:
        """Another that goes on from here by itself, with random numbers of its own where they are given.
        `with_logprobs`: it tells log-probabilities, too, where this row does.
        """
        other = copy(self)
        other.tokens, other._ids, other.drafting = list(self.tokens), self._ids.copy(), Counter()
        other.logprobs, other.sampler = list(self.logprobs), self.sampler.branch()
        other._watch = None if self._watch is None else self._watch.branch()
        other.rng = self.rng if rng is None else rng
        other._score = self._score if with_logprobs else None
        return other
