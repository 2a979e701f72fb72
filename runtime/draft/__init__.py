"""Axis: where drafted tokens come from. What a drafter proposes changes the speed and never the tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from accel.ir.facts import Facts
from accel.ir.invariants import Method
from accel.ir.recipe import Recipe
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.session.session import Session
from accel.runtime.tree import Level, Tree
from accel.runtime.verify import Verdict

__all__ = ["Base", "Drafter", "Drafters", "More"]


class More(Protocol):
    """What a drafter asks while it drafts: the lengths of all rows (`length.Paces`)."""

    def draws(self, said: Mapping[int, Sequence[npt.NDArray[np.float32]]]) -> Collection[int]: ...
    def more(self, row: int, level: Level, logits: Sequence[npt.NDArray[np.float32]]) -> bool: ...


class Drafter(ABC):
    """What drafts for one row, from its prompt to its end; it may remember what it saw. It is given tokens of the
    vocabulary alone (`Row.text`). `free`: what it drafts depends
    on tokens and what it was told of them, not on which drafts were checked.
    """

    free: ClassVar[bool] = True

    @abstractmethod
    def draft(self, seen: Ints, limit: int) -> Tree:
        """What may follow the committed tokens `seen` [n], prompt and new ones, a view, not to be kept: at most
        `limit` (1 or more) tokens; where it has no idea none, `Tree.chain([])`.
        """

    def observe(  # noqa: B027
        self, tree: Tree, verdict: Verdict, logits: npt.NDArray[np.float32]
    ) -> None:
        """What became of a draft `tree`, its own or another drafter's (`stack`): the target's logits [N+1,V] after the
        last committed token and after each drafted one, and what stands. A step without a draft is told too, N = 0, but
        for those while drafting does not pay. Not to be kept.
        """

    def end(self, seen: Ints) -> None:  # noqa: B027
        """The row ended, or was left, with these tokens [n]; a store may take them. Not to be kept."""


class Drafters(ABC):
    """What drafts for all rows of a session, from their prompts to their ends."""

    draft_cost: float = (
        0.0  # what a drafted token costs, in plain steps of the target, as far as is known before
    )
    probes: bool = False  # whether it can `probe`
    free: bool = False  # whether each draft runs no model, and depends on no earlier one: it may be asked beside steps
    opening: float = (
        0.0  # plain steps that its first draft, or probe, takes beside, as far as is known before
    )

    @property
    def joins(self) -> bool:
        """Whether rows may `join` and `leave`."""
        return False

    @property
    def kv_bytes(self) -> int:
        """Most bytes of state that sessions of its own have held."""
        return 0

    def probe(self, rows: Sequence[int]) -> Sequence[tuple[int, int]]:
        """What drafts would have been of the tokens that these rows took since it last drafted or looked, all of them
        without a draft: how many tokens each, and how many of them stand, the newest last. For less than drafts cost.
        """
        raise NotImplementedError(f"{type(self).__name__} declares probes, but has no probe method")

    @abstractmethod
    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        """For each row asked, at most so many (1 or more) tokens that may follow its `seen`; a row that is
        missing has none. Rows may go unasked for any time: they ended, or drafting did not pay. What drafts
        level by level by logits asks `more` before and after each level, and ends the row's draft where it says no.
        """

    def observe(  # noqa: B027
        self, row: int, tree: Tree, verdict: Verdict, logits: npt.NDArray[np.float32]
    ) -> None:
        """As of `Drafter`, of a row that runs, before it takes what stands."""

    def join(self, other: Self) -> None:
        """The rows of `other`, which drafts for another session of the model, go on behind these; it is not used any
        more. The target's sessions have joined, and the list of rows that this one was opened with has them all.
        """
        raise NotImplementedError(f"{type(self).__name__} declares joins, but has no join method")

    def leave(self, order: Ints) -> None:
        """Row i [n] goes on as row order[i] was, and the others are gone; the list of rows is still as before."""
        raise NotImplementedError(f"{type(self).__name__} declares joins, but has no leave method")

    def close(self) -> None:  # noqa: B027
        """Free what it holds. The target's session is still open."""


class Base(Method):
    """A method: a frozen dataclass whose fields are its options. It implements `begin` to draft for each row
    on the host, or `open` to draft for all rows with one model call.
    """

    needs: ClassVar[Mapping[str, str]] = {}  # as `asks`, of axes that change the graph
    fills: ClassVar[bool] = False  # whether its smaller model fills masks; else that is causal
    head: ClassVar[bool] = False  # whether it is a head, which drafts by what the target computes
    blocks: ClassVar[bool] = (
        False  # whether its head's calls say who sees whom, whatever shape drafts have
    )
    independent: ClassVar[bool] = False  # whether its head's calls say all of a tree at once
    within: ClassVar[bool] = (
        False  # whether its head lies in the directory of the target, where no `path` is set
    )

    @property
    def asks(self) -> Mapping[str, str]:
        """Other axes whose methods it works with, and the one that is taken where a recipe names none."""
        return {}

    def fit(self, model: Any) -> None:
        """Raises InputError where what it goes by was made for another model than sessions are of (`loop.Model`)."""

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> Any:
        """What the drafters of a loaded model share from request to request (`context.store`), made once: what they
        remember, or data that they read. None: nothing, so that drafts depend on the request alone. Its `bytes` have a
        bound, and threads may use it at once. What it holds changes the speed, never the tokens. Raises RecipeError
        where it does not suit the model.
        """
        return None

    def begin(self, prompt: Ints, store: Any = None) -> Drafter:
        """A drafter for a row with this prompt [n]; a method that remembers nothing is its own. `store`: as of
        `store`.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts for all rows at once; use open")

    def steps(self) -> list[Any]:
        """The passes that it needs in the graph, such as one that names the hidden states that it reads. Only a build
        asks, which has torch.
        """
        return []

    def draft_folder(self) -> Path | None:
        """The folder of a smaller model that a build puts into the artifact (`context.model.draft_model`), or None."""
        return None

    def draft_recipe(self) -> Recipe | None:
        """The recipe by which a build makes `context.model.draft_model` of the model itself, over the same weights, or
        None. Raises RecipeError.
        """
        return None

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        """For the rows of the target's session, before it has run anything. A drafter may run the session itself,
        and then takes back what it added. Raises InputError where it cannot draft for this model.
        """
        return _Each([self.begin(row.prompt_text, context.store) for row in rows], rows)


@dataclass
class _Each(Drafters):
    """A drafter per row."""

    drafters: list[Drafter]
    rows: Sequence[Row]
    joins = True

    def __post_init__(self) -> None:
        self.free = all(one.free for one in self.drafters)

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        return {i: self.drafters[i].draft(self.rows[i].text, limit) for i, limit in limits.items()}

    def observe(
        self, row: int, tree: Tree, verdict: Verdict, logits: npt.NDArray[np.float32]
    ) -> None:
        self.drafters[row].observe(tree, verdict, logits)

    def join(self, other: Self) -> None:
        self.drafters += other.drafters

    def leave(self, order: Ints) -> None:
        for i in set(range(len(self.drafters))).difference(order.tolist()):
            self.drafters[i].end(self.rows[i].text)
        self.drafters = picked(self.drafters, order)

    def close(self) -> None:
        for drafter, row in zip(self.drafters, self.rows, strict=True):
            drafter.end(row.text)
