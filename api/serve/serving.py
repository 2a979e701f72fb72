"""What the endpoints share: the models, the limits, and how a request is read and answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from accel.runtime.serve.engine import Ticket
from accel.runtime.serve.reply.machine import Machine
from accel.serve import requests
from accel.serve.body import Parsed, parsed
from accel.serve.events import CANCELLED, Events, Live
from accel.serve.extras import Extras
from accel.serve.limits import Limits
from accel.serve.loading import Models
from accel.serve.metrics import Clock, Metrics
from accel.serve.models import Served
from accel.serve.replies import Choice, Reply
from accel.serve.requests import Asked
from accel.serve.schemas import Generation, Schema
from accel.serve.stream import EventStream, too_long, while_there

S = TypeVar("S", bound=Schema)
HELD = "accel.held"  # of a request's scope: what it holds until its answer is over


class Holding:
    """Lets go of what a request held, in any case."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as scope[HELD]:
            await self._app(scope, receive, send)


@dataclass(frozen=True)
class Serving:
    """Of one server. `adapters`: folders of those that clients may have read."""

    models: Models
    metrics: Metrics
    limits: Limits
    adapters: Sequence[Path] = ()
    live: Live = field(default_factory=Live)

    def parsed(self, body: bytes, media_type: str, schema: type[S]) -> Parsed[S]:
        """A request's body. Takes time that grows with it: not of the event loop. Raises ApiError."""
        return parsed(body, media_type, schema, self.limits.values, strict=self.limits.strict)

    async def model(self, request: Request, name: str | None) -> tuple[Served, str | None]:
        """A model and an adapter by their id, loaded; they stay so until the answer is over. Raises ApiError, Full,
        Gone.
        """
        held: ExitStack = request.scope[HELD]
        try:
            async with asyncio.timeout(self.limits.seconds) as limit:
                with self.live.waiting(limit):
                    return await while_there(self.models.use(name, held), request.receive)
        except TimeoutError:
            raise CANCELLED if self.live.ended else too_long(self.limits.seconds) from None

    async def at_once(
        self, request: Request, schema: type[S], answer: Callable[[S], dict[str, Any]]
    ) -> Response:
        """What `answer` returns, which runs in a thread of its own, with the request's model loaded: `models.find`
        gives it. Raises ApiError.
        """
        sent, media_type = await request.body(), request.headers.get("content-type", "")
        body = await run_in_threadpool(self.parsed, sent, media_type, schema)
        await self.model(request, getattr(body.asked, "model", None))
        return JSONResponse(await run_in_threadpool(answer, body.asked), headers=body.headers)

    async def generated(
        self,
        request: Request,
        schema: type[Generation],
        read: Callable[..., Asked],
        kind: type[Reply],
    ) -> Response:
        """Texts, whole or streamed; `read`: the request's options -> what is asked of an engine. Raises ApiError."""
        began = time.perf_counter()
        sent, media_type = await request.body(), request.headers.get("content-type", "")

        def understood() -> tuple[Parsed[Any], Clock]:  # what grows with the body
            body = self.parsed(sent, media_type, schema)
            return body, self.metrics.clock(self.models.place(body.asked.model)[0].name)

        body, clock = await run_in_threadpool(understood)
        asked = body.asked
        served, adapter = await self.model(request, asked.model)

        def taken() -> tuple[Asked, list[Ticket]]:  # this does, too
            found = read(asked, served, adapter)
            return found, found.submit()

        found, tickets = await run_in_threadpool(taken)
        assert served.model.tokenizer is not None, "the command refuses models without"
        wants_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        reply = kind(
            asked.model or served.name,
            served.model.tokenizer,
            top=requests.top(asked),
            usage=wants_usage,
        )
        choices = [Choice(Machine(found.reading)) for _ in tickets]
        extras = Extras(found, tickets, began)
        made = _Made(Events(tickets), tickets, choices, len(found.prompts), reply, clock, extras)
        self.live.add(made.events)
        if asked.stream:
            chunks, on_end = made.chunks(wants_usage), partial(self.live.remove, made.events)
            return EventStream(chunks, self.limits.seconds, on_end, body.headers)
        try:
            async with asyncio.timeout(self.limits.seconds):
                whole = await while_there(made.whole(), request.receive)
                return JSONResponse(whole, headers=body.headers)
        except TimeoutError:
            raise too_long(self.limits.seconds) from None
        finally:
            self.live.remove(made.events)


@dataclass(frozen=True)
class _Made:
    """The replies to a request, whole or as they come."""

    events: Events
    tickets: list[Ticket]
    choices: list[Choice]
    prompts: int
    reply: Reply
    clock: Clock
    extras: Extras

    async def whole(self) -> dict[str, Any]:
        """Once all have ended."""
        async for i, event in self.events:
            self.clock.token()
            self.extras.take(i, event)
            self.choices[i].take(event, self.tickets[i].usage)
        self.clock.end()
        return self.extras.whole(self.reply.whole(self.choices, self.tickets, self.prompts))

    async def chunks(self, usage: bool) -> AsyncIterator[dict[str, Any]]:
        """As they come; `usage`: with a chunk for it at the end."""
        for i in range(len(self.choices)):
            if (first := self.reply.first(i)) is not None:
                yield self.extras.chunk(first)
        async for i, event in self.events:
            self.clock.token()
            self.extras.take(i, event)
            parts, scores = self.choices[i].take(event, self.tickets[i].usage)
            for piece in self.reply.pieces(i, parts, scores):
                yield self.extras.chunk(piece)
        self.clock.end()
        if usage:
            yield self.extras.chunk(self.reply.total(self.tickets, self.prompts))
