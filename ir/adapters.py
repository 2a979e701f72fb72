"""Low-rank adapters of which each row of a session uses one: the inputs that a step takes them by, and what a manifest
says of them.

For an adapted module the step computes y = x Wᵀ + ((x a) * rows) b. The inputs a [K,R] and b [R,N] hold the adapters
that a session uses side by side, R their ranks together (0 by default), and `rows` [B,1,R] is 1 where a row uses one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from accel.ir.fields import Fields, Positive

ROWS = "lora.rows"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # of an adapter, which is part of a file's


def a_of(module: str) -> str:
    """The input a [K,R] of a module."""
    return f"lora.{module}.a"


def b_of(module: str) -> str:
    """The input b [R,N] of a module, scaled."""
    return f"lora.{module}.b"


def file_of(name: str) -> str:
    """Where an artifact holds an adapter."""
    return f"adapters/{name}.safetensors"


@dataclass(frozen=True)
class AdapterFacts:
    """What a step takes, and which adapters come with it.

    modules: name -> (K, N), its inputs and outputs. ranks: of each adapter, by name. bytes: of each, likewise.
    """

    modules: dict[str, tuple[int, int]]
    ranks: dict[str, Positive] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def check(self, f: Fields) -> None:
        """See `fields.read`."""
        for name in self.ranks:
            if not NAME.fullmatch(name):
                raise f.wrong(f"ranks.{name}", name, "the name of an adapter")
        for name in self.ranks:
            if name not in self.bytes:
                raise f.wrong("bytes", sorted(self.bytes), f"a number for {name}, too")

    def shapes(self) -> dict[str, list[int | str]]:
        """The inputs of a step by name, with R and B as graphs have them."""
        found: dict[str, list[int | str]] = {ROWS: ["B", 1, "R"]}
        for module, (into, out) in self.modules.items():
            found |= {a_of(module): [into, "R"], b_of(module): ["R", out]}
        return found
