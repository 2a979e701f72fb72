"""What this machine can do at most, measured in about a second: bytes read from memory, and products of two types.

Loops of accel's own operators, where they can be compiled, do nothing else; else numpy reads, and onnxruntime
multiplies matrices, which finds a lower peak of products (`how` says which).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel.lowering.onnx.native import library
from accel.lowering.onnx.ort import ort

NATIVE = "accel's operators"
PORTABLE = "numpy and onnxruntime"
SECONDS = 1.0
_READ = 1 << 28  # bytes: several times what caches hold
_ROUND = 0.02  # seconds of one
_SIDE = 1024  # of a matrix that onnxruntime multiplies
_FLOAT, _UINT8, _INT8, _INT32 = 1, 2, 3, 6  # ONNX's numbers of element types
Work = Callable[[], float]  # does some; how much


@dataclass(frozen=True)
class Peaks:
    """Of so many threads: bytes read in a second, and products of each type. 0: they were not to be had."""

    threads: int
    read: float
    int8: float
    float32: float
    how: str


def peaks(threads: int, seconds: float = SECONDS) -> Peaks:
    """The most of some rounds for each, for all threads together."""
    path = library()[0]
    with ThreadPoolExecutor(threads) as pool:
        kinds = _native(path, pool, threads) if path else _portable(pool, threads)
        read, int8, float32 = (_most(work, seconds / 3) for work in kinds)
    return Peaks(threads, read, int8, float32, NATIVE if path else PORTABLE)


def _most(work: Work, seconds: float) -> float:
    """Of at least three rounds, what was done in a second."""
    best, rounds, end = 0.0, 0, time.perf_counter() + seconds
    while rounds < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        done = work()
        best = max(best, done / (time.perf_counter() - start))
        rounds += 1
    return best


def _native(path: Path, pool: ThreadPoolExecutor, threads: int) -> Iterator[Work]:
    """Reading, products of bytes and of floats; ctypes lets other threads of Python run."""
    made = ctypes.CDLL(str(path))
    made.accel_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    made.accel_read.restype = ctypes.c_int64
    yield _reading(pool, threads, lambda part: made.accel_read(part.ctypes.data, part.nbytes))
    for name in ("accel_multiply_int8", "accel_multiply_float32"):
        multiply = getattr(made, name)
        multiply.argtypes, multiply.restype = [ctypes.c_int64], ctypes.c_int64
        yield _multiplying(pool, threads, multiply)


def _reading(
    pool: ThreadPoolExecutor, threads: int, read: Callable[[Any], Any]
) -> Callable[[], float]:
    """Each thread reads a part of memory that no cache holds. `read`: all of an array of int64."""
    parts = np.array_split(np.ones(_READ // 8, np.int64), threads)

    def work() -> float:
        list(pool.map(read, parts))
        return _READ

    return work


def _multiplying(
    pool: ThreadPoolExecutor, threads: int, multiply: Callable[[int], int]
) -> Callable[[], float]:
    """Rounds that are long enough. `multiply`: so many loops; products done."""
    loops, spent = 1 << 10, 0.0
    while spent < _ROUND / 4 and loops < 1 << 40:
        loops *= 4
        start = time.perf_counter()
        if not multiply(loops):
            return lambda: 0.0
        spent = time.perf_counter() - start
    loops = max(1, int(loops * _ROUND / spent))
    return lambda: float(sum(pool.map(multiply, [loops] * threads)))


def _portable(pool: ThreadPoolExecutor, threads: int) -> Iterator[Work]:
    """The same by others' loops. The largest number is found as fast as memory is read."""
    yield _reading(pool, threads, np.max)
    yield _matrices("MatMulInteger", (_UINT8, _INT8), _INT32, threads)
    yield _matrices("MatMul", (_FLOAT, _FLOAT), _FLOAT, threads)


def _matrices(op: str, operand_kinds: tuple[int, int], made: int, threads: int) -> Work:
    """onnxruntime's product of two square matrices."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(
        _model(op, operand_kinds, made), options, providers=["CPUExecutionProvider"]
    )
    kinds = {_FLOAT: np.float32, _UINT8: np.uint8, _INT8: np.int8}
    sides = (_SIDE, _SIDE)
    feed = {
        name: np.ones(sides, kinds[kind]) for name, kind in zip("ab", operand_kinds, strict=True)
    }

    def work() -> float:
        session.run(None, feed)
        return float(_SIDE**3)

    return work


def _model(op: str, operand_kinds: tuple[int, int], made: int) -> bytes:
    """A ModelProto of one product; the package `onnx` is not where artifacts are run."""

    def message(number: int, *parts: bytes) -> bytes:
        inner = b"".join(parts)
        return bytes([number << 3 | 2]) + _varint(len(inner)) + inner

    def value(number: int, name: bytes, kind: int) -> bytes:
        side = message(1, b"\x08" + _varint(_SIDE))
        tensor = message(1, bytes([8, kind]), message(2, side, side))
        return message(number, message(1, name), message(2, tensor))

    node = message(1, message(1, b"a"), message(1, b"b"), message(2, b"y"), message(4, op.encode()))
    sides = [
        value(11, b"a", operand_kinds[0]),
        value(11, b"b", operand_kinds[1]),
        value(12, b"y", made),
    ]
    graph = message(7, node, message(2, b"product"), *sides)
    return b"\x08\x0a" + graph + message(8, message(1), b"\x10\x15")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
