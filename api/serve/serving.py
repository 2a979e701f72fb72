"""What the endpoints share: the models, the limits, and how a request is read and answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from accel.runtime.serve.engine import Ticket
from accel.serve.body import Parsed, parsed
from accel.serve.events import Events, Live
from accel.serve.limits import Limits
from accel.serve.metrics import Clock, Metrics
from accel.serve.models import Models
from accel.serve.renderer import Frame, Renderer
from accel.serve.requests import Asked
from accel.serve.schemas import ForReply, Schema
from accel.serve.stream import EventStream, Gone, too_long, while_there

S = TypeVar("S", bound=Schema)


class Whole(JSONResponse):
    """An answer at once. It may repeat a lone surrogate of the request, which UTF-8 lacks and JSON escapes."""

    def render(self, content: Any) -> bytes:
        """JSON, in UTF-8."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Serving:
    """Of one server."""

    models: Models
    metrics: Metrics
    limits: Limits
    live: Live = field(default_factory=Live)

    def parsed(self, body: bytes, media_type: str, schema: type[S]) -> Parsed[S]:
        """A request's body. Takes time that grows with it: not of the event loop. Raises ApiError."""
        return parsed(body, media_type, schema, self.limits.values, strict=self.limits.strict)

    async def at_once(
        self, request: Request, schema: type[S], answer: Callable[[S], dict[str, Any]]
    ) -> Response:
        """What `answer` returns, which runs in a thread of its own. Raises ApiError."""
        sent, media_type = await request.body(), request.headers.get("content-type", "")

        def taken() -> tuple[dict[str, Any], dict[str, str]]:
            body = self.parsed(sent, media_type, schema)
            return answer(body.asked), body.headers

        whole, headers = await run_in_threadpool(taken)
        return Whole(whole, headers=headers)

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

        def taken() -> tuple[Parsed[Any], Clock, list[Ticket], Renderer]:  # grows with the body
            body = self.parsed(sent, media_type, schema)
            served, adapter = self.models.find(body.asked.model)
            clock = self.metrics.clock(served.name)
            found = read(body.asked, served, adapter)
            body = body.beside(found.ignored, self.limits.strict)
            tickets = found.submit()
            try:
                return body, clock, tickets, kind(body.asked, found, tickets, began)
            except BaseException:
                for ticket in tickets:
                    ticket.cancel()
                raise

        body, clock, tickets, renderer = await run_in_threadpool(taken)
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
        except Gone:
            return Response(status_code=499)  # nobody reads it
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
