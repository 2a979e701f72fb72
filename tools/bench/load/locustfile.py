"""Streams of an OpenAI-compatible server, for locust; tools/bench/bench_serve.py runs it.

    locust -f tools/bench/load/locustfile.py --headless -u 16 -r 16 -H http://127.0.0.1:8000 --requests FILE --told FILE

`--requests`: JSON, {"model": name, "body": what every request has, "requests": [{"prompt": ids, "max_tokens": n,
"wait": seconds before it is sent, 0 if not given}, …]}. A user sends the next one that nobody has sent, and reads its
stream to the end; the run ends when all were sent and read. Locust's own table has the time to the first text and the
gaps between texts; `--told` gets all times of each request, in seconds of one clock: {"start", "texts", "tokens",
"text", "error"}.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import gevent
from locust import FastHttpUser, constant, events, task
from locust.env import Environment
from locust.exception import StopUser


class Streams:
    """What is to be sent, and what came."""

    def __init__(self, path: str):
        with open(path, encoding="utf-8") as file:
            given = json.load(file)
        self.left = deque(enumerate(given["requests"]))
        self.common = {"model": given["model"], "stream": True, "temperature": 0, **given["body"]}
        self.told: list[dict[str, Any] | None] = [None] * len(self.left)

    @property
    def over(self) -> bool:
        """Whether every request has ended."""
        return None not in self.told


@events.init_command_line_parser.add_listener
def options(parser: Any) -> None:
    parser.add_argument("--requests", required=True, help="JSON: what to send")
    parser.add_argument("--told", required=True, help="JSON: what came")


@events.init.add_listener
def opened(environment: Environment, **_: Any) -> None:
    environment.streams = Streams(environment.parsed_options.requests)


@events.quitting.add_listener
def ended(environment: Environment, **_: Any) -> None:
    with open(environment.parsed_options.told, "w", encoding="utf-8") as file:
        json.dump(environment.streams.told, file)


class Reader(FastHttpUser):
    """Sends one request after the other, each when the one before has ended."""

    wait_time = constant(0)
    network_timeout = connection_timeout = 600.0

    @task
    def stream(self) -> None:
        streams = self.environment.streams
        if not streams.left:
            raise StopUser
        at, asked = streams.left.popleft()
        time.sleep(asked.get("wait", 0))
        body = {**streams.common, "prompt": asked["prompt"], "max_tokens": asked["max_tokens"]}
        told: dict[str, Any] = {"start": time.perf_counter(), "texts": [], "tokens": 0, "text": ""}
        try:
            self.read(body, told)
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
        streams.told[at] = told
        if streams.over:
            gevent.spawn(self.environment.runner.quit)  # which ends this user, too

    def read(self, body: dict[str, Any], told: dict[str, Any]) -> None:
        """A stream, to its end."""
        body = {**body, "stream_options": {"include_usage": True}}
        answer = self.client.post("/v1/completions", json=body, stream=True)
        if answer.status_code == 0:  # the server had closed the connection of the request before
            answer = self.client.post("/v1/completions", json=body, stream=True)
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code}: {(answer.text or '')[:200]}")
        last = told["start"]
        while line := answer.stream.readline(b"\n"):
            now = time.perf_counter()
            data = bytes(line).strip().removeprefix(b"data:").strip()
            if not data or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ValueError(str(chunk["error"])[:200])
            if usage := chunk.get("usage"):
                told["tokens"] = usage["completion_tokens"]
            if text := "".join(choice.get("text") or "" for choice in chunk["choices"]):
                self.tell("gap" if told["texts"] else "first text", now - last)
                told["texts"].append(now)
                told["text"] += text
                last = now

    def tell(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE", name=name, response_time=1e3 * seconds, response_length=0, exception=None, context={}
        )  # fmt: skip
