"""A session sent over a wire: chunks of its tokens, each of which the receiver takes at the level that comes in time,
or computes from its tokens (CacheGen, arXiv:2310.07240).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel.ir.errors import InputError, SavedSessionError
from accel.ir.state import Part, StateValue
from accel.runtime.inputs.ints import Ints
from accel.runtime.kv.file import Base as Codec
from accel.runtime.session.core import SessionCore
from accel.runtime.session.file import Arrays, pack, unpack
from accel.runtime.session.rows import Kin
from accel.runtime.session.saved import Origin, SavedSession, describe, place
from accel.runtime.session.taken import is_plain

__all__ = ["HEAD", "TEXT", "Chunk", "Wire", "choose", "export_chunks", "name_of", "receive"]

HEAD = "head"  # the part that says what the others are
TEXT = -1  # the level of a chunk that is computed
_AGAIN = "send the session again"


@dataclass(frozen=True)
class Chunk:
    """What became of a chunk. level: of the codec's `levels`, or TEXT. bytes: that were fetched. seconds: of fetching,
    or of computing.
    """

    level: int
    bytes: int
    seconds: float


def name_of(chunk: int, level: int) -> str:
    """The name of a part."""
    return f"{chunk}.{level}"


def choose(
    counts: Sequence[int], sizes: Sequence[Sequence[int]], left: float, rate: float, speed: float
) -> int:
    """The level of the next chunk, of those that are left, of `counts` tokens and, by level, `sizes` bytes: the nearest
    with which all of them come within `left` seconds, at `rate` bytes and `speed` computed tokens a second. Nearest is
    TEXT, which loses nothing. Where none does, the fastest.
    """
    took = {TEXT: sum(counts) / speed if speed > 0 else np.inf}
    took |= {level: sum(each) / rate for level, each in enumerate(zip(*sizes, strict=True))}
    return next((level for level, t in took.items() if t <= left), min(took, key=lambda n: took[n]))


def export_chunks(core: SessionCore, tokens: Ints | None, size: int) -> dict[str, bytes]:
    """See `Session.export_chunks`."""
    origin, codec = _sent(core)
    if core.batch != 1 or tokens is None or tokens.size != core.lengths[0]:
        raise InputError(
            "a session is sent in chunks where it has one row, whose tokens it knows; give tokens, the ids [n] of all "
            "that it holds"
        )
    core.catch_up()
    buffers, state = core.backend.buffers(), _values(origin)
    starts = list(range(0, tokens.size, size))
    parts: dict[str, bytes] = {}
    for i, start in enumerate(starts):
        stop = min(start + size, tokens.size)
        for level, method in enumerate(codec.levels):
            arrays: Arrays = {}
            for value in state:
                x = buffers[value.name][:, :, start:stop].astype(np.float32)
                if not np.isfinite(x).all():
                    raise SavedSessionError(
                        f"{value.name} holds what is no finite number; save the session whole (session.save)"
                    )
                found = method.encode(place(value, origin), x)
                arrays |= {f"{value.name}/{name}": a for name, a in found.items()}
            parts[name_of(i, level)] = pack({"chunk": i, "level": level}, arrays)
    levels = range(len(codec.levels))
    sizes = [[len(parts[name_of(i, level)]) for level in levels] for i in range(len(starts))]
    parts[HEAD] = pack(*describe(core, origin, tokens, {"starts": starts, "sizes": sizes}))
    return parts


@dataclass
class Wire:
    """Where parts come from. rate: bytes a second, as of the part that came last. speed: tokens a second that are
    computed. `clock` gives seconds.
    """

    fetch: Callable[[str], bytes]
    rate: float
    speed: float
    clock: Callable[[], float] = time.perf_counter

    def get(self, name: str) -> tuple[bytes, float]:
        """A part, and the seconds that it took."""
        begun = self.clock()
        data = self.fetch(name)
        spent = max(self.clock() - begun, 1e-9)
        self.rate = len(data) / spent
        return data, spent


def receive(
    core: SessionCore, prompt: Callable[[Ints], Any], saved: SavedSession, wire: Wire, ends: float
) -> list[Chunk]:
    """Let an empty session of one row hold what HEAD describes, by the time `ends` of the wire's clock if that can be.
    `prompt` appends tokens [n]. Parts are decoded while others come. Raises SavedSessionError, InputError.
    """
    origin, codec = _sent(core)
    tokens, starts, sizes = _checked(saved, len(codec.levels))
    counts = np.diff([*starts, tokens.size]).tolist()
    took, coming = list[Chunk](), list[Future[Arrays]]()
    with ThreadPoolExecutor(1) as pool:
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            begun = wire.clock()
            level = choose(counts[i:], sizes[i:], ends - begun, wire.rate, wire.speed)
            if level == TEXT:
                _lay(core, coming)
                prompt(tokens[start : start + count])
                spent = max(wire.clock() - begun, 1e-9)
                wire.speed = count / spent
                took.append(Chunk(TEXT, 0, spent))
                continue
            name = name_of(i, level)
            data, spent = wire.get(name)
            took.append(Chunk(level, len(data), spent))
            method = codec.levels[level]
            coming.append(pool.submit(_decoded, name, data, method, origin, count, (i, level)))
        _lay(core, coming)
    return took


def _lay(core: SessionCore, coming: list[Future[Arrays]]) -> None:
    """Let the row hold the chunks that came, behind its tokens."""
    found = [one.result() for one in coming]
    coming.clear()
    if not found or core.origin is None:
        return
    (known,), buffers, new = core.lengths.tolist(), core.backend.buffers(), dict[str, Any]()
    for name in found[0]:
        before = [buffers[name][:, :, :known]] if known else []
        new[name] = np.concatenate([*before, *(one[name] for one in found)], axis=2)
    length = next(iter(new.values())).shape[2]
    for value in core.origin.state:
        if value.positions:
            new[value.name] = np.arange(length)[None]
    core.put(new)
    core.lengths = np.array([length])
    core.kin = Kin.copies(np.arange(1), core.lengths)


def _sent(core: SessionCore) -> tuple[Origin, Codec]:
    """Of a session that can be sent in chunks. Raises InputError."""
    origin = core.origin
    if origin is None or origin.codec is None:
        raise InputError(
            "this model's recipe says not how keys and values are sent; build with one that does (cachegen), or send "
            "rows as they are (session.export_row)"
        )
    state = [value for value in origin.state if not value.written_between_steps]
    if not all(is_plain(value) for value in state) or np.any(core.base) or any(core.adapters):
        raise InputError(
            "chunks are sent of a cache with a slot for each token, of a row without adapter; send rows of this "
            "recipe as they are (session.export_row)"
        )
    return origin, origin.codec


def _values(origin: Origin) -> list[StateValue]:
    return [value for value in origin.state if value.part in (Part.KEYS, Part.VALUES)]


def _decoded(
    name: str, data: bytes, method: Codec, origin: Origin, count: int, which: tuple[int, int]
) -> Arrays:
    """Keys and values [1,G,count,D] of a part. Raises SavedSessionError."""
    header, arrays = unpack(data, name)
    if (header.get("chunk"), header.get("level")) != which:
        raise SavedSessionError(f"{name} is another part of a session; {_AGAIN}")
    found: Arrays = {}
    for value in _values(origin):
        start = value.name + "/"
        parts = {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}
        sizes: Mapping[Any, int] = {"B": 1, "C": count}
        shape = tuple(size if isinstance(size, int) else sizes[size] for size in value.shape)
        try:
            decoded = method.decode(place(value, origin), parts, shape)
        except (KeyError, ValueError) as error:
            raise SavedSessionError(
                f"{name}: {value.name} cannot be decoded ({error}); {_AGAIN}"
            ) from error
        found[value.name] = decoded.astype(value.dtype)
    return found


def _checked(saved: SavedSession, levels: int) -> tuple[Ints, list[int], list[list[int]]]:
    """The tokens [n], where chunks start, and the bytes of each by level. Raises SavedSessionError."""
    starts: Any = saved.header.get("starts")
    sizes: Any = saved.header.get("sizes")
    right = isinstance(starts, list) and isinstance(sizes, list)
    right = right and all(type(n) is int for n in starts) and len(starts) == len(sizes)
    right = right and all(_sizes(each, levels) for each in sizes)
    if right and saved.tokens is not None:
        (tokens,) = saved.tokens
        ends = [*starts[1:], tokens.size]
        if starts[:1] == [0] and all(a < b for a, b in zip(starts, ends, strict=True)):
            return tokens, starts, sizes
    raise SavedSessionError(f"{saved.path}: its chunks are not what accel writes; {_AGAIN}")


def _sizes(value: Any, levels: int) -> bool:
    return isinstance(value, list) and len(value) == levels and all(type(n) is int for n in value)
