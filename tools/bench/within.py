"""How long a text grows in the memory given: the whole cache in memory, and in files by `leoam`.

    python tools/bench/within.py MODEL leoam --limit 96 --context 4096

The artifact runs in a process of its own, whose own memory (RLIMIT_DATA) is limited once its session is open: the
system refuses what goes beyond. Pages of files do not count there; they are let go after each call, as a system that is
short of memory does, and counted (`mincore`) after steps of one token. A text is read in calls of 256 tokens, each of
which reads all before it, one layer's files after the other's.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy.typing as npt
import typer
from files import Steps, resident

import accel
from accel.compiler.build_options import BuildOptions
from accel.compiler.load.source import open_source
from accel.compiler.optimize import build_captured
from accel.compiler.part_text import text_ids
from accel.ir.capture.capture import capture
from accel.ir.errors import AccelError
from accel.ir.recipe import Recipe
from accel.runtime.backends.onnx.mapped import put_away

CALL, STEPS = 256, 8
FIRST = CALL - STEPS  # so that no buffer grows in a step of one token


def private() -> int:
    """Bytes of memory of its own that the process has asked for."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))


def grown(out: Path, ids: npt.NDArray[Any], limit: int) -> str:
    """The row of an artifact, of a text [1,N]."""
    context = ids.shape[1] - 2 * STEPS
    with accel.load(out, threads=1, kernels="native") as one, one.session() as session:
        session.run(ids[:, :FIRST], last_only=True)
        at, before = FIRST, private()
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit * 1_000_000,) * 2)
        reason, seen = "", list[int]()
        try:
            while at < context:
                session.run(ids[:, at : at + CALL], last_only=True)
                at += CALL
                put_away(Steps(session, ids).files)
            session.end_prompt()
            run = Steps(session, ids[:, at:])
            for _ in range(STEPS):
                run.step(True)
                seen.append(int(resident(run.files).sum()))
        except (AccelError, MemoryError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:100] or type(error).__name__
        held, mapped = (session.stats[n] for n in ("kv_bytes", "kv_mapped"))
        asked = private() - before
    pages = f"{max(seen) * resource.getpagesize() / 1e6:.1f}" if seen else f"stopped: {reason}"
    sizes = [f"{x / 1e6:.1f}" for x in (held - mapped, mapped, asked)]
    return f"{at} | {' | '.join(sizes)} | {pages}"


def main(
    model: Path,
    recipe: Annotated[str, typer.Argument(help="Its name.")] = "base",
    limit: Annotated[int, typer.Option(min=16, help="Megabytes above the open session's.")] = 96,
    context: Annotated[int, typer.Option(min=2 * CALL, help="Tokens of the text.")] = 4096,
    read: Annotated[int, typer.Option(min=64, help="Tokens that a step of kv.select reads.")] = 256,
) -> None:
    """Print a row of a table."""
    source = open_source(model)
    assert source.tokenizer is not None
    ids = text_ids(source.tokenizer, None, context).numpy()[None, : context + STEPS]
    loaded, most = source.load(), context + CALL
    program = capture(loaded.model, max_context=most, stored=loaded.stored)
    tables = {axis: dict(table) for axis, table in Recipe.load(recipe).tables.items()}
    if "kv.select" in tables:
        tables["kv.select"]["tokens_read"] = read
    asked, options = Recipe(recipe, tables=tables), BuildOptions(max_context=most, verify=False)
    apart = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, apart) as pool:
        out = Path(folder) / "built"
        build_captured(program, asked, options, source.tokenizer, out).close()
        told = pool.submit(grown, out, ids, limit).result()
    columns = ["recipe", "tokens", "state in memory, MB", "in files, MB", "memory asked for, MB"]
    print(f"| {' | '.join(columns)} | of files in memory, MB |\n|---|{'---:|' * 5}")
    print(f"| `{recipe}` | {told} |")


if __name__ == "__main__":
    typer.run(main)
