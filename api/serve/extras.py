"""What answers tell beside OpenAI's objects, as vLLM and llama.cpp do: token ids, the prompt, times, a fingerprint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from accel.runtime.serve.engine import Event, Ticket
from accel.serve.replies import Object
from accel.serve.requests import Asked
from accel.serve.schemas import ChatRequest
from accel.serve.scores import of_prompt


class Extras:
    """Of one request. Objects are changed in place, and given back."""

    def __init__(self, request: Asked, tickets: Sequence[Ticket], began: float):
        """`began`: when the request came, of `time.perf_counter`."""
        self._found, self._tickets, self._began = request, tickets, began
        self._ids = bool(request.asked.return_token_ids)
        self._chat = isinstance(request.asked, ChatRequest)
        self._fingerprint = request.served.fingerprint
        self._made: list[list[int]] = [[] for _ in tickets]  # tokens that were not told yet
        self._begun = [False for _ in tickets]  # whether a choice's first chunk was told
        self._first: float | None = None
        self._left = len(tickets)

    def take(self, i: int, event: Event) -> None:
        """An event of choice i came."""
        if event.token >= 0:
            self._made[i].append(event.token)
            self._first = self._first or time.perf_counter()

    def whole(self, reply: Object) -> Object:
        """The answer at once."""
        for i, choice in enumerate(reply["choices"]):
            self._shift(i, choice)
            self._open(i, reply, choice)
            self._tokens(i, choice)
        return {**reply, "system_fingerprint": self._fingerprint, "timings": self._timings()}

    def chunk(self, chunk: Object) -> Object:
        """The next part of it."""
        chunk["system_fingerprint"] = self._fingerprint
        for choice in chunk["choices"]:
            i = choice["index"]
            self._shift(i, choice)
            if not self._begun[i]:
                self._open(i, chunk, choice)
            self._tokens(i, choice)
            if choice["finish_reason"] is not None:
                self._left -= 1
                if not self._left:
                    chunk["timings"] = self._timings()
        return chunk

    def _open(self, i: int, reply: Object, choice: Object) -> None:
        """What stands before the tokens of a choice."""
        self._begun[i] = True
        prompt = i // self._found.samples
        if self._ids:
            ids = self._found.prompts[prompt].tolist()
            (reply if self._chat else choice)["prompt_token_ids"] = ids
        lines, top = self._tickets[i].prompt_logprobs, self._found.asked.prompt_logprobs
        if top is not None and lines is not None:
            (reply if self._chat else choice)["prompt_logprobs"] = of_prompt(lines, top)
        if self._found.echoes:
            self._found.echoes[prompt].open(choice, lines)

    def _shift(self, i: int, choice: Object) -> None:
        if self._found.echoes:
            self._found.echoes[i // self._found.samples].shift(choice)

    def _tokens(self, i: int, choice: Object) -> None:
        if self._ids:
            choice["token_ids"], self._made[i] = self._made[i], []

    def _timings(self) -> dict[str, Any]:
        """llama.cpp's, of all choices together; the prompt's time begins where the request came."""
        usage = [ticket.usage for ticket in self._tickets]
        first, now = self._first or time.perf_counter(), time.perf_counter()
        of_prompt, after = first - self._began, now - first
        reused = sum(one.reused for one in usage[:: self._found.samples])
        prompt = sum(one.prompt_tokens for one in usage[:: self._found.samples]) - reused
        made = sum(one.completion_tokens for one in usage)
        told = {
            "cache_n": reused,
            **_rate("prompt", prompt, of_prompt),
            **_rate("predicted", made, after),
        }
        if drafted := sum(one.drafted for one in usage):
            told |= {"draft_n": drafted, "draft_n_accepted": sum(one.accepted for one in usage)}
        return told


def _rate(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / tokens if tokens else None,
        f"{name}_per_second": tokens / seconds if seconds > 0 else None,
    }
