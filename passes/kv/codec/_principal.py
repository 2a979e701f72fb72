"""The directions that keys and values of a text take, the largest first."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from accel.ir.tables import Rows
from accel.passes.kv.codec._method import At


def principal(rows: Iterable[Rows], heads: int = 0) -> dict[int, dict[str, Tensor]]:
    """Layer -> `key_basis`, `value_basis` [G/t,t D,t D]: the right singular vectors, as columns, of the numbers of t =
    `heads` neighbouring KV heads (0: all) of all tokens, keys before RoPE. The KV heads are a multiple of t.
    """
    squares: dict[int, dict[str, Tensor]] = {}
    for row in rows:
        for layer, x in row.layers.items():
            found = squares.setdefault(layer, {})
            keys = x.keys if x.unrotated is None else x.unrotated
            for name, one in (("key_basis", keys), ("value_basis", x.values)):
                joined = one.transpose(1, 2).unflatten(2, (-1, heads or one.shape[1])).flatten(3)
                flat = joined.double().flatten(0, 1).transpose(0, 1)  # [G/t,tokens,t D]
                found[name] = found.get(name, 0) + flat.mT @ flat
    return {
        i: {n: torch.linalg.eigh(s).eigenvectors.flip(-1).float() for n, s in x.items()}
        for i, x in squares.items()
    }


def basis_of(at: At) -> Tensor:
    """That of keys, or of values."""
    return at.constants["key_basis" if at.role == "k" else "value_basis"]
