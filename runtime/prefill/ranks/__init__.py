"""Axis: how a prompt's work is shared by several ranks, and what they send each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.ir.errors import InputError
from accel.ir.invariants import Invariant, Method
from accel.runtime.prefill.exchange.plan import Plan

__all__ = ["Base"]

MOST = 64  # ranks


@dataclass(frozen=True)
class Base(Method, ABC):
    """Sequence parallelism: `ranks` share the tokens of a prompt, and exact attention comes of what they exchange.

    A method is a function `plan`, of how many tokens a row gets and has, that says which tokens are whose and what
    each rank attends to, sends and receives in a layer (`exchange/plan.py`). Every query must meet every key that it
    may see, once. The pass (`steps`) cuts the step at each attention; a session runs the plan and writes the keys and
    values into its cache, from which it goes on as always.

    ranks: how many. least: prompts and later calls of fewer tokens run in one piece, by the step. processes: each rank
    is a process of its own; else all run in this one, one after the other, which shows what would be sent.
    """

    ranks: int = option(2, least=1, most=MOST)
    least: int = option(512, least=1)
    processes: bool = False

    grade: ClassVar[str] = "lossless"
    relies = frozenset(
        {
            Invariant.ALL_LAYERS_RUN,
            Invariant.ALL_TOKENS_HELD,
            Invariant.APPEND_ONLY,
            Invariant.CHAINS,
            Invariant.FULL_ATTENTION,
            Invariant.HOST_MEMORY,
            Invariant.PLAIN_KEYS,
            Invariant.ROW_PRIVATE,
            Invariant.TOKENS_CONTIGUOUS,
            Invariant.UNIFORM_SLOTS,
        }
    )
    breaks = frozenset({Invariant.BATCH_INVARIANCE, Invariant.EVERY_TOKEN_RUNS})

    @property
    def fewest(self) -> int:
        """Tokens without which a rank would have none."""
        return self.ranks

    def plan(self, tokens: int, cached: int, heads: int, groups: int) -> Plan:
        """Of `tokens` new tokens behind `cached` ones, with so many query heads and KV heads.

        Raises InputError where there are fewer tokens than `fewest`.
        """
        if tokens < self.fewest:
            raise InputError(
                f"{self.full_name}: {tokens} tokens are too few for {self.ranks} ranks, which share at least "
                f"{self.fewest}; give more tokens, or fewer ranks"
            )
        return self.planned(tokens, cached, heads, groups)

    @abstractmethod
    def planned(self, tokens: int, cached: int, heads: int, groups: int) -> Plan:
        """The same, of enough tokens."""

    def steps(self) -> list[Any]:
        """The passes that it puts into a recipe. Only a build asks, which has torch."""
        from accel.passes.prefill.ranks import Ranks

        return [Ranks()]
