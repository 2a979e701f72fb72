"""CacheGen (arXiv:2310.07240): keys and values in few steps of a grid by token, the codes of each channel in as many
bits as their frequencies allow, at several levels for a wire.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.errors import RecipeError
from accel.runtime.kv.file import Arrays, Base, Numbers, Place
from accel.runtime.kv.file._rans import Codes, decoded, encoded

_RAW = -15  # zlib's streams without header or checksum; the file has one


@dataclass(frozen=True)
class CacheGen(Base):
    """A token's numbers in a layer, of all heads, are steps of max|x| / M, where M = bins / 2 - 1: at most
    max|x| / (2 M) is lost of each. Deeper layers lose less by coarse steps, so the first `key_share` of the layers (of
    keys; `value_share` of values) have `bins`, the others `deep_bins`.

    The codes of a channel over all tokens are a stream of its own, coded by their frequencies without loss. `coder`:
    "huffman", whole bits a code, by zlib, which reads fast; or "arithmetic", within 5 % of the entropy from about a
    thousand tokens on, which takes some times as long to read and pays on wires of few megabits a second.

    A wire is sent this grid, one of twice the bins and one of half of them (`session.export_chunks`); who receives
    chooses, chunk by chunk, by the bandwidth (`model.import_chunks`).

    The paper's deltas to the first of ten tokens are left out, as in its code: at equal error they take more bits.
    """

    bins: int = option(32, least=4, most=256)
    deep_bins: int = option(16, least=4, most=256)
    key_share: float = option(0.3125, least=0, most=1)
    value_share: float = option(0.0625, least=0, most=1)
    coder: str = option("huffman", one_of=("huffman", "arithmetic"))

    grade = "approximate"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("bins", "deep_bins"):
            if getattr(self, name) % 2:
                raise RecipeError(
                    f"{self.full_name}: {name} is {getattr(self, name)}; give an even number"
                )

    @property
    def levels(self) -> Sequence[CacheGen]:
        """Twice the bins, these, and half of them."""
        counts = [(2 * self.bins, 2 * self.deep_bins), (self.bins, self.deep_bins),
                  (self.bins // 4 * 2, self.deep_bins // 4 * 2)]  # fmt: skip
        clipped = [(min(256, max(4, a)), min(256, max(4, b))) for a, b in counts]
        return [replace(self, bins=a, deep_bins=b) for a, b in dict.fromkeys(clipped)]

    def steps(self, place: Place) -> int:
        """M: steps of the grid on each side of 0."""
        share = self.key_share if place.keys else self.value_share
        fine = place.layer < math.ceil(share * place.layers)
        return (self.bins if fine else self.deep_bins) // 2 - 1

    def encode(self, place: Place, x: Numbers) -> Arrays:
        steps, rows = self.steps(place), x.transpose(0, 2, 1, 3)  # [B,S,G,D]
        most = np.abs(x).max(axis=(1, 3))  # [B,S]
        scale = np.where(most > 0, most, 1).astype(np.float64)[:, :, None, None]
        codes = (np.rint(rows * (steps / scale)) + steps).astype(np.uint8)
        channels = codes.reshape(-1, codes.shape[2] * codes.shape[3]).T  # [G D,B S]
        # bytes of the same weight lie together: those of exponents are few
        planes = np.ascontiguousarray(most.astype("<f4").reshape(-1, 1).view(np.uint8).T)
        packed = _packed(planes.tobytes(), zlib.Z_DEFAULT_STRATEGY)
        coded = (
            encoded(channels, 2 * steps + 1) if self.coder == "arithmetic" else _huffman(channels)
        )
        return {**coded, "most": np.frombuffer(packed, np.uint8)}

    def decode(
        self, place: Place, parts: Mapping[str, npt.NDArray[Any]], shape: tuple[int, ...]
    ) -> Numbers:
        batch, heads, slots, width = shape
        count, steps = batch * slots, self.steps(place)
        if "words" in parts:
            codes = decoded(parts, heads * width, count, 2 * steps + 1)
        else:
            codes = _codes(parts, heads * width, count)
        planes = _unpacked(parts["most"].tobytes(), 4 * count).reshape(4, count)
        most = np.ascontiguousarray(planes.T).view("<f4").reshape(batch, slots, 1, 1)
        rows = codes.T.astype(np.float32).reshape(batch, slots, heads, width) - steps
        found: Numbers = np.ascontiguousarray((rows * (most / steps)).transpose(0, 2, 1, 3))
        return found

    def bound(self, place: Place, x: Numbers) -> Numbers:
        """Half a step, and what float32 rounds."""
        most = np.abs(x).max(axis=(1, 3), keepdims=True)
        return np.broadcast_to(most * (0.5 / self.steps(place) + 1e-6), x.shape)


def _huffman(channels: Codes) -> Arrays:
    """What holds the codes [N,S], a stream for each channel."""
    streams = [_packed(channel.tobytes(), zlib.Z_HUFFMAN_ONLY) for channel in channels]
    return {
        "codes": np.frombuffer(b"".join(streams), np.uint8),
        "ends": np.cumsum([len(stream) for stream in streams], dtype="<u4"),
    }


def _codes(parts: Mapping[str, npt.NDArray[Any]], channels: int, count: int) -> Codes:
    """The codes [N,S] of it. Raises ValueError where it is damaged."""
    ends, data = parts["ends"].tolist(), parts["codes"].tobytes()
    found = np.empty((channels, count), np.uint8)
    for channel, start, end in zip(found, [0, *ends[:-1]], ends, strict=True):
        channel[:] = _unpacked(data[start:end], count)
    return found


def _packed(data: bytes, strategy: int) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, _RAW, 9, strategy)
    return coder.compress(data) + coder.flush()


def _unpacked(data: bytes, size: int) -> npt.NDArray[np.uint8]:
    """Raises ValueError where it is of another size, or damaged."""
    try:
        found = zlib.decompress(data, _RAW, size)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(found) != size:
        raise ValueError(f"{len(found)} codes instead of {size}")
    return np.frombuffer(found, np.uint8)
