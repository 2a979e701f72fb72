"""Values that examples of several kinds of entries take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accel.ir.capture.examples import example
from accel.ir.program import Program
from accel.ir.region import Entry

SLOTS = 128  # of a cache; kernels that keep every bit take multiples of it


def random() -> torch.Generator:
    """The same numbers each time."""
    return torch.Generator().manual_seed(0)


def call(program: Program, batch: int, length: int, start: int = 0) -> dict[str, Tensor]:
    """Random tokens [B,T] of a step from slot `start` on, with logits for the last one."""
    tokens, positions = example(batch, length, program.facts.vocab_size, 7)
    return {
        "tokens": tokens,
        "positions": positions + start,
        "slots": torch.full((batch,), start),
        "rows": positions[:, -1:],
    }


def empty_state(program: Program, entry: Entry, batch: int) -> dict[str, Tensor]:
    """What the entry reads of the state, with nothing in it."""
    read = [s for s in program.state if s.name in entry.inputs and not s.cross]
    return {s.name: s.allocate(B=batch, C=SLOTS) for s in read}


def some_layers(program: Program, name: str) -> dict[str, Tensor]:
    """A call of an entry that is part of the step, over an empty cache."""
    entry = program.entries[name]
    given = call(program, 2, min(13, program.facts.max_context))
    if "stream" in entry.inputs:
        shape = *given["tokens"].shape, int(entry.input("stream").meta["val"].shape[2])
        given["stream"] = torch.randn(shape, generator=random())
    if "before" in entry.inputs:
        given["before"] = torch.rand((2, 5), generator=random())
    return taken(entry, given, empty_state(program, entry, 2))


def taken(entry: Entry, *values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of these values those that the entry takes."""
    return {n: v for part in values for n, v in part.items() if n in entry.inputs}


def filled(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random numbers as keys, values, codes or scales are."""
    ranges: dict[torch.dtype, tuple[int, int]] = {torch.int8: (-127, 128), torch.uint8: (0, 256)}
    if dtype in ranges:
        return torch.randint(*ranges[dtype], tuple(shape), generator=generator, dtype=dtype)
    if dtype is torch.float16:
        return torch.rand(tuple(shape), generator=generator).half()
    return torch.randn(tuple(shape), generator=generator, dtype=dtype)


def cached(value: Any, blank: Tensor, places: Tensor, generator: torch.Generator) -> Tensor:
    """What a state value like `blank` holds where its slots have the positions `places` [B,C]."""
    if value.positions:
        return places
    if blank.dtype not in (torch.float32, torch.int8):
        return blank
    found = filled(blank.shape, blank.dtype, generator)
    plain = value.stored or blank.dtype is torch.int8
    return found if plain else found.abs() + 0.1  # scales


def numbers(values: Any) -> Tensor:
    """A table of whole numbers."""
    return torch.tensor(values, dtype=torch.int64)


def some_keys(program: Program, name: str) -> dict[str, Tensor]:
    """Random keys of two rows in slots 3.. and 0.., for an entry that goes over stretches of them."""
    generator, count = random(), 5
    values = {
        "start": numbers([3, 0]),
        "stop": numbers([3 + count, 2]),
        "ranks": torch.arange(count),
        "coded": numbers([3 + count, 2]),
    }
    states = {s.name: s for s in program.state}
    for holder in program.entries[name].graph.find_nodes(op="placeholder"):
        own = str(holder.target)
        if own in values:
            continue
        state = states.get(own)
        if state is None:  # directions
            values[own] = torch.randn(
                2, *map(int, holder.meta["val"].shape[1:]), generator=generator
            )
        elif state.positions:
            values[own] = torch.arange(SLOTS).repeat(2, 1)
        else:
            blank = state.allocate(B=2, C=SLOTS)
            plain = blank.dtype is not torch.int64
            values[own] = filled(blank.shape, blank.dtype, generator) if plain else blank
    return taken(program.entries[name], values)
