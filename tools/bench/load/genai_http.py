"""The thinnest HTTP server over onnxruntime-genai: POST /v1/completions with token ids, streamed.

    python tools/bench/load/genai_http.py MODEL --port 8000 --rows 16 --threads 2

It runs in an environment with onnxruntime_genai and uvicorn, and without accel. onnxruntime-genai has no server of its
own, and its engine for continuous batching wants PagedAttention, which its builder makes for CUDA only; on a CPU its
engine has fixed batches of 4. So this one runs its generator with batches of up to `--rows` requests: those that wait
when a batch begins, and that have prompts of one length, run together to the end of the longest. Nothing joins a batch
that runs. A request without new tokens left is sent no more, and its row goes on unread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(eq=False)
class Asked:
    """A request: its prompt [n], its new tokens, and who is told a token (None: no more come)."""

    prompt: list[int]
    new: int
    tell: Callable[[int | None], None]


def taken(waiting: deque[Asked], rows: int) -> list[Asked]:
    """The next batch: the first that waits, and those after it with prompts of its length."""
    first = waiting[0]
    found = [one for one in waiting if len(one.prompt) == len(first.prompt)][:rows]
    for one in found:
        waiting.remove(one)
    return found


class Batches:
    """One thread that runs a batch after the other."""

    def __init__(self, path: str, threads: int, rows: int):
        import onnxruntime_genai as og

        config = og.Config(path)
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self.model = og.Model(config)
        self.tokenizer = og.Tokenizer(self.model)
        self.rows, self.waiting = rows, deque[Asked]()
        self.changed = threading.Condition()
        threading.Thread(target=self.work, daemon=True).start()

    def submit(self, asked: Asked) -> None:
        with self.changed:
            self.waiting.append(asked)
            self.changed.notify()

    def work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting:
                    self.changed.wait()
                batch = taken(self.waiting, self.rows)
            self.run(batch)

    def run(self, batch: list[Asked]) -> None:
        import onnxruntime_genai as og

        length, new = len(batch[0].prompt), max(one.new for one in batch)
        params = og.GeneratorParams(self.model)
        room = length + new
        params.set_search_options(
            max_length=room, min_length=room, batch_size=len(batch), do_sample=False
        )
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.array([one.prompt for one in batch], np.int32))
        for step in range(new):
            generator.generate_next_token()
            for one, token in zip(batch, generator.get_next_tokens(), strict=True):
                if step < one.new:
                    one.tell(int(token))
                if step == one.new - 1:
                    one.tell(None)


class Application:
    """GET /health and POST /v1/completions."""

    def __init__(self, batches: Batches):
        self.batches = batches

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != "/v1/completions":
            await begin(send, b"application/json")
            await send({"type": "http.response.body", "body": b'{"status": "ok"}'})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        asked = json.loads(body)
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue[int | None]()

        def tell(token: int | None) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, token)

        self.batches.submit(Asked(asked["prompt"], asked["max_tokens"], tell))
        await begin(send, b"text/event-stream")
        stream = self.batches.tokenizer.create_stream()
        while (token := await tokens.get()) is not None:
            await event(send, {"choices": [{"index": 0, "text": stream.decode(token)}]})
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        await event(send, {"choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def begin(send: Any, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})


async def event(send: Any, chunk: dict[str, Any]) -> None:
    body = f"data: {json.dumps(chunk)}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    import uvicorn

    application = Application(Batches(given.model, given.threads, given.rows))
    uvicorn.run(application, port=given.port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
