"""What the endpoints share: the models, the limits, and how a request is read and answered."""

from __future__ import annotations

import asyncio
import json
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
from accel.serve.body import Parsed, parsed
from accel.serve.events import CANCELLED, Events, Live
from accel.serve.limits import Limits
from accel.serve.loading import Models
from accel.serve.metrics import Clock, Metrics
from accel.serve.models import Served
from accel.serve.renderer import Frame, Renderer
from accel.serve.requests import Asked
from accel.serve.schemas import ForReply, Schema
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


class Whole(JSONResponse):
    """An answer at once. It may repeat a lone surrogate of the request, which UTF-8 lacks and JSON escapes."""

    def render(self, content: Any) -> bytes:
        """JSON, in UTF-8."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


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
        return Whole(await run_in_threadpool(answer, body.asked), headers=body.headers)

    async def generated(
        self,
        request: Request,
        schema: type[ForReply],
        read: Callable[..., Asked],
        kind: Callable[[Any, Asked, Sequence[Ticket], float], Renderer],
    ) -> Response:
        """Texts, whole or streamed. `read`: the client's request, a model and an adapter -> what is asked of an engine;
        `kind`: how it is answered, of the client's request, that, the tickets, and when it came. Raises ApiError.
        """
        began = time.perf_counter()
        sent, media_type = await request.body(), request.headers.get("content-type", "")

        def understood() -> tuple[Parsed[Any], Clock]:  # what grows with the body
            body = self.parsed(sent, media_type, schema)
            return body, self.metrics.clock(self.models.place(body.asked.model)[0].name)

        body, clock = await run_in_threadpool(understood)
        served, adapter = await self.model(request, body.asked.model)

        def taken() -> tuple[Parsed[Any], list[Ticket], Renderer]:  # this does, too
            found = read(body.asked, served, adapter)
            ignoring = body.ignoring(found.ignored, self.limits.strict)
            tickets = found.submit()
            try:
                return ignoring, tickets, kind(body.asked, found, tickets, began)
            except BaseException:
                for ticket in tickets:
                    ticket.cancel()
                raise

        body, tickets, renderer = await run_in_threadpool(taken)
        made = _Made(Events(tickets), renderer, clock)
        self.live.add(made.events)
        on_end = partial(self.live.remove, made.events)
        if body.asked.stream:
            return EventStream(made.frames(), renderer, self.limits.seconds, on_end, body.headers)
        try:
            async with asyncio.timeout(self.limits.seconds):
                await while_there(made.ended(), request.receive)
            return await run_in_threadpool(lambda: Whole(renderer.whole(), headers=body.headers))
        except TimeoutError:
            raise too_long(self.limits.seconds) from None
        finally:
            on_end()


@dataclass(frozen=True)
class _Made:
    """The answer to a request, whole or as it comes."""

    events: Events
    renderer: Renderer
    clock: Clock

    async def ended(self) -> None:
        """All tickets have."""
        async for i, event in self.events:
            self.clock.token()
            for _ in self.renderer.take(i, event):
                pass
        self.clock.end()

    async def frames(self) -> AsyncIterator[Frame]:
        """As they come."""
        for frame in self.renderer.begin():
            yield frame
        async for i, event in self.events:
            self.clock.token()
            for frame in self.renderer.take(i, event):
                yield frame
        self.clock.end()
        for frame in self.renderer.end():
            yield frame
