"""What users give an encoder, made into the arrays that the encode entry takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.encoder import EncoderFacts
from accel.ir.errors import InputError
from accel.runtime.inputs.ints import Ints, as_ints, check_vocabulary
from accel.runtime.inputs.prompts import is_text, items_of
from accel.runtime.inputs.text import Tokenizer

Arrays = dict[str, npt.NDArray[Any]]


def entry_inputs(inputs: Any, lengths: Any, batch: int, facts: EncoderFacts) -> Arrays:
    """Inputs of the encode entry for `batch` rows: token ids [B,X] of `lengths` [B], each 1..X, or
    features [B, ...]. Raises InputError.
    """
    if facts.features:
        if lengths is not None:
            raise InputError("lengths apply to token ids; this model's encoder takes features")
        return {"features": _features(inputs, (batch, *facts.features), "encoder inputs")}
    ids = as_ints(inputs, "encoder inputs")
    if ids.ndim != 2 or ids.shape[0] != batch or ids.shape[1] == 0:
        raise InputError(
            f"encoder inputs have shape {list(ids.shape)}; this session takes [{batch}, X] with X >= 1"
        )
    counts = as_ints(np.full(batch, ids.shape[1]) if lengths is None else lengths, "lengths")
    if counts.shape != (batch,) or (counts < 1).any() or (counts > ids.shape[1]).any():
        raise InputError(
            f"lengths are {counts.tolist()}; give one per row, {batch} of them, from 1 to {ids.shape[1]}"
        )
    ids = ids[:, : int(counts.max())]
    if ids.shape[1] > facts.max_length:
        raise InputError(
            f"the encoder's input has {ids.shape[1]} tokens; it takes {facts.max_length} at most. "
            "Shorten it, or build with more: max_context=… where the model allows it"
        )
    columns = np.arange(ids.shape[1])
    real = columns < counts[:, None]
    ids = np.where(real, ids, 0)
    check_vocabulary(ids, facts.vocab_size, "encoder inputs")
    return {"inputs": ids, "inputs.pos": np.where(real, columns, -1)}


def shortest(facts: EncoderFacts) -> npt.NDArray[Any]:
    """An input of one row, as short as an encoder takes."""
    return (
        np.zeros((1, *facts.features), np.float32) if facts.features else np.zeros((1, 1), np.int64)
    )


def encoder_rows(
    value: Any, facts: EncoderFacts | None, tokenizer: Tokenizer | None
) -> list[npt.NDArray[Any]] | None:
    """One array per row, token ids [X] or features: from text, token ids, features, or a list of
    those. None for a model without encoder. Raises InputError.
    """
    if facts is None:
        if value is not None:
            raise InputError(
                "encoder_input was given, but this model has no encoder; give the prompt alone"
            )
        return None
    if value is None:
        wanted = f"features {list(facts.features)}" if facts.features else "text or token ids"
        raise InputError(
            f"this model has an encoder: give encoder_input, {wanted} or a list of them"
        )
    if facts.features:
        shape = tuple(facts.features)
        found = value if isinstance(value, (list, tuple)) else np.asarray(value)
        if not isinstance(found, (list, tuple)):
            found = [found] if found.ndim == len(shape) else list(found) if found.ndim else [found]
        return [_features(row, shape, f"encoder_input {i}") for i, row in enumerate(found)]
    rows = [
        _tokens(row, i, facts, tokenizer) for i, row in enumerate(items_of(value, "encoder_input"))
    ]
    return list(rows)


def padded(
    rows: list[npt.NDArray[Any]], facts: EncoderFacts
) -> tuple[npt.NDArray[Any], Ints | None]:
    """Rows as one array, padded on the right, and their lengths; features as they are."""
    if facts.features:
        return np.stack(rows), None
    lengths = np.array([row.size for row in rows])
    ids = np.zeros((len(rows), int(lengths.max())), np.int64)
    for place, row in zip(ids, rows, strict=True):
        place[: row.size] = row
    return ids, lengths


def _features(value: Any, shape: tuple[int, ...], name: str) -> npt.NDArray[np.float32]:
    """A float32 array of exactly this shape."""
    if is_text(value):
        raise InputError(f"{name} is text, but this model's encoder takes features {list(shape)}")
    try:
        found = np.ascontiguousarray(np.asarray(value), dtype=np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is not an array of numbers ({error}); give features {list(shape)}"
        ) from None
    if found.shape != shape:
        raise InputError(
            f"{name} has shape {list(found.shape)}; this model's encoder takes {list(shape)}"
        )
    if not np.isfinite(found).all():
        raise InputError(f"{name} holds values that are not finite")
    return found


def _tokens(value: Any, index: int, facts: EncoderFacts, tokenizer: Tokenizer | None) -> Ints:
    """One row of token ids [X]."""
    name = f"encoder_input {index}"
    if is_text(value):
        if tokenizer is None:
            raise InputError(
                f"{name} is text, but this model has no tokenizer; give token ids, or build with tokenizer=…"
            )
        value = np.array(tokenizer.encode(value), np.int64)
    ids = as_ints(value, name)
    if ids.ndim != 1 or not ids.size:
        raise InputError(f"{name} has shape {list(ids.shape)}; give token ids [n], at least one")
    if ids.size > facts.max_length:
        raise InputError(
            f"{name} has {ids.size} tokens; the encoder takes {facts.max_length} at most. "
            "Shorten it, or build with more: max_context=… where the model allows it"
        )
    check_vocabulary(ids, facts.vocab_size, name)
    return ids
