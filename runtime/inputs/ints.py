"""Integers from anything array-like, without importing the library that made it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def as_ints(value: Any, what: str) -> Ints:
    """`value` as an int64 array of its own shape: lists, NumPy arrays, torch tensors (by
    `__array__`).

    Raises InputError for floats, bools, text, ragged lists and numbers beyond 64 bits; `what` names
    it.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged lists
        raise InputError(f"{what}: rows differ in length; pad them on the right") from error
    except Exception:  # a tensor on a device, or one that wants detach(): both know tolist()
        if not hasattr(value, "tolist"):
            raise InputError(
                f"{what}: {type(value).__name__} is not an array of integers"
            ) from None
        try:
            array = np.asarray(value.tolist())
        except Exception as error:  # a sparse tensor, or one without values
            raise InputError(f"{what}: {type(value).__name__} gives no values: {error}") from None
    if array.size == 0 and not (isinstance(value, np.ndarray) and array.dtype.kind in "fbcO"):
        return array.astype(np.int64)
    if array.dtype.kind not in "iu" or (
        array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max
    ):
        raise InputError(f"{what}: {array.dtype} is not an integer type; give token ids as int64")
    return array.astype(np.int64, copy=False)


def check_vocabulary(tokens: Ints, vocab_size: int, what: str) -> None:
    """Refuse a token outside 0..vocab_size-1, naming where it stands. Tokens [T] or [B,T]."""
    if tokens.size == 0 or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    place = tuple(int(i) for i in np.argwhere((tokens < 0) | (tokens >= vocab_size))[0])
    where = f"row {place[0]}, column {place[1]}" if len(place) == 2 else f"place {place[0]}"
    raise InputError(
        f"{what}: token {int(tokens[place])} at {where} is not in the vocabulary "
        f"(0..{vocab_size - 1}); was the text encoded with another model's tokenizer?"
    )
