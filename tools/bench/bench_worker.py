"""One engine in a process of its own; tools/bench/bench.py runs it with the python of that engine's environment.

    python tools/bench/bench_worker.py FILE prepare VARIANT CHECKPOINT OUT CONTEXT BATCH
    python tools/bench/bench_worker.py FILE serve VARIANT MODEL THREADS

FILE is one of tools/peers/. `serve` loads the model, answers with one line {"load": seconds}, the first token
included, and then each line {"tokens", "batch", "new", "seed"}: where `new` is 0 with {"prefill": seconds of
prompts of `tokens`, "next": each row's best next token}, else with {"steps": seconds of each of `new` greedy
steps after such prompts}, and with "memory": the most resident bytes so far. For steps the prompts are run
once, and later turns go back to their end. The first turn of a shape warms it up. Nothing but the engine is
imported, so that it runs in an environment without accel.

The environment variable BENCH_PACKAGES names folders of packages to look in after the environment's own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def read_engine(file: Path) -> ModuleType:
    """A file of tools/peers/ under a name of its own: `accel.py` must not hide `accel`."""
    spec = importlib.util.spec_from_file_location(f"peer_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak_memory() -> int:
    """Most resident bytes of this process; a parent's are not among them, as getrusage has it."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Server:
    """The session of the last shape asked for, kept while the shape stays."""

    def __init__(self, model: Any):
        self.model = model
        self.shape: tuple[int, int, int] | None = None
        self.session: Any = None

    def turn(self, tokens: int, batch: int, new: int, seed: int) -> dict[str, Any]:
        prompts = self.prompts(tokens, batch, seed)
        if self.shape != (tokens, batch, new):
            self.close()
            self.session = self.model.session(batch, tokens + new + 8)
            self.shape = (tokens, batch, new)
            warm = (
                prompts if new else self.prompts(tokens, batch, ~seed)
            )  # an engine may know a prompt
            self.session.prefill(warm)
            if new:
                self.session.decode(min(new, 4))
        if new:
            return {"steps": self.session.decode(new), "memory": peak_memory()}
        if hasattr(self.session, "ready"):  # what an engine is given is made of the tokens before
            self.session.ready(prompts)
        start = time.perf_counter()
        best = self.session.prefill(prompts)
        return {"prefill": time.perf_counter() - start, "next": best, "memory": peak_memory()}

    def prompts(self, tokens: int, batch: int, seed: int) -> list[list[int]]:
        """The same for every engine."""
        draw = random.Random(seed)
        return [
            [draw.randrange(3, self.model.vocabulary) for _ in range(tokens)] for _ in range(batch)
        ]

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        self.session = self.shape = None


def serve(engine: ModuleType, variant: str, path: Path, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    for name in engine.PACKAGES:
        importlib.import_module(name)
    start = time.perf_counter()
    server = Server(engine.load(path, variant, threads))
    server.turn(8, 1, 1, 0)
    print(json.dumps({"load": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(server.turn(**json.loads(line))), file=answers, flush=True)


def newest(path: Path) -> float:
    files = path.rglob("*") if path.is_dir() else [path]
    return max((f.stat().st_mtime for f in files if f.is_file()), default=0.0)


def prepare(
    engine: ModuleType, variant: str, checkpoint: Path, out: Path, context: int, batch: int
) -> None:
    """As make does: only where the file is missing, or older than what it is made from."""
    made_from = max(newest(p) for p in (checkpoint, *engine.sources()))
    if not out.exists() or newest(out) < made_from:
        engine.prepare(checkpoint, out, variant, context, batch)


def main() -> None:
    del sys.path[0]  # the folder of this file, whose names hide packages
    sys.path += [p for p in os.environ.get("BENCH_PACKAGES", "").split(os.pathsep) if p]
    engine, what, variant, *rest = sys.argv[1:]
    module = read_engine(Path(engine))
    if what == "prepare":
        checkpoint, out, context, batch = rest
        prepare(module, variant, Path(checkpoint), Path(out), int(context), int(batch))
    else:
        path, threads = rest
        serve(module, variant, Path(path), int(threads))


if __name__ == "__main__":
    main()
