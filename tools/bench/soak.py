"""A server under requests of all kinds: none is lost, texts do not change, and memory comes back to where it was.

    python tools/bench/soak.py ARTIFACT                       100 requests
    python tools/bench/soak.py ARTIFACT --requests 1000 --clients 16
    python tools/bench/soak.py ARTIFACT --minutes 60          as many as go into an hour
    python tools/bench/soak.py ARTIFACT --vectors EMBEDDER --cross CROSS --adapter FOLDER --chat-template FILE

It starts `accel-compile serve` itself, on this machine. A request is, by chance, of one of the kinds of
`soak_clients.py`: each endpoint, whole or streamed, cut off in its stream, cut off in its prompt, read slowly, or bad.
Kinds that this artifact cannot have are told and left out. The server's processes are measured whenever 100 requests
are done and it is idle. Memory rises while caches and the allocator's arenas fill, so the second half of the run is
judged: it may not grow. Exit code 1: a request was lost, or memory grew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.append(str(Path(__file__).resolve().parent))
import psutil
import typer
from rich.progress import Progress
from soak_clients import KINDS, Clients, Told

KEY = "soak"  # clients may add adapters only with a key


@dataclass(frozen=True)
class State:
    """Of the server's processes, when it is idle."""

    memory: int
    threads: int
    files: int

    @classmethod
    def of(cls, process: psutil.Process) -> State:
        all_of_them = [process, *process.children(recursive=True)]
        memory = sum(one.memory_info().rss for one in all_of_them)
        return cls(memory, process.num_threads(), process.num_fds())


@contextmanager
def served(
    artifacts: Sequence[Path], options: Sequence[str]
) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server, and its process."""
    command = [sys.executable, "-m", "accel.cli", "serve", *map(str, artifacts), "--port", "0"]
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ACCEL_API_KEY": KEY},
    ) as run:
        try:
            assert run.stdout is not None
            line = run.stdout.readline()
            if not (found := re.search(r"http://\S+", line)):
                raise SystemExit("the server did not start")
            yield found[0], psutil.Process(run.pid)
        finally:
            run.terminate()


def main(
    artifact: Path,
    vectors: Annotated[Path | None, typer.Option(help="an artifact that makes vectors")] = None,
    cross: Annotated[Path | None, typer.Option(help="one of a cross-encoder")] = None,
    adapter: Annotated[Path | None, typer.Option(help="a LoRA adapter, to come and go")] = None,
    chat_template: Annotated[str | None, typer.Option(help="of the server")] = None,
    requests: Annotated[int, typer.Option(min=1)] = 100,
    minutes: Annotated[float, typer.Option(help="go on for so long, whatever --requests")] = 0,
    clients: Annotated[int, typer.Option(min=1, help="requests at once")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 24,
    waiting: Annotated[int, typer.Option(min=1, help="--max-waiting of the server")] = 64,
    growth: Annotated[
        float, typer.Option(help="most MB that memory may grow by in the second half")
    ] = 16.0,
    seed: int = 0,
) -> None:
    """Print what came of each kind, and the process at the start and after each quarter."""
    artifacts = [one for one in (artifact, vectors, cross) if one is not None]
    options = ["--max-waiting", str(waiting)]
    options += [] if adapter is None else ["--adapters", str(adapter.parent)]
    options += [] if chat_template is None else ["--chat-template", chat_template]
    with served(artifacts, options) as (url, process), ThreadPoolExecutor(clients) as pool:
        ask = Clients(url, Told(), tokens, KEY, adapter)
        for why in ask.left_out.values():
            print(f"left out: {why}")
        warm = max(2 * clients, 2 * sum(KINDS.values()))
        list(pool.map(ask.one, range(seed - warm, seed)))
        start, begun = ask.idle(), time.monotonic()
        states, ask.told = [State.of(process)], Told()
        at = seed
        with Progress(*Progress.get_default_columns(), "{task.fields[memory]} MB") as bar:
            task = bar.add_task("requests", total=None if minutes else requests, memory="")
            while at < seed + requests or time.monotonic() - begun < 60 * minutes:
                upto = at + min(100, requests if minutes else seed + requests - at)
                list(pool.map(ask.one, range(at, upto)))
                at, end = upto, ask.idle()
                states.append(State.of(process))
                bar.update(task, completed=at - seed, memory=f"{states[-1].memory / 1e6:.1f}")
        spent, told = time.monotonic() - begun, ask.told
    for outcome, count in sorted(told.outcomes.items()):
        print(f"{outcome:<24} {count:6}")
    made = end["accel_generated_tokens_total"] - start["accel_generated_tokens_total"]
    changed = [prompt for prompt, texts in told.texts.items() if len(texts) > 1]
    print(f"{at - seed} requests in {spent:.1f} s, {made:.0f} tokens; lost: {len(told.lost)}")
    print(f"texts of {len(told.texts)} greedy requests: {len(changed)} differ between requests")
    quarters = [states[len(states[1:]) * part // 4] for part in range(5)]
    for name in ("memory", "threads", "files"):
        unit, scale = (" MB", 1e6) if name == "memory" else ("", 1)
        values = " -> ".join(f"{getattr(one, name) / scale:.4g}" for one in quarters)
        print(f"{name:<8}{values}{unit} (at the start and after each quarter)")
    print(f"state   {end['accel_kv_bytes']:.0f} B")
    for line in told.lost[:20]:
        print(f"lost: {line}")
    grew = (quarters[4].memory - quarters[2].memory) / 1e6 > growth
    if told.lost or changed or grew or end["accel_kv_bytes"]:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
