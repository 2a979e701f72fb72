"""Codes in about as many bits as their frequencies say: an entropy coder of many streams at once (asymmetric numeral
systems, arXiv:1311.2540), in NumPy.

Every channel has frequencies of its own, which the file holds in steps of a factor √2. A channel's codes are cut into
pieces, and all pieces advance together, one code of each at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.runtime.kv.file import Arrays

Codes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]

_BITS = 12  # of a frequency: those of a channel add up to 2^12
_LEAST = 1 << 16  # of a state, which is below 2^32: a word of 16 bits brings it back into the range
_PIECE = 512  # codes of a stream at most


def encoded(codes: Codes, size: int) -> Arrays:
    """Arrays that hold codes [N,S] of N channels, all below `size`: `words` and `states` of the streams, and `table`,
    from which `decoded` has the frequencies.
    """
    table = _table(codes, size)
    share, before = _frequencies(table)
    lanes = _lanes(codes)  # [P N,T]
    index = np.arange(len(lanes)) % len(codes) * size
    state, words = np.full(len(lanes), _LEAST, np.uint64), []
    for code in np.ascontiguousarray(lanes[:, ::-1].T):
        at = index + code
        each = share[at]
        full = state >= each << np.uint64(32 - _BITS)
        words.append((state[full] & np.uint64(0xFFFF)).astype("<u2"))
        state[full] >>= np.uint64(16)
        whole, rest = np.divmod(state, each)
        state = (whole << np.uint64(_BITS)) + before[at] + rest
    packed = zlib.compress(table.tobytes(), 9)
    return {
        "words": np.concatenate(words[::-1]),
        "states": state.astype("<u4"),
        "table": np.frombuffer(packed, np.uint8),
    }


def decoded(parts: Mapping[str, npt.NDArray[Any]], channels: int, count: int, size: int) -> Codes:
    """The codes [N,S] that `encoded` was given. Raises ValueError where the arrays are damaged."""
    table = _unpacked(parts["table"].tobytes(), channels, size)
    share, before = _frequencies(table)
    of_slot = np.repeat(
        np.tile(np.arange(size, dtype=np.uint8), channels), share.astype(np.int64)
    )  # [N 2^12]: the code that a remainder says
    pieces, each = _pieces(count)
    lanes = pieces * channels
    state, words = parts["states"].astype(np.uint32), parts["words"].astype(np.uint32)
    if state.shape != (lanes,) or words.ndim != 1:
        raise ValueError(f"{state.size} streams instead of {lanes}")
    channel = np.arange(lanes) % channels
    slots, index = channel << _BITS, channel * size
    share, before = share.astype(np.uint32), before.astype(np.uint32)
    found, at = np.empty((each, lanes), np.uint8), 0
    for code in found:
        low = state & np.uint32((1 << _BITS) - 1)
        np.take(of_slot, slots + low, out=code)
        place = index + code
        state = share[place] * (state >> np.uint32(_BITS)) + low - before[place]
        empty = np.flatnonzero(state < _LEAST)
        if at + empty.size > words.size:
            raise ValueError(f"the codes end after {words.size} words")
        state[empty] = state[empty] << np.uint32(16) | words[at : at + empty.size]
        at += empty.size
    if at != words.size or (state != _LEAST).any():
        raise ValueError("other codes than were written")
    whole = found.T.reshape(pieces, channels, each).transpose(1, 0, 2)
    return whole.reshape(channels, pieces * each)[:, :count]


def _table(codes: Codes, size: int) -> Codes:
    """By channel and code [N,size]: 0 where it does not occur, else 1 more than twice the binary logarithm of how
    often, rounded.
    """
    at = np.arange(len(codes))[:, None] * size + codes
    often = np.bincount(at.reshape(-1), minlength=len(codes) * size).reshape(-1, size)
    steps = 1 + np.rint(2 * np.log2(np.maximum(often, 1)))
    return np.where(often > 0, steps, 0).astype(np.uint8)


def _frequencies(table: Codes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Of each channel and code [N size]: its share of 2^12, and the sum of those before it; whole numbers, the same on
    every machine, none 0 where the table has none.
    """
    there = table > 0
    # 2^(n/2) in whole numbers: the square root of 2 in 14 bits for odd n
    half = np.maximum(table.astype(np.int64) - 1, 0)
    weight: Counts = np.where(half % 2, 23170, 16384) << (half // 2)
    weight[~there] = 0
    room = (1 << _BITS) - there.sum(1, keepdims=True)
    share = weight * room // np.maximum(weight.sum(1, keepdims=True), 1) + there
    most = weight.argmax(1)
    share[np.arange(len(share)), most] += (1 << _BITS) - share.sum(1)
    before = share.cumsum(1) - share
    return share.reshape(-1).astype(np.uint64), before.reshape(-1).astype(np.uint64)


def _pieces(count: int) -> tuple[int, int]:
    """Of so many codes of a channel: in how many pieces they are, and codes of each."""
    pieces = max(1, -(-count // _PIECE))
    return pieces, -(-count // pieces)


def _lanes(codes: Codes) -> Codes:
    """The pieces [P N,T] of codes [N,S], one after another of all channels; the last repeats the channel's first
    code.
    """
    pieces, each = _pieces(codes.shape[1])
    short = pieces * each - codes.shape[1]
    filled = np.concatenate((codes, np.repeat(codes[:, :1], short, axis=1)), axis=1)
    return filled.reshape(len(codes), pieces, each).transpose(1, 0, 2).reshape(-1, each)


def _unpacked(data: bytes, channels: int, size: int) -> Codes:
    """The table [N,size]. Raises ValueError where it is of another size, or damaged."""
    try:
        coder = zlib.decompressobj()
        found = coder.decompress(data, channels * size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    table = np.frombuffer(found, np.uint8)
    if table.size != channels * size or table.max(initial=0) > 64:
        raise ValueError("the table of frequencies is damaged")
    table = table.reshape(channels, size)
    if not (table > 0).any(1).all():
        raise ValueError("the table of frequencies has a channel without codes")
    return table
