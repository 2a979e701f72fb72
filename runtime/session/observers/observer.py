"""What a session keeps beside its cache: one protocol for all that has to follow its calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from accel.ir.facts import Facts
from accel.ir.state import StateValue
from accel.runtime.backends.protocol import BackendSession
from accel.runtime.call import Arrays, Call, Embeds, Logits
from accel.runtime.inputs.ints import Bools, Ints
from accel.runtime.rows import copies, joined, numbers_of, restored, selected


@dataclass(frozen=True)
class Capabilities:
    """What a loop may rely on before anything runs, for calls of one graph call each, after a prompt (`end_prompt`).

    Attributes:
        free_rewind: a rewind costs nothing; if False, the next call first recomputes some tokens.
        free_drafts: a rewind into the last call, of a few tokens, runs none of them again, as of rejected drafts.
        back: number of newest tokens since the prompt that can always be rewound; None: all.
        width: most tokens per call whose logits equal those of single-token calls, up to rounding; None:
            any number, as far as `Session.room` allows.
        trees: a call may be a draft tree (`Session.guess`).
        joins: rows of another session may join (`Session.join`), and each goes on as it would alone.
        chunks: a prompt may run in several calls, the last one `Session.prompt`, and its row goes on as after one.
    """

    free_rewind: bool = True
    free_drafts: bool = True
    back: int | None = None
    width: int | None = None
    trees: bool = True
    joins: bool = True
    chunks: bool = True

    def __and__(self, other: Capabilities) -> Capabilities:
        """What both have."""
        return Capabilities(
            self.free_rewind and other.free_rewind,
            self.free_drafts and other.free_drafts,
            _least(self.back, other.back),
            _least(self.width, other.width),
            self.trees and other.trees,
            self.joins and other.joins,
            self.chunks and other.chunks,
        )


def _least(*limits: int | None) -> int | None:
    return min((n for n in limits if n is not None), default=None)


@dataclass(frozen=True)
class ModelParts:
    """What a model brings; observers say by it whether its sessions need them.

    tables: those of the recipe, as JSON. state: its layout. entries: names of the graphs. open_session: a
    backend session of so many rows, with an empty cache. pool: memory that sessions share (`Backend.pool`).
    path: the artifact's folder, if there is one. threads: those that were asked for.
    """

    facts: Facts
    tables: Mapping[str, Any]
    state: Sequence[StateValue]
    entries: Collection[str]
    open_session: Callable[[int], BackendSession]
    pool: Callable[[Sequence[int], str], Any]
    path: Path | None = None
    threads: int | None = None


@dataclass(frozen=True)
class ObserverFactory:
    """Makes an observer for each session of a model, of so many rows. `shared`: figures of what they share;
    `known`: how many tokens of a prompt [n], of a row with the adapter of this number, they spare it; `close`: frees
    it, when the model closes.
    """

    open: Callable[[int], SessionObserver]
    shared: Callable[[], dict[str, int]] | None = None
    known: Callable[[Ints, int], int] | None = None
    close: Callable[[], None] | None = None


class Calls(Protocol):
    """What an observer that makes graph calls of its own asks of its session (`session/core.py`)."""

    vocab_size: int
    token_ids: int  # how many ids a step reads
    max_context: int
    batch: int
    lengths: Ints  # tokens of each row [B]; replaced, never written

    @property
    def backend(self) -> BackendSession:
        """Raises InputError where the session is closed."""

    @property
    def chunk(self) -> int:
        """Most columns of one graph call."""

    @property
    def base(self) -> Ints | int:
        """The position of slot 0 of each row [B]."""

    def need(self, slots: list[int]) -> None:
        """Make room for so many slots in each part of the state."""

    def count(self, calls: int, tokens: int, start: float) -> None:
        """Add graph calls and real tokens to the figures, and the seconds since `start`."""

    def put(self, arrays: Arrays) -> None:
        """Let state values be these arrays."""

    def whole_prompt(self, tokens: Ints, counts: Ints) -> AbstractContextManager[None]:
        """Around an observer's own run of prompts [B,T] of an empty session, of `counts` [B] tokens: all observers know
        of it, and the session is as it was where it fails.
        """

    def aside(
        self,
        tokens: Ints,
        counts: Ints,
        first: Ints,
        listeners: tuple[CallWatcher, ...] = (),
    ) -> Logits:
        """Graph calls of tokens [B,T], `counts` [B] of them real, from position `first` [B] on, of which only
        `listeners` hear and which rows do not hold afterwards: the logits [B,1,V] of the last.
        """

    def fork(self) -> Any:
        """A `SessionCore` of its own that holds the same tokens."""

    def step(
        self,
        tokens: Ints,
        positions: Ints,
        slots: Ints,
        rows: Ints,
        real: int,
        *,
        again: Bools | None = None,
    ) -> Logits:
        """One graph call, of which `real` tokens are no padding; all observers hear of those that do not run `again`
        [B,T].
        """

    def part(self, entry: str, tokens: Ints, positions: Ints, slots: Ints, real: int) -> None:
        """One call of an entry that takes what a step takes and gives no logits; all observers hear of it."""

    def observe(self, queries: Arrays, positions: Ints) -> None:
        """Of some layers of a prompt the queries [B,T,H,D], at these positions [B,T]; all observers hear of it."""

    def heard(self, tokens: Ints, positions: Ints) -> None:
        """Tell all observers of tokens [B,T] that ran without a step, at these positions [B,T] (-1: padding)."""

    def run(self, tokens: Any, lengths: Any, last_only: bool) -> Logits:
        """See `Session.run`."""

    def rewind(self, new_lengths: Ints) -> None:
        """Let rows hold no more than `new_lengths` [B] tokens. Raises InputError."""

    def set_length(self, row: int, length: int) -> None:
        """Let a row hold so many tokens, whose slots the caller has written."""


@dataclass(frozen=True, eq=False)
class Settled:
    """What was due is done, and the buffers are new. calls: the graph calls that it took. lengths: what rows hold then,
    at positions from 0 on; None: the same tokens. moved: what was held lies elsewhere, and is as it was.
    """

    calls: int
    lengths: Ints | None = None
    moved: bool = False


class SessionObserver:
    """What a session keeps beside its cache, for all of its rows. Numbers of tokens are per row, [B].

    A session asks its observers one after the other, by their `order`. What one knows of rows it declares
    (`runtime/rows.py`), so that rows are selected, joined, copied and saved. An observer that follows calls is a
    `CallWatcher`, one that runs prompts in another way a `PromptRunner`, one that goes by marks of tokens a `Marked`.
    """

    order: ClassVar[int] = 50  # lower ones are asked first
    rewrites: ClassVar[bool] = False  # whether tokens are written over, so that rows share nothing

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """None where sessions of the model do without. Raises RecipeError."""
        return None

    @property
    def capabilities(self) -> Capabilities:
        """What a loop may rely on, as far as this one goes."""
        return Capabilities()

    @property
    def held_from(self) -> Ints | int:
        """The position up to which rows can be rewound."""
        return 0

    @property
    def stats(self) -> dict[str, float]:
        """Figures for `session.stats`."""
        return {}

    def adapted(self, numbers: Sequence[int]) -> None:
        """The rows of this new session use these adapters (0: none)."""

    def check(self, new_lengths: Ints, lengths: Ints) -> None:
        """Raise InputError where rows of `lengths` tokens cannot go back to `new_lengths`. Changes nothing."""

    def rewind(self, backend: BackendSession, new_lengths: Ints, lengths: Ints) -> bool:
        """Rows of `lengths` tokens go back to `new_lengths`, to which all agreed. Whether the buffers are new."""
        return False

    def select(self, rows: Ints) -> None:
        """Row i goes on as what row rows[i] was, for any number of rows [n]."""
        vars(self).update(selected(self, rows))

    def join(self, backend: BackendSession, other: Self) -> None:
        """The rows of `other`, which knows as much of another session of the model, follow this one's. It may keep what
        `other` holds. Only where `capabilities` say so. The buffers are new, and have all rows.
        """
        vars(self).update(joined(self, other))

    def copy(self) -> Self:
        """One for a fork, independent of this; its figures start at 0."""
        other = copy(self)
        vars(other).update(copies(self))
        return other

    def numbers(self, backend: BackendSession) -> Arrays:
        """All that it knows, arrays by name, for a file (`runtime/session/saved.py`)."""
        return numbers_of(self)

    def restore(self, backend: BackendSession, numbers: Arrays, lengths: Ints) -> None:
        """Know again what `numbers` gave, in a new session whose buffers are the saved ones and whose rows hold
        `lengths` [B] tokens. It may keep the arrays. Raises InputError.
        """
        vars(self).update(restored(self, numbers))

    def leaving(self, backend: BackendSession, rows: Ints, lengths: Ints) -> None:
        """These rows [n] end, of a session whose rows hold `lengths` [B] tokens, all of which are still there."""

    def close(self, backend: BackendSession, lengths: Ints) -> None:
        """The session ends; the backend session is still open."""


class CallWatcher:
    """Follows the calls of a session, and the graph calls that they take. By default nothing is done."""

    controls: ClassVar[Mapping[str, str]] = {}
    """What a call may say beside its tokens (`Session.run`), by name; and what a model without it lacks."""
    moves_slots: ClassVar[bool] = False  # whether slots go or come between the parts of a prompt
    base: Ints | None = (
        None  # the position of slot 0 of each row, by the first observer that has one; else 0
    )

    def call_room(self, lengths: Ints) -> Ints | None:
        """Tokens that the next call of each row [B], of `lengths` tokens, may have so that its logits are those of
        single calls, and all but its first can be rewound as if they had never been; None: any number.
        """
        return None

    def begin(self, backend: BackendSession, call: Call) -> None:
        """A call comes. Raises InputError, and then knows what it knew."""

    def catch_up(self, backend: BackendSession, lengths: Ints) -> tuple[Ints, Ints, Ints] | None:
        """Tokens to run again before anything else: ids [B,T], how many of each row, where they start."""
        return None

    def lost(self) -> bool:
        """Whether what was done since `begin` cannot be taken back."""
        return False

    def undo(self, backend: BackendSession, lengths: Ints) -> bool:
        """The call failed, rows hold `lengths` tokens as before. Whether the buffers are new."""
        return False

    def make_room(self, backend: BackendSession, slots: Ints, width: int) -> None:
        """A graph call of `width` columns comes, whose first slots in the cache are `slots` [B]: let go, in place, of
        what no token from there on sees.
        """

    def slots(self, ends: Ints) -> Sequence[int]:
        """Slots that buffers of other sizes need where those of the cache need `ends` [B]."""
        return ()

    def before(self, backend: BackendSession, width: int) -> Collection[str]:
        """A step of so many columns comes. The names of the extra outputs that it is to give."""
        return ()

    def after(self, tokens: Ints, positions: Ints, extra: Arrays) -> None:
        """A step ran: tokens, positions [B,T] (-1: padding), and the extra outputs [B,T,…] that someone asked for. Or
        rows hold these tokens without one, by another observer.
        """

    def observe(self, queries: Arrays, positions: Ints) -> None:
        """Some layers ran a part of a prompt: their queries [B,T,H,D], at these positions [B,T] (-1: padding)."""

    def settle(self, backend: BackendSession, moment: str, lengths: Ints) -> Settled | None:
        """Do what is due at a moment (`runtime.kv.when`), where rows hold `lengths` tokens. None: nothing was done."""
        return None

    def rehearse(self, calls: Calls, moment: str, lengths: Ints) -> None:
        """`settle` comes between the parts of a long call ("part"), or as a prompt is whole ("prompt"), where rows hold
        `lengths` tokens: run tokens that rows do not hold afterwards.
        """

    def pin(self, backend: BackendSession) -> None:
        """Another observer changed what the cache holds, so that no token before can be run again."""


class EmbedsGiver:
    """Says of a step which of its tokens have embeddings in their place."""

    def embeds(self, positions: Ints, tree: bool = False) -> Embeds | None:
        """Of tokens at these positions [B,T] (-1: padding); None: of none. Those of a `tree` are a whole call."""
        raise NotImplementedError


class PromptRunner:
    """Runs tokens in another way than the step by step of a session, prompts above all."""

    def admit(
        self, backend: BackendSession, tokens: Ints, counts: Ints | None, lengths: Ints
    ) -> tuple[Ints, Ints | None, Ints] | None:
        """Of tokens [B,T] whose last logits are asked for, `counts` of them real (None: all): what is left to
        run, how many are real, how many each row holds without; the buffers are then new, and recurrent state is as
        behind those. None: all are run.
        """
        return None

    def reopen(self, backend: BackendSession, first: Ints) -> bool:
        """Tokens from `first` [B] on run again, into slots of the rows' own. Whether the buffers are new."""
        return False

    def stops(self, first: Ints, counts: Ints) -> Ints | None:
        """Of `counts` [B] tokens that come after `first` [B], behind how many a graph call is to end, less than all;
        0: as it may.
        """
        return None

    def run(
        self, calls: Calls, tokens: Ints, counts: Ints | None, last_only: bool, prompt: bool
    ) -> Logits | None:
        """Run the tokens [B,T] of a call in graph calls of one's own, `counts` of them real (None: all): the logits
        that `Session.run` gives. `prompt`: they are whole prompts of an empty session. None: it is run as usual.
        """
        return None

    def shorten(self, calls: Calls, tokens: Ints, counts: Ints) -> tuple[Ints, Ints] | None:
        """Of prompts [B,T] of an empty session, `counts` of them real: what is left to run, and how many of that
        are real. None: all.
        """
        return None

    def prompt(self, calls: Calls, tokens: Ints, counts: Ints) -> Logits | None:
        """Run prompts of an empty session, which then holds `counts` tokens: the logits [B,1,V]. None: they are run
        as any tokens.
        """
        return None

    def extend(self, calls: Calls) -> Logits | None:
        """Prompts of a session that was empty have run: let rows hold more than these, and give the logits [B,1,V]
        that then come last. None: nothing is added.
        """
        return None


@runtime_checkable
class Marked(Protocol):
    """Goes by what the caller says of tokens."""

    def mark(self, units: Any, question: Any, lengths: Any) -> bool:
        """See `Session.mark`. Whether it was noted."""


@runtime_checkable
class Editable(Protocol):
    """Lets tokens of a row become others."""

    def edit(self, calls: Calls, start: int, stop: int, tokens: Any, row: int) -> Logits:
        """See `Session.edit`."""
