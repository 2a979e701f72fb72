"""A context sent over a wire that is simulated (`model.import_chunks`): which levels come, when all is there, and what
the 128 tokens that follow lose. And the bits of its codes beside their entropy, and as deltas to anchors.

python tools/bench/bench_wire.py MODEL [--tokens 2048] [--seconds 1.5] [--chunk 512] [--rates 1,4,16,64]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from turns import REFERENCE, head, row

import accel
from accel.compiler.quality.divergence import divergence, log_odds
from accel.ir.recipe import Recipe
from accel.runtime.kv.file import Place
from accel.runtime.kv.file.cachegen import CacheGen

AFTER, ANCHOR, FINE = 128, 10, 127  # tokens; tokens of a group, and steps of its first one
Codes = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1.5, help="in which all shall be there")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rates", default="1,4,16,64", help="megabits a second")
    options = parser.parse_args()
    recipe = Recipe(name="sent", tables={"kv.file": {"use": "cachegen"}})
    most = options.tokens + AFTER
    with accel.optimize(options.model, recipe, verify=False, max_context=most) as model:
        assert model.tokenizer is not None
        text = (REFERENCE / "calibration.txt").read_text(encoding="utf-8")
        ids = np.array(model.tokenizer.encode(text, special=False))[None, :most]
        tokens, after = np.split(ids, [options.tokens], 1)
        with model.session() as session:
            session.prompt(tokens)
            begun = time.perf_counter()
            parts = session.export_chunks(tokens[0], options.chunk)
            print(f"encoded in {time.perf_counter() - begun:.1f} s\n")
            codes(session.fork()._core.backend.buffers(), options.tokens)
            want = log_odds(session.run(after)[0])
        head(
            "megabits a second",
            ">computed, tokens/s",
            "chunks as",
            ">MB",
            ">s",
            ">KL",
            ">same token",
        )
        for rate in map(float, options.rates.split(",")):
            for speed in (None, 1e-9):
                wired(model, parts, rate, options.seconds, speed, (after, want))


def wired(
    model: Any, parts: dict[str, bytes], rate: float, seconds: float, speed: float | None, then: Any
) -> None:
    """One line: the whole context at this rate."""

    def fetch(name: str) -> bytes:
        time.sleep(len(parts[name]) * 8e-6 / rate)
        return parts[name]

    begun = time.perf_counter()
    session, took = model.import_chunks(fetch, seconds, speed)
    spent = time.perf_counter() - begun
    after, want = then
    with session:
        lost = divergence(want, log_odds(session.run(after)[0]))
    names = Counter("text" if one.level < 0 else f"level {one.level}" for one in took)
    row(
        f"{rate:g}", "measured" if speed is None else "never",
        ", ".join(f"{n} {name}" for name, n in names.items()),
        f"{sum(one.bytes for one in took) / 1e6:.2f}", f"{spent:.2f}",
        f"{lost.kl / AFTER:.4f}", f"{lost.same / AFTER:.3f}",
    )  # fmt: skip


def codes(buffers: dict[str, Any], tokens: int) -> None:
    """Bits of a code, over every layer; deltas with the fewest steps that err no more."""
    bits = dict.fromkeys(("entropy", "huffman", "arithmetic", "deltas"), 0.0)
    spent, count = {"huffman": 0.0, "arithmetic": 0.0}, 0
    named = {n: a[:, :, :tokens] for n, a in buffers.items() if a.ndim == 4}
    layers = 1 + max(int(n.split(".")[1]) for n in named)
    for name, array in named.items():
        place = Place(int(name.split(".")[1]), layers, name.endswith(".k"))
        x = np.ascontiguousarray(array, np.float32)
        count += x.size
        for coder in spent:
            method = CacheGen(coder=coder)
            found = method.encode(place, x)
            bits[coder] += 8 * sum(a.nbytes for n, a in found.items() if n != "most")
            begun = time.perf_counter()
            method.decode(place, found, x.shape)
            spent[coder] += time.perf_counter() - begun
        rows = x[0].transpose(1, 0, 2).reshape(tokens, -1).astype(np.float64)
        plain, back = stepped(rows, CacheGen().steps(place))
        bits["entropy"] += entropy(plain)
        error = ((back - rows) ** 2).mean()
        bits["deltas"] += next(
            b for b, e in map(lambda n: deltas(rows, n), range(2, 128)) if e <= error
        )
    head("codes of keys and values", ">bits a code", ">decoding, s")
    for name, total in bits.items():
        row(name, f"{total / count:.3f}", f"{spent[name]:.2f}" if name in spent else "")
    print()


def stepped(rows: Numbers, steps: int) -> tuple[Codes, Numbers]:
    """Codes of each token by its largest number, and what they stand for [S,N]."""
    most = np.abs(rows).max(1, keepdims=True)
    scale = np.where(most > 0, most, 1) / steps
    found = np.rint(rows / scale).astype(np.int64)
    return found, found * scale


def deltas(rows: Numbers, steps: int) -> tuple[float, float]:
    """Bits, and mean squared error, where all but the first token of a group are deltas to that."""
    first = np.arange(len(rows)) % ANCHOR == 0
    anchors, near = stepped(rows[first], FINE)
    base = np.repeat(near, ANCHOR, axis=0)[: len(rows)]
    apart, back = stepped((rows - base)[~first], steps)
    whole = base.copy()
    whole[~first] += back
    return entropy(anchors) + entropy(apart), float(((whole - rows) ** 2).mean())


def entropy(found: Codes) -> float:
    """Bits of codes [S,N], each channel by its own frequencies."""
    bits = 0.0
    for channel in found.T:
        _, often = np.unique(channel, return_counts=True)
        bits -= float((often * np.log2(often / len(channel))).sum())
    return bits


if __name__ == "__main__":
    main()
