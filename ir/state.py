"""A value that lives from call to call, as a program and a manifest describe it."""

from __future__ import annotations

from dataclasses import dataclass

_AFTER = ".next"  # of a state value's name, where it names an output; nothing else spells it
BLOCK = "kept.block."  # roles begin so of blocks that sessions share, and of the table that says whose they are


def output_of(name: str) -> str:
    """The output that gives a state value as it is after a call."""
    return name + _AFTER


def state_of(output: str) -> str:
    """The state value that an output gives; the output's own name where it gives none."""
    return output.removesuffix(_AFTER)


def writes_state(output: str) -> bool:
    """Whether an output gives a state value."""
    return output.endswith(_AFTER)


@dataclass(frozen=True)
class StateValue:
    """`shape` mixes numbers and letters: B, C, X, M, Z, P and P<layer>; C/16 is one for every 16 slots (`ir.sizes`).

    A role `cross.…` says that the encode entry writes the value, once, and that the step only reads it;
    `kept.…` the same of `compress`, each time that it runs, or of the session (`kept.block.…`).
    """

    name: str
    role: str
    layer: int | None
    dtype: str
    shape: tuple[int | str, ...]
    fill: float

    @property
    def output(self) -> str:
        """The output that gives it as it is after a call."""
        return output_of(self.name)

    @property
    def cross(self) -> bool:
        """Whether the encode entry writes it, and the step only reads it."""
        return self.role.startswith("cross.")

    @property
    def kept(self) -> bool:
        """Whether the compress entry or the session writes it, and the step only reads it."""
        return self.role.startswith("kept.")

    @property
    def shared(self) -> bool:
        """Whether the session writes it, between calls: blocks, and the table of them."""
        return self.role.startswith(BLOCK)

    @property
    def pooled(self) -> bool:
        """Whether it is blocks, of a pool that all sessions of a model share."""
        return self.shared and "Z" in self.shape
