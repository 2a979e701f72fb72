"""What a recipe does with the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

COARSE = "coarse"  # the step's input [] bool: whether attention reads what lies in blocks coarsely


@dataclass(frozen=True)
class KvFacts:
    """What a recipe does with the KV cache beyond appending to it.

    observe: last queries of a row that the entry `compress` takes, those of guessed tokens among them. lookahead:
    tokens that are guessed for that at the end of a prompt. repeats: a prompt is run again before it is compressed.
    flush: it drops nothing, and moves blocks of so many tokens (`kv.codec`), but for the first `sinks`.
    tables: the budget's constants, by name, of each layer that evicts; none: it has none. marks: inputs of `compress`
    about a row's tokens that a session gives.
    moves: tokens that stay take positions from 0 on. coarse: a call may read what lies in blocks coarsely.
    """

    observe: int = 0
    flush: int = 0
    lookahead: int = 0
    repeats: bool = False
    tables: tuple[dict[str, tuple[float, ...]], ...] = ()
    marks: tuple[str, ...] = ()
    moves: bool = False
    sinks: int = 0
    coarse: bool = False

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The step's inputs by which a call chooses, with their shapes."""
        return {COARSE: ()} if self.coarse else {}
