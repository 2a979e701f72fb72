"""Axis: how calls of the model become tokens: autoregressive, speculative, masked diffusion, or search."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

from accel.ir.axis import host_method
from accel.ir.errors import InputError
from accel.ir.facts import Facts
from accel.ir.invariants import Invariant, Method
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import Rounds
from accel.runtime.decode.row import Row
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.session.session import Session

__all__ = ["HOST", "Base", "check_rows", "chosen", "in_rounds"]

HOST = (
    "canvas",
    "draft",
    "loop",
    "length",
    "tree",
    "verify",
)  # what decides between calls of the model


def chosen(tables: Any) -> tuple[Base, dict[str, Any]]:
    """The loop that a recipe's tables (JSON) name, and the methods that it and its drafter ask for, by axis.
    Raises RecipeError.
    """
    loop: Base = host_method(tables, "loop", "autoregressive")
    methods = {axis: host_method(tables, axis, use) for axis, use in loop.asks.items()}
    if "draft" in methods:
        methods |= {
            axis: host_method(tables, axis, use) for axis, use in methods["draft"].asks.items()
        }
    return loop, methods


class Base(Method, ABC):
    """A frozen dataclass whose fields are its options."""

    # Other axes whose methods it works with, and the one that is taken where a recipe names none ("": it must).
    asks: ClassVar[Mapping[str, str]] = {}
    # Whether it is for a model that sees both ways; else it takes tokens one after the other, of a causal one.
    masked_diffusion: ClassVar[bool] = False
    # Whether it fills masks behind what a causal model has cached, of one that was trained to (`facts.blocks`).
    blocks: ClassVar[bool] = False
    # Whether a greedy request gets other tokens than those that the model finds likeliest one by one.
    searches: ClassVar[bool] = False
    trees: ClassVar[bool] = False  # whether its calls are trees of guesses, some of which are kept
    grows: ClassVar[bool] = False  # whether those of its draft model are, where its own are not

    writes: ClassVar[bool] = (
        False  # whether text of its own comes, too, which no token's law allows or bans
    )

    # What it takes of a request that others refuse: `judge`, `scorer`; `n`: several texts of a greedy one.
    takes: ClassVar[frozenset[str]] = frozenset()

    @property
    def weighs(self) -> bool:
        """Whether it goes by what calls cost on this machine (`DecodeContext.costs`)."""
        return bool(self.asks) or self.trees

    @property
    def breaks(self) -> frozenset[Invariant]:
        return frozenset({Invariant.CHAINS}) if self.trees else frozenset()

    def unfit(self, facts: Facts) -> str:
        """What a model lacks that the loop needs, behind "the model", with what to do; "": nothing."""
        return ""

    def check(self, tokenizer: Tokenizer | None) -> None:
        """Raise InputError where the model's tokenizer (None: there is none) lacks what the loop needs."""

    def store(self, facts: Facts, tokenizer: Tokenizer | None) -> Any:
        """What outlives a request (`DecodeContext.store`): None, or what is in its `files`. Raises RecipeError."""
        return None

    def fit(self, model: Any) -> None:
        """Raises InputError where what it goes by was made for another model than sessions are of
        (`decode.context.Model`).
        """

    def rounds(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Rounds:
        """Decode a round at a time. The session has one row per `Row`; it is empty, or holds the first tokens of their
        prompts. Each row gets the tokens that it would get alone, whoever joins or leaves. Raises InputError where the
        loop cannot decode sessions of this model.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rounds; use tokens")

    def tokens(
        self, session: Session, rows: list[Row], context: DecodeContext
    ) -> Iterator[tuple[int, int]]:
        """Decode until every row has a `finish`; give (row, token) for each token that a row
        accepted, as they come.

        The session is empty and has one row per `Row`. Each row gets the tokens that it would get
        alone. At the end, or where the iteration is closed, a row of the session holds what its `Row` has, but
        for the last token; after a search, what is left of that (`session.lengths`). An error of one row is raised when
        the others have taken their tokens of its round.
        """
        with closing(self.rounds(session, rows, context)) as rounds:
            yield from rounds.start()
            check_rows(rows)
            while rounds.live:
                yield from rounds.run()
                check_rows(rows)


def in_rounds(loop: Base) -> bool:
    """Whether it has `rounds`; a loop without them has `tokens` of its own, which no row can join."""
    return type(loop).rounds is not Base.rounds


def check_rows(rows: Sequence[Row]) -> None:
    """Raise the error of the first row that failed."""
    for row in rows:
        if row.error is not None:
            raise row.error


def check_text(tokenizer: Tokenizer | None, what: str) -> None:
    """Raise InputError where a loop works with text (`what`: its name and what of it is), and the model has none."""
    if tokenizer is None:
        raise InputError(
            f"loop.{what} text, but this model has no tokenizer; build with tokenizer=…"
        )
