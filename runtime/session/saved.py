"""What a session leaves in a file, and a session that goes on from one: its state up to the slots that are used, and
what each observer knows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.axis import host_method
from accel.ir.errors import InputError, SavedSessionError, shown
from accel.ir.sizes import grows, in_numbers
from accel.ir.state import Part, StateValue
from accel.runtime.inputs.ints import Ints, as_ints
from accel.runtime.kv.file import Base as Codec
from accel.runtime.kv.file import Place
from accel.runtime.session.core import SessionCore
from accel.runtime.session.file import Arrays, pack, read, unpack, write
from accel.runtime.session.rows import Kin

_STATE, _TOKENS = "state/", "tokens"
_MOST = 1 << 40  # of a size or a length: no array has so many numbers


@dataclass(frozen=True)
class Origin:
    """The model that a session is of. weights: digest of its parameters, None: unknown. adapter: digest of one, by its
    name. codec: how keys and values are saved, None: as they are.
    """

    name: str
    weights: Callable[[], str | None]
    recipe: Mapping[str, Any]
    state: Sequence[StateValue]
    max_batch: int
    max_context: int
    adapter: Callable[[str], str]
    codec: Codec | None = None

    def header(self, adapters: Mapping[str, str]) -> dict[str, Any]:
        """What a file says of it; `adapters`: digests of those that rows use."""
        layout = [value.to_json() for value in self.state]
        return {
            "model": self.name,
            "weights": self.weights(),
            "recipe": self.recipe.get("name"),
            "tables": _digest(self.recipe.get("tables", {})),
            "layout": _digest(layout),
            "adapters": dict(adapters),
        }


@dataclass(frozen=True)
class SavedSession:
    """A file that was read and checked."""

    path: str
    header: dict[str, Any]
    arrays: Arrays

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.header["lengths"])

    @property
    def adapters(self) -> list[str | None]:
        """The name of each row's adapter."""
        found: list[str | None] = self.header["rows"]
        return found

    @property
    def tokens(self) -> list[Ints] | None:
        """Of each row, where the caller gave them when it was saved."""
        if _TOKENS not in self.arrays:
            return None
        rows = zip(self.arrays[_TOKENS], self.header["counts"], strict=True)
        return [row[:count] for row, count in rows]

    def check_rows(self, origin: Origin) -> None:
        """Raise SavedSessionError where a model has no room for its rows."""
        longest = max(self.header["lengths"])
        if self.batch > origin.max_batch:
            raise SavedSessionError(
                f"{self.path} has {self.batch} rows, and max_batch is {origin.max_batch}; build with more: max_batch=…"
            )
        if longest > origin.max_context:
            raise SavedSessionError(
                f"{self.path} has a row of {longest} tokens, and max_context is {origin.max_context}; build with "
                "more: max_context=…"
            )

    def check(self, origin: Origin) -> None:
        """Raise SavedSessionError where it is of another model or recipe."""
        here = origin.header(
            {name: origin.adapter(name) for name in self.adapters if name is not None}
        )
        for key, what in (
            (
                "tables",
                f"recipe {self.header['recipe']!r}, and this model was built with {here['recipe']!r}",
            ),
            ("layout", f"a cache of another layout than {origin.name} has"),
            (
                "weights",
                f"another model than {origin.name} ({self.header['model']}, other weights)",
            ),
        ):
            if self.header[key] != here[key]:
                raise SavedSessionError(
                    f"{self.path} is of {what}; open it with the model that saved it, or run its prompt again"
                )
        for name, digest in self.header["adapters"].items():
            if here["adapters"].get(name) != digest:
                raise SavedSessionError(
                    f"{self.path} is of another adapter {name!r} than this model has; load the one that it was saved "
                    "with, or run its prompt again"
                )


def save(core: SessionCore, path: str | os.PathLike[str], tokens: Any) -> None:
    """See `Session.save`."""
    write(path, *_all_of(core, tokens))


def export(core: SessionCore, row: int, tokens: Any) -> bytes:
    """See `Session.export_row`."""
    one = core.of_rows(np.array([row]))
    try:
        return pack(*_all_of(one, None if tokens is None else [tokens]))
    finally:
        one.close()


def imported(data: bytes) -> SavedSession:
    """What `export` gave. Raises SavedSessionError."""
    return _known("this row", *unpack(data, "this row"))


def _all_of(core: SessionCore, tokens: Any) -> tuple[dict[str, Any], Arrays]:
    """What a file says of a session, and its arrays. Raises SavedSessionError."""
    backend, origin = core.backend, core.origin
    if origin is None:
        raise InputError(
            "this session is of no model, so no file can say which; open one with model.session()"
        )
    arrays: Arrays = {}
    if tokens is not None:
        arrays[_TOKENS], counts = _tokens(tokens, core.batch)
    for one in core.observers:
        known = one.numbers(backend)
        arrays |= {f"{type(one).__name__}/{name}": array for name, array in known.items()}
    letters, coded, buffers = _used(core), {}, backend.buffers()
    for value in origin.state:
        if value.shared or value.name not in buffers:
            continue
        array = _cut(buffers[value.name], value, letters)
        if origin.codec is not None and _plain(value, array):
            parts = origin.codec.encode(place(value, origin), array.astype(np.float32))
            coded[value.name] = list(array.shape)
            arrays |= {f"{_STATE}{value.name}/{part}": a for part, a in parts.items()}
        else:
            arrays[_STATE + value.name] = array
    header = _header(core, origin) | {"room": list(core.room), "coded": coded}
    if tokens is not None:
        header |= {"counts": counts, "text": _digest([arrays[_TOKENS].tolist(), counts])}
    return header, arrays


def describe(
    core: SessionCore, origin: Origin, tokens: Ints, more: Mapping[str, Any]
) -> tuple[dict[str, Any], Arrays]:
    """A file of a session of one row, without its state: its tokens [n], and `more` of its header."""
    ids = tokens[None].astype(np.int64)
    about = {"room": [], "coded": {}, "counts": [tokens.size]}
    text = _digest([ids.tolist(), about["counts"]])
    return {**_header(core, origin), **about, "text": text, **more}, {_TOKENS: ids}


def _header(core: SessionCore, origin: Origin) -> dict[str, Any]:
    """What a file says of a session, but for its arrays."""
    return {
        **origin.header({one.name: one.digest for one in core.laid if one.name in core.adapters}),
        "rows": list(core.adapters),
        "lengths": core.lengths.tolist(),
    }


def saving(tables: Mapping[str, Any]) -> Codec | None:
    """How a recipe saves keys and values; None: as they are. Raises RecipeError."""
    return host_method(tables, "kv.file", "") if "kv.file" in tables else None


def saved_session(path: str | os.PathLike[str]) -> SavedSession:
    """What a file holds. Raises SavedSessionError."""
    return _known(os.fspath(path), *read(path))


def _known(path: str, header: dict[str, Any], arrays: Arrays) -> SavedSession:
    """Raises SavedSessionError where a field is not of the kind that is written."""
    right = {name: isinstance(header.get(name), str) for name in ("model", "layout", "tables")}
    for name in ("weights", "recipe"):
        right[name] = name in header and isinstance(header[name], str | None)
    right |= {name: _counts(header.get(name)) for name in ("lengths", "room")}
    right["lengths"] = right["lengths"] and bool(header["lengths"])
    rows, used, coded = (header.get(name) for name in ("rows", "adapters", "coded"))
    right["rows"] = isinstance(rows, list) and all(isinstance(one, str | None) for one in rows)
    right["adapters"] = isinstance(used, dict)
    right["coded"] = isinstance(coded, dict) and all(_counts(shape) for shape in coded.values())
    if _TOKENS in arrays:
        ids = arrays[_TOKENS]
        counts: Any = header.get("counts")
        right["counts"] = ids.ndim == 2 and _counts(counts) and len(counts) == len(ids)
        right["counts"] = right["counts"] and max(counts, default=0) <= ids.shape[1]
    if wrong := [name for name, holds in right.items() if not holds]:
        raise SavedSessionError(
            f"{path}: {wrong[0]} = {shown(header.get(wrong[0]))} is not what accel writes; save the session again"
        )
    return SavedSession(path, header, arrays)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < _MOST for n in value)


def restore(core: SessionCore, saved: SavedSession) -> None:
    """Let a new session, of as many rows and the same adapters, hold what a file does. Raises SavedSessionError,
    InputError.
    """
    backend, origin, header = core.backend, core.origin, saved.header
    assert origin is not None
    lengths = np.array(header["lengths"], np.int64)
    buffers: Arrays = {}
    for value in origin.state:
        start = _STATE + value.name
        if value.name in header["coded"] and origin.codec is not None:
            parts = {
                n[len(start) + 1 :]: a for n, a in saved.arrays.items() if n.startswith(start + "/")
            }
            shape = tuple(header["coded"][value.name])
            _check_shape(saved, value, shape, value.dtype, origin)
            try:
                decoded = origin.codec.decode(place(value, origin), parts, shape)
            except (KeyError, ValueError) as error:
                raise SavedSessionError(
                    f"{saved.path}: {value.name} cannot be decoded ({error}); save the session again"
                ) from error
            buffers[value.name] = decoded.astype(value.dtype)
        elif start in saved.arrays:
            buffers[value.name] = array = saved.arrays[start]
            _check_shape(saved, value, array.shape, array.dtype.name, origin)
    backend.put(buffers)
    for one in core.observers:
        start = f"{type(one).__name__}/"
        known = {n.removeprefix(start): a for n, a in saved.arrays.items() if n.startswith(start)}
        try:
            one.restore(backend, known, lengths)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise SavedSessionError(
                f"{saved.path}: {type(one).__name__} cannot go on from it ({type(error).__name__}: {error}); save the "
                "session again"
            ) from error
    core.lengths, core.kin = lengths, Kin.copies(np.arange(core.batch), lengths)
    _check_slots(saved, core, buffers)
    if header["room"]:
        core.need(header["room"])


def _used(core: SessionCore) -> dict[str, int]:
    """How many slots of each size hold tokens of rows: C, C1, …"""
    ends = core.lengths - core.base
    found = {"C": int(ends.max(initial=0))}
    for one in core.watchers:
        found |= {f"C{i}": max(0, n) for i, n in enumerate(one.slots(ends), start=len(found))}
    return found


def _cut(
    array: npt.NDArray[Any], value: StateValue, letters: Mapping[str, int]
) -> npt.NDArray[Any]:
    """A state buffer without the slots that no token uses."""
    if not grows(value.shape):
        return array
    sizes = in_numbers(value.shape, letters)
    return array[
        tuple(
            slice(size if isinstance(letter, str) and letter.startswith("C") else None)
            for letter, size in zip(value.shape, sizes, strict=True)
        )
    ]


def _plain(value: StateValue, array: npt.NDArray[Any]) -> bool:
    """Whether it is keys or values as attention reads them, that a codec can code."""
    numbers = value.stored and value.dtype in ("float32", "float16") and array.ndim == 4
    return numbers and array.size > 0 and bool(np.isfinite(array).all())


def place(value: StateValue, origin: Origin) -> Place:
    """Which keys or values a codec is given."""
    layers = 1 + max((v.layer for v in origin.state if v.layer is not None), default=0)
    return Place(value.layer or 0, layers, value.part is Part.KEYS)


def _check_shape(
    saved: SavedSession, value: StateValue, shape: Sequence[int], dtype: str, origin: Origin
) -> None:
    """It is of the type, the rows and the sizes that the layout says."""
    sizes = [saved.batch if size == "B" else size for size in value.shape]
    same = len(sizes) == len(shape) and all(
        there <= _most(origin) if isinstance(size, str) else size == there
        for size, there in zip(sizes, shape, strict=True)
    )
    if not same or dtype != value.dtype:
        raise SavedSessionError(
            f"{saved.path}: {value.name} is {dtype} {list(shape)}, not {value.dtype} {list(value.shape)}; save the "
            "session again"
        )


def _check_slots(saved: SavedSession, core: SessionCore, buffers: Arrays) -> None:
    """Buffers that grow hold the slots that rows use, and room is for no fewer. Raises SavedSessionError."""
    origin, room = core.origin, saved.header["room"]
    letters = _used(core)
    sizes = {
        v.name: in_numbers(v.shape, {**letters, "B": core.batch})
        for v in origin.state
        if grows(v.shape)
    }
    right = bool((core.lengths >= core.base).all())
    right &= saved.tokens is None or len(saved.tokens) == core.batch
    right &= all(buffers[name].shape == size for name, size in sizes.items() if name in buffers)
    if room:
        right &= len(room) == len(letters) and max(room) <= _most(origin)
        right &= all(have >= used for have, used in zip(room, letters.values(), strict=False))
    if not right:
        raise SavedSessionError(
            f"{saved.path}: its buffers do not fit rows of {saved.header['lengths']} tokens; save the session again"
        )


def _most(origin: Origin) -> int:
    """More slots than a session of the model ever has."""
    return 4 * origin.max_context + (1 << 16)


def _tokens(tokens: Any, batch: int) -> tuple[Ints, list[int]]:
    """Token ids [B,n] and how many are of each row, out of what a caller gives."""
    given = list(tokens) if hasattr(tokens, "__len__") and not isinstance(tokens, str) else []
    apart = [hasattr(one, "__len__") and getattr(one, "ndim", 1) > 0 for one in given]
    flat = batch == 1 and bool(given) and not any(apart)
    rows = [as_ints(row, "tokens") for row in ([tokens] if flat else given)]
    if len(rows) != batch or any(row.ndim != 1 for row in rows):
        raise InputError(
            f"tokens = {shown(tokens)}; give the token ids [n] of each row, {batch} of them"
        )
    found = np.zeros((batch, max(row.size for row in rows)), np.int64)
    for row, ids in zip(found, rows, strict=True):
        row[: ids.size] = ids
    return found, [row.size for row in rows]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
