"""Files of trained parts and tables, small tensors beside a frozen model: `accel-compile train METHOD MODEL` makes
them. Where a recipe names none, the user's cache is looked through, by model and method; then what comes with accel,
which is for the bundled model. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from accel.ir.errors import AccelError
from accel.ir.parts import Part, bundled, how
from accel.ir.user_cache import cache_folder, open_private, private_folder

Tensors = dict[str, npt.NDArray[Any]]
_FOLDER = "parts"  # of the user's cache


class Likeness(Enum):
    """How a model is to the one that a file is for: NEAR, the same in other types, or trained further."""

    SAME = "same"
    NEAR = "near"
    OTHER = "other"


def stem(key: str, model: str) -> str:
    """How the name of a kept file begins. `model`: by what the model is known again."""
    return f"{key}-{hashlib.sha256(model.encode()).hexdigest()[:16]}"


def place(key: str, model: str, options: Mapping[str, Any]) -> Path:
    """Where a part is kept, made ready. `options`: of the method, those that it was made by. Raises OSError, and
    RuntimeError where the user has no home.
    """
    by = hashlib.sha256(json.dumps(dict(options), sort_keys=True).encode()).hexdigest()[:8]
    folder = private_folder() / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{stem(key, model)}-{by}.safetensors"


def located(
    part: Part,
    named: tuple[str, str],
    whose: str,
    model: str,
    options: Mapping[str, Any],
    like: Callable[[str, str], Likeness],
    kind: type[AccelError],
) -> Path:
    """The file of a method for a model: the one that its option names, else one that is kept, else the bundled one.

    named: the option and its value. whose: the model's name. model: by what it is known again, which `like` compares
    with what a file tells. options: the method's. Raises `kind`, with how to make one.
    """
    option, given = named
    key, done, act = part.key, part.verb[1], how(part)
    if given:
        act = f"{act}, and leave `{option}` out of the recipe"
        file = Path(given)
        told = _notes(key, file, act, kind)
        if like(told.get("model", ""), model) is Likeness.OTHER:
            raise kind(f"{key}: {file} was {done} for another model; for {whose}, {act}")
        return file
    there, reason = searched(part, model, options, like, kind, option)
    if there is None:
        raise kind(f"{key}: {reason}; for {whose}, {act}")
    return there


def searched(
    part: Part,
    model: str,
    options: Mapping[str, Any],
    like: Callable[[str, str], Likeness],
    kind: type[AccelError],
    option: str,
) -> tuple[Path | None, str]:
    """The file of a method for a model, of those that are kept and the bundled one; or why there is none. Arguments as
    of `located`. Raises `kind` where one that is kept for the model is damaged.
    """
    key, done, act = part.key, part.verb[1], how(part)
    reasons = []
    for file in _kept(part, model, kind):
        mine = file.name.startswith(stem(key, model))
        try:
            told = _notes(key, file, f"remove it, and {act}", kind)
        except AccelError:
            if mine:
                raise
            continue
        found = like(told.get("model", ""), model)
        by = json.loads(told.get("options", "{}"))
        wrong = {n: v for n, v in by.items() if json.loads(json.dumps(options.get(n))) != v}
        if found is Likeness.SAME and not wrong:
            return file, ""
        if found is Likeness.SAME:
            other = ", ".join(f"{n} = {v} and not {options.get(n)}" for n, v in wrong.items())
            reasons.append(f"{file} is for {other}")
        elif found is Likeness.NEAR:
            reasons.append(
                f"{file} is for near weights (another quantisation or a training further); to take it, set "
                f"`{option}` to it in the recipe"
            )
    file = bundled(key)
    first = f"nothing was {done} for this model"
    if file.is_file():
        if like(_notes(key, file, act, kind).get("model", ""), model) is Likeness.SAME:
            return file, ""
        first = f"the bundled file was {done} for another model"
    return None, "; ".join([first, *reasons])


def opened(part: Part, file: Path, kind: type[AccelError]) -> tuple[Tensors, dict[str, Any]]:
    """Tensors (integers as they are, others as float32), and notes of a method's file. Raises `kind`, which ends with
    how to make another: the file is not there, damaged, or another method's.
    """
    key, act = part.key, how(part)
    told = _notes(key, file, act, kind)
    try:
        with safe_open(file, framework="np") as inside:
            tensors = {name: inside.get_tensor(name) for name in inside.keys()}
    except (OSError, SafetensorError) as error:
        raise kind(_incomplete(key, file, error, act)) from error
    if told.get("digest", digest(tensors)) != digest(tensors):
        raise kind(f"{key}: {file} is damaged: its numbers are not those that were written; {act}")
    return {name: _widened(array) for name, array in tensors.items()}, told


def digest(tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """By what the numbers of a file are known."""
    found = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _kept(part: Part, model: str, kind: type[AccelError]) -> Iterator[Path]:
    """The kept files of a method, those of the model first. Raises `kind` where the cache is not the user's own."""
    key = part.key
    try:
        folder = cache_folder() / _FOLDER
        if not folder.is_dir():
            return
        private_folder()
    except RuntimeError:  # no home folder
        return
    except OSError as error:
        raise kind(f"{key}: {error}") from error
    there = sorted(folder.glob(f"{key}-*.safetensors"))
    for file in sorted(there, key=lambda f: not f.name.startswith(stem(key, model))):
        try:
            open_private(file).close()
        except OSError as error:
            raise kind(f"{key}: {error}; remove it, and {how(part)}") from error
        yield file


def _notes(key: str, file: Path, act: str, kind: type[AccelError]) -> dict[str, str]:
    """What a method's file tells. Raises `kind`, as `opened`."""
    if not file.is_file():
        raise kind(f"{key}: {file} does not exist; {act}")
    try:
        with safe_open(file, framework="np") as inside:
            told = dict(inside.metadata() or {})
        json.loads(told.get("options", "{}")).items()
    except (OSError, SafetensorError, ValueError, AttributeError) as error:
        raise kind(_incomplete(key, file, error, act)) from error
    if told.get("method") != key:
        raise kind(
            f"{key}: {file} holds {told.get('method', 'something that accel did not train')!r}; {act}"
        )
    return told


def _incomplete(key: str, file: Path, error: Exception, act: str) -> str:
    return f"{key}: {file} is not a complete safetensors file ({error}); {act}"


def _widened(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As float32, but integers."""
    return array if array.dtype.kind == "i" else array.astype(np.float32)
