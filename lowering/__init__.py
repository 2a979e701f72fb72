"""Program -> something that runs. A target keeps a table from operator to the function that lowers it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


class Table:
    """Operator -> lowering function of one target; files fill it with `@table(op, …)`."""

    def __init__(
        self,
        target: str,
        *,
        batch_invariant: bool = False,
        missing: Callable[[], str] = lambda: "",
        join: Callable[[Any, Collection[str]], None] = lambda builder, outputs: None,
    ):
        """`batch_invariant`: a token's row does not depend on how many tokens share its call.
        `missing`: why this machine cannot run it; "" where it can.
        `join(builder, outputs)`: puts the nodes of a finished graph together, `outputs` kept.
        """
        self.target = target
        self.batch_invariant = batch_invariant
        self.missing = missing
        self.join = join
        self.rules: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function for each operator (an overload or a Python operator)."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for op in ops:
                if op in self.rules:
                    raise ValueError(f"{self.target}: two lowerings for {op}")
                self.rules[op] = function
            return function

        return add
