"""What a step reads of a context in mapped files: bytes and time, of recipes of `leoam` and `shadowkv` in turn.

    python tools/bench/files.py MODEL --context 4096 --read 512

Each artifact reads a long text; then tokens of it one by one. `cold`: the system lets go of all files before each step;
`after`: it does so once, and then keeps what steps read. Bytes are those of pages of the files that a step brought into
memory (`mincore`). Beside the time of a step stands that of the same session with all of its files in memory. KL: from
the model that reads everything, along the text, in nats a token.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

import accel
from accel.compiler.build_options import BuildOptions
from accel.compiler.load.source import open_source
from accel.compiler.optimize import build_captured
from accel.compiler.part_text import text_ids
from accel.ir.capture.capture import capture
from accel.runtime.backends.onnx.mapped import memory_of, put_away

RECIPES: dict[str, Any] = {
    "whole": [],
    "leoam": [{"kv": {"select": {"use": "leoam"}}}],
    "shadowkv": [{"kv": {"select": {"use": "shadowkv"}}}],
    "leoam, 8 bits": [{"kv": {"select": {"use": "leoam"}}}, "kv-int8"],
    "leoam, 8 bits, pages of 64": [
        {"kv": {"select": {"use": "leoam", "page": 64, "chunk": 128}}}, "kv-int8"
    ],
}  # fmt: skip
Array = npt.NDArray[Any]


def resident(arrays: list[Array]) -> npt.NDArray[np.bool_]:
    """Which pages of their files the system holds in memory."""
    call, found = ctypes.CDLL(None, use_errno=True).mincore, []
    for array in arrays:
        held = (ctypes.c_ubyte * -(-array.nbytes // mmap.PAGESIZE))()
        if call(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), held):
            raise OSError(ctypes.get_errno(), "mincore")
        found.append(np.frombuffer(bytes(held), np.uint8) & 1 > 0)
    return np.concatenate(found) if found else np.zeros(0, bool)


class Steps:
    """Steps of a session along a text."""

    def __init__(self, session: Any, tokens: Array) -> None:
        self.session, self.tokens = session, tokens
        self.logits: list[Array] = []

    @property
    def files(self) -> list[Array]:
        """As they are: a buffer that grows is another."""
        held = self.session._core.backend.buffers().values()
        return [a for a in held if memory_of(a) is not None]

    def step(self, cold: bool) -> tuple[float, int]:
        """Seconds, and bytes that came from files."""
        if cold:
            put_away(self.files)
        before, at = resident(self.files), len(self.logits)
        start = time.perf_counter()
        found = self.session.run(self.tokens[:, at : at + 1], last_only=True)
        seconds = time.perf_counter() - start
        self.logits.append(found[0, -1].astype(np.float64))
        now = resident(self.files)
        if len(now) > len(before):
            raise typer.BadParameter("buffers grew in a step; give another --context")
        return seconds, int((now & ~before).sum()) * mmap.PAGESIZE


def log_odds(rows: list[Array]) -> Array:
    x = np.stack(rows)
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def main(
    model: Path,
    context: Annotated[int, typer.Option(min=1024, help="Tokens of the text.")] = 4096,
    read: Annotated[int, typer.Option(min=64, help="Tokens that a step reads.")] = 512,
    steps: Annotated[int, typer.Option(min=4, help="Of each kind.")] = 12,
    threads: int = 1,
    only: Annotated[list[str] | None, typer.Option(help="A recipe; may be repeated.")] = None,
) -> None:
    """Print a table."""
    source = open_source(model)
    assert source.tokenizer is not None
    ids = text_ids(source.tokenizer, None, context).numpy()[None, : context + 3 * steps]
    loaded, most = source.load(), context + 256
    program = capture(loaded.model, max_context=most, stored=loaded.stored)
    whole: Array | None = None
    columns = ["", *(f"{n}, MB" for n in ("memory", "files", "cold step", "step after"))]
    columns += [*(f"{n}, ms" for n in ("cold", "after", "in memory")), "KL"]
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * 8}")
    for name, tables in RECIPES.items():
        if name not in (only or RECIPES):
            continue
        recipe = [dict(one) if isinstance(one, dict) else one for one in tables]
        if recipe:
            recipe[0] = {"kv": {"select": {**recipe[0]["kv"]["select"], "tokens_read": read}}}
        with tempfile.TemporaryDirectory() as folder:
            out, options = Path(folder) / "built", BuildOptions(max_context=most, verify=False)
            build_captured(program, recipe, options, source.tokenizer, out).close()
            with (
                accel.load(out, threads=threads, kernels="native") as one,
                one.session() as session,
            ):
                session.run(ids[:, :context], last_only=True)
                session.end_prompt()
                run = Steps(session, ids[:, context:])
                warm = [run.step(False) for _ in range(steps)]
                cold = [run.step(True) for _ in range(steps)]
                put_away(run.files)
                after = [run.step(False) for _ in range(steps)]
                held, mapped = (session.stats[n] for n in ("kv_bytes", "kv_mapped"))
        odds = log_odds(run.logits)
        whole = odds if name == "whole" else whole
        lost = np.nan if whole is None else float((np.exp(whole) * (whole - odds)).sum(-1).mean())
        sizes = (held - mapped, mapped, mean(b for _, b in cold), mean(b for _, b in after))
        times = [1e3 * median(s for s, _ in some) for some in (cold, after, warm)]
        cells = [f"{x / 1e6:.2f}" for x in sizes] + [f"{t:.0f}" for t in times]
        print(f"| {name} | {' | '.join(cells)} | {lost:.4f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
