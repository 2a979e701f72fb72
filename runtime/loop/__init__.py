"""Axis: how calls of the model become tokens: one at a time, drafted and checked, masks filled, or by a search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from accel.ir.axis import host_method
from accel.runtime.costs import Costs
from accel.runtime.ints import Ints
from accel.runtime.sample import Base as Sampler
from accel.runtime.session import Session
from accel.runtime.stepper import Facts
from accel.runtime.text import Tokenizer

__all__ = ["HOST", "Base", "Row", "Setting", "Watch", "chosen", "first_tokens", "prompted"]

HOST = ("draft", "loop", "length", "tree", "verify")  # what decides between calls of the model
STAGES = ("draft", "verify", "host")  # where a round's time goes: drafters, calls of the model, all else


class Watch(Protocol):
    """What sees each token of a row."""

    def __call__(self, token: int) -> bool:
        """Whether a stop string was reached with it."""

    def branch(self) -> Watch | None:
        """Another that goes on from here by itself; None where there is nothing to wait for."""


class Row:
    """One sequence being decoded: what it has, how it picks tokens, when it ends. The same for
    every loop.

    `finish` is "" while it runs, then why it ended: "eos", "stop", "length" or "context".
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
    ):
        """`limit`: most new tokens; `watch` sees each one."""
        room = min(limit, max_context - prompt.size)
        self.prompt = prompt
        self.sampler = sampler
        self.rng = rng
        self.tokens: list[int] = []
        self.drafting = Counter[str]()  # figures of a loop that drafts
        self.drafts = Counter[tuple[int, int]]()  # of chains: tokens drafted, and how many of them stood
        self.seconds: dict[str, float] = {}  # of a group's drafts, on its first row: stage -> time
        self.began = 0.0  # when its prompt had run, by perf_counter
        self.finish = "" if room > 0 else "context"
        self._ids = np.concatenate([prompt, np.zeros(max(room, 0), np.int64)])
        self._room = room
        self._at_end = "length" if room == limit else "context"
        self._eos = frozenset(eos)
        self._watch = watch

    @property
    def seen(self) -> Ints:
        """Prompt and new tokens so far, [n]; a view, not to be kept."""
        return self._ids[: self.prompt.size + len(self.tokens)]

    @property
    def left(self) -> int:
        """New tokens that there is still room for."""
        return self._room - len(self.tokens)

    def pick(self, logits: npt.NDArray[np.float32]) -> int:
        """The sampler's choice from logits [V] that follow `seen`."""
        return self.sampler(logits, self.seen, self.rng)

    def accept(self, token: int) -> None:
        """Take a token as the next one; sets `finish` where it is the last."""
        self._ids[self.prompt.size + len(self.tokens)] = token
        self.tokens.append(token)
        stopped = self._watch is not None and self._watch(token)
        if token in self._eos:
            self.finish = "eos"
        elif stopped:
            self.finish = "stop"
        elif len(self.tokens) == self._room:
            self.finish = self._at_end


    def clock(self, draft: float, verify: float, whole: float) -> None:
        """Add the seconds of a round: those of the drafters, of the call that checks, and of all of it."""
        for stage, spent in zip(STAGES, (draft, verify, whole - draft - verify), strict=True):
            self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

    def branch(self, rng: np.random.Generator | None = None) -> Row:
        """Another that goes on from here by itself, with random numbers of its own where they are given."""
        other = copy(self)
        other.tokens, other._ids, other.drafting = list(self.tokens), self._ids.copy(), Counter()
        other._watch = None if self._watch is None else self._watch.branch()
        other.rng = self.rng if rng is None else rng
        return other


class Model(Protocol):
    """What sessions are of."""

    @property
    def facts(self) -> Facts: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def second(self) -> Model | None:
        """The smaller model that drafts, where the recipe has one."""

    @property
    def costs(self) -> Costs: ...
    def session(self, batch: int = 1) -> Session: ...


@dataclass(frozen=True)
class Setting:
    """What a loop is given beside sessions: a method of each axis that it asks for, what calls cost here
    (None: not known), and what the sessions are of.
    """

    methods: Mapping[str, Any] = field(default_factory=dict)
    costs: Costs | None = None
    model: Model | None = None


def chosen(tables: Any) -> tuple[Base, dict[str, Any]]:
    """The loop that a recipe's tables (JSON) name, and the methods that it and its drafter ask for, by axis.
    Raises RecipeError.
    """
    loop: Base = host_method(tables, "loop", "autoregressive")
    methods = {axis: host_method(tables, axis, use) for axis, use in loop.asks.items()}
    if "draft" in methods:
        methods |= {axis: host_method(tables, axis, use) for axis, use in methods["draft"].asks.items()}
    return loop, methods


def prompted(session: Session, rows: list[Row]) -> npt.NDArray[np.float32]:
    """One call for the prompts of all rows that run, padded on the right: the logits after each, [B,1,V]."""
    lengths = np.array([0 if row.finish else row.prompt.size for row in rows])
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    for row, ids in zip(rows, tokens, strict=True):
        ids[: row.prompt.size] = row.prompt[: ids.size]
    logits = session.prompt(tokens, lengths)
    for row in rows:
        row.began = perf_counter()
    return logits


def first_tokens(session: Session, rows: list[Row]) -> Iterator[tuple[int, int]]:
    """Run the prompts of all rows that run, and let each accept the token that it picks: (row, token)."""
    live = [i for i, row in enumerate(rows) if not row.finish]
    if not live:
        return
    logits = prompted(session, rows)
    for i in live:
        token = rows[i].pick(logits[i, 0])
        rows[i].accept(token)
        yield i, token


class Base(ABC):
    """A method is a frozen dataclass whose fields are its options."""

    # Other axes whose methods it works with, and the one that is taken where a recipe names none ("": it must).
    asks: ClassVar[Mapping[str, str]] = {}
    # Whether it fills masks, of a model that sees both ways; else it takes tokens one after the other, of a causal one.
    fills: ClassVar[bool] = False
    trees: ClassVar[bool] = False  # whether its calls are trees of guesses, some of which are kept

    @abstractmethod
    def tokens(self, session: Session, rows: list[Row], setting: Setting) -> Iterator[tuple[int, int]]:
        """Decode until every row has a `finish`; give (row, token) for each token that a row
        accepted, as they come.

        The session is empty and has one row per `Row`. Each row gets the tokens that it would get
        alone. At the end, or where the iteration is closed, a row of the session holds what its `Row` has, but
        for the last token; after a search, what is left of that (`session.lengths`).
        """

    def apart(self, axis: str, method: Any) -> str:
        """Why it cannot go with another method of a recipe; empty where it can."""
        return ""
