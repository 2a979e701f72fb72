"""Requests of all kinds to one server, and what came of them."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

WAIT = 60.0  # seconds of one request, and for the server to get idle
KINDS = {  # of requests, and how often each comes
    "whole": 4, "stream": 4, "cut in stream": 4, "cut in prompt": 3, "slow reader": 1, "scores": 1,
    "chat with tools": 2, "forced call": 2, "responses": 2, "messages": 2, "count_tokens": 1, "tokenize": 1,
    "infill": 1, "embeddings": 2, "rerank": 1, "adapter": 1,
    "junk": 1, "too large": 1, "unknown model": 1, "long prompt": 1, "bad tools": 1,
}  # fmt: skip
NEEDS = {  # what not every server has; it is tried before
    "chat with tools", "forced call", "responses", "messages", "count_tokens", "infill", "embeddings", "rerank",
    "adapter",
}  # fmt: skip
REFUSED = (400, 403, 501)
STATUS = {"junk": 400, "too large": 413, "unknown model": 404, "long prompt": 400, "bad tools": 400}
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
JUNK = [
    b"{bad",
    b"[]",
    b"\xff\xfe",
    b'{"model": 5}',
    b"[" * 5000,
    b'{"prompt": "a", "max_tokens": -1}',
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
BAD_TOOLS = [[5], [{"type": "web_search"}], [{"type": "function", "function": {"name": "a b"}}]]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@dataclass
class Told:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    texts: dict[str, set[str]] = field(default_factory=dict)  # of a greedy request
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, status: int | None, wanted: int = 200, why: str = "") -> None:
        with self.lock:
            self.outcomes[f"{kind}: {status or 'left'}"] += 1
            if status not in (None, wanted, 429):
                self.lost.append(f"{kind}: {status}, not {wanted}: {why:.300}")

    def text(self, request: str, text: str) -> None:
        with self.lock:
            self.texts.setdefault(request, set()).add(text)


class Clients:
    """Requests of all kinds to one server. `adapter`: a folder that it may read."""

    def __init__(self, url: str, told: Told, tokens: int, key: str, adapter: Path | None):
        self.told, self._tokens, self._key, self._folder = told, tokens, key, adapter
        self._host, self._port = url.removeprefix("http://").rsplit(":", 1)
        self._http = httpx.Client(base_url=url, timeout=WAIT, headers={"x-api-key": key})
        models = self._http.get("/v1/models").json()["data"]
        self._name = next(one["id"] for one in models if one["embedding"] is None)
        other = {one["rerank"]: one["id"] for one in models if one["embedding"] is not None}
        self._vectors, self._cross = (other.get(kind, self._name) for kind in (False, True))
        self.left_out: dict[str, str] = {}
        self._try()

    def _try(self) -> None:
        """Leave out the kinds that this server refuses. Raises SystemExit where one fails."""
        wanted, self.told = self.told, Told()
        for kind in sorted(NEEDS):
            self._send(kind, random.Random(0))
            if any(self.told.outcomes[f"{kind}: {status}"] for status in REFUSED):
                self.left_out[kind] = self.told.lost.pop()
        if self.told.lost:
            raise SystemExit(f"lost: {self.told.lost[0]}")
        self.told = wanted

    def one(self, seed: int) -> None:
        """The request of a seed."""
        rng = random.Random(seed)
        kinds = {kind: often for kind, often in KINDS.items() if kind not in self.left_out}
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        self._send(kind, rng)

    def _send(self, kind: str, rng: random.Random) -> None:
        try:
            getattr(self, f"_{kind.replace(' ', '_')}")(kind, rng)
        except Exception as error:
            with self.told.lock:
                self.told.lost.append(f"{kind}: {type(error).__name__}: {error}")

    def count(self) -> Counter[str]:
        """The server's metrics of models, added over these."""
        found = Counter[str]()
        for family in text_string_to_metric_families(self._http.get("/metrics").text):
            for one in family.samples:
                if list(one.labels) == ["model"]:
                    found[one.name] += one.value  # type: ignore[assignment]
        return found

    def idle(self) -> Counter[str]:
        """The metrics, once nothing runs. Raises SystemExit."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            found = self.count()
            if not found["accel_running"] + found["accel_waiting"]:
                return found
            time.sleep(0.05)
        raise SystemExit(f"after {WAIT:g} s requests still run: {found}")

    # Answers

    def _asked(self, kind: str, path: str, body: dict[str, Any]) -> Any:
        """The answer of one that is not streamed; None: the server was full."""
        answer = self._http.post(path, json=body)
        self.told.add(kind, answer.status_code, why=answer.text)
        return answer.json() if answer.status_code == 200 else None

    def _events(self, kind: str, path: str, body: dict[str, Any], pause: float = 0.0) -> list[Any]:
        """The events of a stream; none: the server was full. Raises ValueError where its end is missing."""
        with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
            lines = []
            for line in answer.iter_lines():
                lines += [line.removeprefix("data: ")] if line.startswith("data: ") else []
                time.sleep(pause)
        self.told.add(kind, answer.status_code)
        if answer.status_code != 200:
            return []
        if path in (COMPLETIONS, CHAT) and (not lines or lines.pop() != "[DONE]"):
            raise ValueError(f"the stream has no end: {lines[-1:]}")
        found = [json.loads(line) for line in lines]
        if found and "error" in (found[-1], found[-1].get("type")):
            raise ValueError(f"the stream ends in an error: {found[-1]}")
        return found

    def _body(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        body = {"model": self._name, "prompt": rng.choice(PROMPTS), "temperature": 0}
        return {**body, "max_tokens": self._tokens, **more}

    def _talk(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        body = self._body(rng, **more)
        return {**body, "messages": [{"role": "user", "content": body.pop("prompt")}]}

    def _streamed(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request that is answered for long."""
        path = rng.choice([COMPLETIONS, *({CHAT, RESPONSES, MESSAGES} - self._without)])
        more = {"ignore_eos": True, "stream": True}
        if path == RESPONSES:
            return path, {**self._input(rng, 10 * self._tokens), **more}
        body = self._body if path == COMPLETIONS else self._talk
        return path, body(rng, max_tokens=10 * self._tokens, **more)

    @property
    def _without(self) -> set[str]:
        kinds = {"chat with tools": CHAT, "responses": RESPONSES, "messages": MESSAGES}
        return {path for kind, path in kinds.items() if kind in self.left_out}

    def _input(self, rng: random.Random, tokens: int) -> dict[str, Any]:
        body = {"model": self._name, "input": rng.choice(PROMPTS), "temperature": 0}
        return {**body, "max_output_tokens": tokens}

    # Completions

    def _whole(self, kind: str, rng: random.Random) -> None:
        body = self._body(rng)
        if answer := self._asked(kind, COMPLETIONS, body):
            self.told.text(body["prompt"], answer["choices"][0]["text"])

    def _stream(self, kind: str, rng: random.Random, pause: float = 0.0) -> None:
        body = self._body(rng)
        if found := self._events(kind, COMPLETIONS, body, pause):
            self.told.text(body["prompt"], "".join(one["choices"][0]["text"] for one in found))

    def _slow_reader(self, kind: str, rng: random.Random) -> None:
        self._stream(kind, rng, 0.02)

    def _scores(self, kind: str, rng: random.Random) -> None:
        body = self._body(rng, max_tokens=0, echo=True, logprobs=1)
        if answer := self._asked(kind, COMPLETIONS, body):
            (choice,) = answer["choices"]
            if choice["text"] != body["prompt"]:
                raise ValueError(f"the prompt came back as {choice['text']!r}")

    def _infill(self, kind: str, rng: random.Random) -> None:
        asked = {"input_prefix": rng.choice(PROMPTS), "input_suffix": rng.choice(PROMPTS)}
        body = {"model": self._name, "temperature": 0, "n_predict": self._tokens, **asked}
        if answer := self._asked(kind, "/infill", body):
            self.told.text(f"infill {asked}", answer["content"])

    def _cut_in_stream(self, kind: str, rng: random.Random) -> None:
        left = rng.randint(1, 10)
        path, body = self._streamed(rng)
        with self._http.stream("POST", path, json=body) as answer:
            for _ in answer.iter_lines():
                left -= 1
                if not left:
                    break
        self.told.add(kind, answer.status_code)

    def _cut_in_prompt(self, kind: str, rng: random.Random) -> None:
        path, asked = self._streamed(rng)
        body = json.dumps(asked).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"x-api-key: {self._key}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, "", ""]).encode()
        with socket.create_connection((self._host, int(self._port)), WAIT) as link:
            link.sendall((head + body)[: rng.choice([len(head) + 5, None])])
            time.sleep(rng.random() * 0.2)
        self.told.add(kind, None)

    # Agents

    def _chat_with_tools(self, kind: str, rng: random.Random) -> None:
        tools = [{"type": "function", "function": FUNCTION}]
        body = self._talk(rng, tools=tools)
        prompt = body["messages"][0]["content"]
        if rng.random() < 0.5:
            if answer := self._asked(kind, CHAT, body):
                self.told.text(f"chat {prompt}", answer["choices"][0]["message"]["content"] or "")
        elif found := self._events(kind, CHAT, body):
            pieces = (one["choices"][0]["delta"].get("content") for one in found)
            self.told.text(f"chat {prompt}", "".join(piece or "" for piece in pieces))

    def _forced_call(self, kind: str, rng: random.Random) -> None:
        tools = [{"type": "function", "function": FUNCTION}]
        must = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        body = self._talk(rng, tools=tools, **must)
        if answer := self._asked(kind, CHAT, body):
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            if {*json.loads(call["function"]["arguments"])} != {"city", "days"}:
                raise ValueError(f"the arguments break their schema: {call}")
            self.told.text(f"call {body['messages']}", call["function"]["arguments"])

    def _responses(self, kind: str, rng: random.Random) -> None:
        body = {**self._input(rng, self._tokens), "tools": [{"type": "function", **FUNCTION}]}
        if found := self._events(kind, RESPONSES, body):
            if found[-1]["type"] not in ("response.completed", "response.incomplete"):
                raise ValueError(f"the stream has no end: {found[-1]}")
            self.told.text(f"chat {body['input']}", _pieces(found, "response.output_text.delta"))

    def _messages(self, kind: str, rng: random.Random) -> None:
        described = {key: FUNCTION[key] for key in ("name", "description")}
        body = self._talk(rng, tools=[{**described, "input_schema": SCHEMA}])
        if found := self._events(kind, MESSAGES, body):
            if found[-1]["type"] != "message_stop":
                raise ValueError(f"the stream has no end: {found[-1]}")
            deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
            text = "".join(one.get("text", "") for one in deltas)
            self.told.text(f"chat {body['messages'][0]['content']}", text)

    def _count_tokens(self, kind: str, rng: random.Random) -> None:
        body = self._talk(rng)
        if answer := self._asked(kind, f"{MESSAGES}/count_tokens", body):
            self.told.text(f"count {body['messages']}", str(answer["input_tokens"]))

    # The others

    def _tokenize(self, kind: str, rng: random.Random) -> None:
        text = rng.choice(PROMPTS)
        asked = {"model": self._name, "prompt": text, "add_special_tokens": False}
        if answer := self._asked(kind, "/tokenize", asked):
            back = {"model": self._name, "tokens": answer["tokens"]}
            if (found := self._asked(kind, "/detokenize", back)) and found["prompt"] != text:
                raise ValueError(f"{text!r} came back as {found['prompt']!r}")

    def _embeddings(self, kind: str, rng: random.Random) -> None:
        texts = rng.sample(PROMPTS, rng.randint(1, 4))
        if answer := self._asked(kind, "/v1/embeddings", {"model": self._vectors, "input": texts}):
            for text, one in zip(texts, answer["data"], strict=True):
                told = " ".join(
                    f"{value:.3f}".replace("-0.000", "0.000") for value in one["embedding"][:4]
                )
                if len(one["embedding"]) < 2:
                    raise ValueError(f"a vector of {len(one['embedding'])} numbers")
                self.told.text(f"vector {text}", told)

    def _rerank(self, kind: str, rng: random.Random) -> None:
        query, *texts = rng.sample(PROMPTS, rng.randint(2, 5))
        body = {"model": self._cross, "query": query, "documents": texts}
        if answer := self._asked(kind, "/v1/rerank", body):
            for one in answer["results"]:
                pair = f"pair {query} {texts[one['index']]}"
                self.told.text(pair, f"{one['relevance_score']:.3f}")

    def _adapter(self, kind: str, rng: random.Random) -> None:
        name = f"a{rng.getrandbits(60):x}"
        asked = {"model": self._name, "lora_name": name}
        folder = {**asked, "lora_path": str(self._folder)}
        if self._asked(kind, "/v1/load_lora_adapter", folder):
            body = self._body(rng, model=f"{self._name}:{name}")
            answer = self._asked(kind, COMPLETIONS, body)
            self._asked(kind, "/v1/unload_lora_adapter", asked)
            if answer:
                self.told.text(f"adapter {body['prompt']}", answer["choices"][0]["text"])

    # What is refused

    def _bad(self, kind: str, content: bytes, path: str = COMPLETIONS) -> None:
        head = {"content-type": "application/json"}
        answer = self._http.post(path, content=content, headers=head)
        self.told.add(kind, answer.status_code, STATUS[kind], answer.text)
        if not {*answer.json()} >= {"error"}:
            raise ValueError(f"no error object: {answer.text[:80]}")

    def _junk(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, rng.choice(JUNK), rng.choice([COMPLETIONS, CHAT, RESPONSES, MESSAGES]))

    def _too_large(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, b'"' + b"x" * (10 << 20) + b'"')

    def _unknown_model(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, json.dumps(self._body(rng, model="none")).encode())

    def _long_prompt(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, json.dumps(self._body(rng, prompt="x y " * 100_000)).encode())

    def _bad_tools(self, kind: str, rng: random.Random) -> None:
        self._bad(kind, json.dumps(self._talk(rng, tools=rng.choice(BAD_TOOLS))).encode(), CHAT)


def _pieces(events: list[Any], kind: str) -> str:
    """The text of the events of a kind."""
    found: Iterator[str] = (one["delta"] for one in events if one["type"] == kind)
    return "".join(found)
