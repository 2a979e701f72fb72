"""`compress`: chooses what stays of the cache, or encodes blocks of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ir.entries import EntryKind
from accel.ir.state import Part

if TYPE_CHECKING:
    from torch import Tensor


def keep_of(layer: int) -> str:
    """The input that says how many tokens a head of the layer keeps [B]."""
    return f"keep.{layer}"


def ranks_of(layer: int) -> str:
    """The input 0..N-1 [N], N: the most tokens that any head of the layer keeps."""
    return f"ranks.{layer}"


def held_of(layer: int) -> str:
    """The input 0..P-1 [P], P: the most slots that any head of the layer has, where these are unequal numbers."""
    return f"held.{layer}"


def room_of(layer: int) -> str:
    """The input 0..M-1 [M], M: the most that the heads of the layer keep together, where they keep unequal numbers."""
    return f"room.{layer}"


def queries_of(layer: int) -> str:
    """The input with the layer's observed queries [B,W,H,D], and the output of the step that gives them."""
    return f"queries.{layer}"


def is_queries(output: str) -> bool:
    """Whether an output gives the queries of a layer."""
    return output.startswith("queries.")


def query_positions_of(stage: int) -> str:
    """The input with the positions of observed queries [B,W], of the layers behind so many stages of a prompt."""
    return f"query_positions.{stage}" if stage else "query_positions"


class _Compress(EntryKind):
    def example(self, program: Any, name: str) -> dict[str, Tensor]:
        """Two rows, the second shorter, each head with some slots that are empty."""
        import torch

        from accel.ir.entries._values import filled, numbers, random
        from accel.ir.sizes import in_numbers

        layers = range(len(program.facts.layers))
        letters = {"B": 2, "C": 24, "W": 3, "U": 32}
        for i in layers:
            letters |= {
                f"P{i}": 8,
                f"Q{i}": 7,
                f"N{i}": 9,
                f"C{i + 1}": 24,
                f"R{i}": 5,
                f"M{i}": 40,
            }
        if program.facts.kv is not None and (block := program.facts.kv.flush):
            letters |= {"C": 24 + 2 * block, "P": 3, "F": 2, "N": 4, "M": 5}
        told = {
            "places": [[0, 1, 3, 4], [0, 3, -1, -1]],  # old and new blocks
            "tail": [[7, 8, 9, 10, 11], [3, 4, -1, -1, -1]],
            "seen": [30, 21],
            **{query_positions_of(i): [[27, 28, 29], [-1, 19, 20]] for i in layers},
            "prompt": [26, 21],
            "question": [24, -1],
            "units": [[i // 5 for i in range(32)], [-1] * 9 + [i // 4 for i in range(23)]],
            **{keep_of(i): [9, 6] for i in layers},
            **{ranks_of(i): list(range(9)) for i in layers},
            **{held_of(i): list(range(5)) for i in layers},
            **{room_of(i): list(range(40)) for i in layers},
        }
        parts = {s.name: s for s in program.state}
        generator = random()
        found: dict[str, Tensor] = {}
        for holder in program.entries[name].graph.find_nodes(op="placeholder"):
            own, value = str(holder.target), holder.meta["val"]
            named = [d if isinstance(d, int) else program.dims[str(d)] for d in value.shape]
            shape = in_numbers(named, letters)
            state = parts.get(own)
            if own in told:
                found[own] = numbers(told[own])
            elif value.dtype is not torch.int64:
                found[own] = filled(shape, value.dtype, generator)
                found[own] = found[own].abs() if state and state.part is Part.MASS else found[own]
            elif state is None:  # the slots of new blocks
                found[own] = torch.arange(shape[0] * shape[1]).reshape(shape)
            elif state.ragged:
                some = numbers([[5, 1], [0, 4]])
                found[own] = torch.nn.functional.pad(some, (0, shape[1] - 2))
            elif state.positions:
                found[own] = torch.arange(8, 8 + shape[1]).repeat(2, 1)
            else:  # positions that were kept
                found[own] = torch.arange(shape[-1]).expand(shape).clone()
                found[own][:, 0, 6:] = -1
        return found


COMPRESS = _Compress("compress", in_place=False, feature="kv")
