"""Sizes of state, which mix numbers and letters; "C/16" is one for every 16 slots that C begins, "P0/32" likewise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# rows, the encoder's positions, blocks of a row and of a pool, slots (of layers that see a prompt pruned, or a
# window: C1, …), kept blocks, a layer's kept slots, those in fewer bits (Q0_1: in the layer's second form), how often
# tokens came in
LETTER = re.compile(r"[BXMZ]|C\d*(/[1-9]\d*)?|P\d*(/[1-9]\d*)?|[QE]\d+(_[1-9]\d*)?")
FEW = 32  # tokens of a call, up to which each reads pages of its own


def in_numbers(shape: Sequence[int | str], letters: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with its letters' sizes; those that are not given are 0, and C1 what C is."""
    return tuple(size if isinstance(size, int) else _size(size, letters) for size in shape)


def grows(shape: Sequence[int | str]) -> bool:
    """Whether it grows with the slots, C."""
    return any(isinstance(size, str) and size.startswith("C") for size in shape)


def per_slot(shape: Sequence[int | str]) -> float:
    """Elements that a row has of it for each slot; letters count as one."""
    total = 1.0
    for size in shape:
        total *= size if isinstance(size, int) else 1 / each(size)
    return total


def _size(size: str, letters: Mapping[str, int]) -> int:
    letter = size.partition("/")[0]
    other = letters.get("C", 0) if letter.startswith("C") else 0
    return -(-letters.get(letter, other) // each(size))


def each(size: str) -> int:
    """How many slots one entry of a size stands for: 16 of C/16."""
    return int(size.partition("/")[2] or 1)
