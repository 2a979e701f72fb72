"""A server under requests of all kinds: none is lost, texts do not change, and memory comes back to where it was.

    python tools/bench/soak.py ARTIFACT                       100 requests
    python tools/bench/soak.py ARTIFACT --requests 1000 --clients 16
    python tools/bench/soak.py ARTIFACT --minutes 60          as many as go into an hour

It starts `accel-compile serve` itself, on this machine. A request is, by chance: whole, streamed, cut off in its
stream, cut off in its prompt, read slowly, or bad (junk, too large, an unknown model, a prompt past the context). The
process is measured whenever 100 requests are done and it is idle. Memory rises while caches and the allocator's arenas
fill, so the second half of the run is judged: it may not grow. Exit code 1: a request was lost, or memory grew.
"""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress

KINDS = {  # of requests, and how often each comes
    "whole": 4, "stream": 4, "cut in stream": 3, "cut in prompt": 3, "slow reader": 1, "junk": 1,
    "too large": 1, "unknown model": 1, "long prompt": 1,
}  # fmt: skip
STATUS = {"junk": 400, "too large": 413, "unknown model": 404, "long prompt": 400}
PROMPTS = [
    "import os\n",
    "def main(",
    "class A:\n",
    "for i in range(",
    "x = [1, 2",
    "# the",
    "try:\n",
    "return ",
]
JUNK = [b"{bad", b"[]", b"\xff\xfe", b'{"model": 5}', b"[" * 5000, b'{"prompt": "a"}']
WAIT = 60.0  # seconds of one request, and for the server to get idle


@dataclass
class Told:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)  # of answers that were read
    lost: list[str] = field(default_factory=list)
    texts: dict[str, set[str]] = field(default_factory=dict)  # of a prompt, greedy
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, status: int | None, wanted: int = 200) -> None:
        with self.lock:
            self.outcomes[f"{kind}: {status or 'left'}"] += 1
            if status is not None:
                self.statuses[str(status)] += 1
            if status not in (None, wanted, 429):
                self.lost.append(f"{kind}: {status}, not {wanted}")

    def text(self, prompt: str, text: str) -> None:
        with self.lock:
            self.texts.setdefault(prompt, set()).add(text)


@dataclass(frozen=True)
class State:
    """Of the server's process, when it is idle."""

    memory: int
    threads: int
    files: int

    @classmethod
    def of(cls, process: psutil.Process) -> State:
        return cls(process.memory_info().rss, process.num_threads(), process.num_fds())


@contextmanager
def served(artifact: Path, waiting: int) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server, and its process."""
    command = [sys.executable, "-m", "accel.cli", "serve", str(artifact), "--port", "0"]
    with subprocess.Popen(
        [*command, "--max-waiting", str(waiting)], stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout is not None
            line = run.stdout.readline()
            if not (found := re.search(r"http://\S+", line)):
                raise SystemExit("the server did not start")
            yield found[0], psutil.Process(run.pid)
        finally:
            run.terminate()


class Clients:
    """Requests of all kinds to one server."""

    def __init__(self, url: str, told: Told, tokens: int):
        self._url, self.told, self._tokens = url, told, tokens
        self._host, self._port = url.removeprefix("http://").rsplit(":", 1)
        self._http = httpx.Client(base_url=url, timeout=WAIT)
        self._name = self._http.get("/v1/models").json()["data"][0]["id"]

    def one(self, seed: int) -> None:
        """The request of a seed."""
        rng = random.Random(seed)
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        try:
            getattr(self, f"_{kind.replace(' ', '_')}")(kind, rng)
        except Exception as error:
            with self.told.lock:
                self.told.lost.append(f"{kind}: {type(error).__name__}: {error}")

    def count(self) -> dict[str, float]:
        """The server's metrics, those of the model by name."""
        families = text_string_to_metric_families(self._http.get("/metrics").text)
        return {s.name: s.value for f in families for s in f.samples if list(s.labels) == ["model"]}

    def idle(self) -> dict[str, float]:
        """The metrics, once nothing runs. Raises SystemExit."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            found = self.count()
            if not found["accel_running"] + found["accel_waiting"]:
                return found
            time.sleep(0.05)
        raise SystemExit(f"after {WAIT:g} s requests still run: {found}")

    def _body(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        body = {"model": self._name, "prompt": rng.choice(PROMPTS), "temperature": 0}
        return {**body, "max_tokens": self._tokens, **more}

    def _whole(self, kind: str, rng: random.Random) -> None:
        body = self._body(rng)
        answer = self._http.post("/v1/completions", json=body)
        self.told.add(kind, answer.status_code)
        if answer.status_code == 200:
            self.told.text(body["prompt"], answer.json()["choices"][0]["text"])

    def _stream(self, kind: str, rng: random.Random, pause: float = 0.0) -> None:
        body = self._body(rng, stream=True)
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            lines = []
            for line in answer.iter_lines():
                lines += [line.removeprefix("data: ")] if line else []
                time.sleep(pause)
        self.told.add(kind, answer.status_code)
        if answer.status_code == 200:
            if lines.pop() != "[DONE]":
                raise ValueError("the stream has no end")
            self.told.text(
                body["prompt"], "".join(json.loads(x)["choices"][0]["text"] for x in lines)
            )

    def _slow_reader(self, kind: str, rng: random.Random) -> None:
        self._stream(kind, rng, 0.02)

    def _cut_in_stream(self, kind: str, rng: random.Random) -> None:
        left = rng.randint(1, 10)
        body = self._body(rng, stream=True, max_tokens=10 * self._tokens, ignore_eos=True)
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_lines():
                left -= 1
                if not left:
                    break
        self.told.add(kind, answer.status_code)

    def _cut_in_prompt(self, kind: str, rng: random.Random) -> None:
        body = json.dumps(self._body(rng, max_tokens=10 * self._tokens)).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
        with socket.create_connection((self._host, int(self._port)), WAIT) as link:
            link.sendall((head + body)[: rng.choice([len(head) + 5, None])])
            time.sleep(rng.random() * 0.2)
        self.told.add(kind, None)

    def _bad(self, kind: str, content: bytes) -> None:
        head = {"content-type": "application/json"}
        answer = self._http.post("/v1/completions", content=content, headers=head)
        self.told.add(kind, answer.status_code, STATUS[kind])
        if set(answer.json()) != {"error"}:
            raise ValueError(f"no error object: {answer.text[:80]}")

    def _junk(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, rng.choice(JUNK))

    def _too_large(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, b'"' + b"x" * (10 << 20) + b'"')

    def _unknown_model(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, json.dumps(self._body(rng, model="none")).encode())

    def _long_prompt(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, json.dumps(self._body(rng, prompt="x y " * 100_000)).encode())


def main(
    artifact: Path,
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
    with served(artifact, waiting) as (url, process), ThreadPoolExecutor(clients) as pool:
        ask = Clients(url, Told(), tokens)
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
    print(f"texts of {len(told.texts)} greedy prompts: {len(changed)} differ between requests")
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
