"""A folder of arrays that a tool made of text: memory-mapped, and tied to a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import RecipeError

FORMAT = 1
TOLD = "told.json"
MAKE = "make it: python tools/datastore.py MODEL --text FILE --out FOLDER"
Arrays = dict[str, npt.NDArray[Any]]


def write(
    folder: Path, kind: str, arrays: Mapping[str, npt.NDArray[Any]], vocab_size: int, digest: str, **more: Any
) -> None:  # fmt: skip
    """`digest`: of the vocabulary (`Tokenizer.digest`), or empty; `more`: what else is told."""
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    told = {"format": FORMAT, "kind": kind, "vocab_size": vocab_size, "vocabulary": digest, **more}
    told["sizes"] = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
    (folder / TOLD).write_text(json.dumps(told), encoding="utf-8")


def read(
    folder: Path, kind: str, name: str, vocab_size: int, digest: str
) -> tuple[Arrays, dict[str, Any]]:
    """Map a folder's arrays, and what is told of them. Raises RecipeError, which begins with `name`, where they are not
    there, damaged, or of another vocabulary than the model's, which may have more tokens; an empty digest is not
    compared.
    """
    make = MAKE if kind == "datastore" else f"{MAKE} --{kind}"
    if not (folder / TOLD).is_file():
        raise RecipeError(f"{name}: {folder} holds no {kind}, or was moved; {make}")
    try:
        notes: dict[str, Any] = json.loads((folder / TOLD).read_text(encoding="utf-8"))
        if (notes["format"], notes["kind"]) != (FORMAT, kind):
            raise ValueError(f"it holds {notes['kind']} of format {notes['format']}")
        arrays = {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in notes["sizes"]}
        wrong = [n for n, a in arrays.items() if notes["sizes"][n] != [str(a.dtype), *a.shape]]
        if wrong:
            raise ValueError(f"{wrong[0]} has another size")
        wrong = [n for n, a in arrays.items() if a.ndim != 1 or a.dtype.kind not in "if"]
        if wrong:
            raise ValueError(f"{wrong[0]} is no line of numbers")
        size, theirs = int(notes["vocab_size"]), str(notes["vocabulary"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
        raise damaged(name, folder, error, kind) from error
    if size > vocab_size or (digest and theirs and digest != theirs):
        raise RecipeError(
            f"{name}: {folder} is of another vocabulary, of {size} tokens (the model has {vocab_size}); {make}"
        )
    return arrays, notes


def damaged(name: str, folder: Path, why: object, kind: str) -> RecipeError:
    make = MAKE if kind == "datastore" else f"{MAKE} --{kind}"
    return RecipeError(f"{name}: {folder} is damaged, or no {kind} ({why}); {make}")


def some(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The numbers at both ends and some between, by which an array is looked over."""
    return array[np.linspace(0, array.size - 1, min(array.size, 4096)).astype(np.int64)]
