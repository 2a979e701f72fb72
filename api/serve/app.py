"""The application: which path does what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from accel.ir.errors import AccelError
from accel.runtime.serve.engine import Ticket
from accel.runtime.serve.reply.machine import Machine
from accel.serve import errors, requests
from accel.serve.body import IGNORED, Parsed, parsed
from accel.serve.errors import ApiError
from accel.serve.events import Events, Live
from accel.serve.extras import Extras
from accel.serve.gate import BodyGate, HeadGate, HostGate, KeyGate
from accel.serve.metrics import TYPE, Clock, Metrics, Watched
from accel.serve.models import Models
from accel.serve.replies import ChatReply, Choice, CompletionReply, Reply
from accel.serve.requests import Asked
from accel.serve.schemas import ChatRequest, CompletionRequest, Generation
from accel.serve.stream import EventStream, Gone, too_long, while_there

_PAGE_POLICY = (  # the page fetches nothing from elsewhere
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Limits:
    """`body`: most bytes of a request; `seconds`: the longest that one may take from its submission; `strict`: fields
    that are not known are refused.
    """

    body: int = 4 << 20
    seconds: float = 600.0
    strict: bool = False

    @property
    def values(self) -> int:
        """The most values of a body, each of which takes far more memory than its bytes."""
        return self.body // 16


@dataclass(frozen=True)
class Access:
    """Who may ask. `key`: what clients must show under /v1; None: nothing, and then the `Host` of a request is an
    address, localhost or one of `hosts`. `origins`: of pages elsewhere that a browser lets read the answers.
    """

    key: str | None = None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()


def application(
    models: Models, *, access: Access | None = None, limits: Limits | None = None
) -> FastAPI:
    """The server's application."""
    limits = limits or Limits()
    metrics, live = Metrics(models.served), Live()
    app = FastAPI(title="accel", openapi_url=None)  # its pages of docs would fetch scripts
    app.state.live = live  # for who ends the server

    _to_look_at(app, models, metrics)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answer(request, CompletionRequest, requests.of_completion, CompletionReply)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, ChatRequest, requests.of_chat, ChatReply)

    async def answer(
        request: Request, schema: type[Generation], read: Callable[..., Asked], kind: type[Reply]
    ) -> Response:
        began = time.perf_counter()
        sent, media_type = await request.body(), request.headers.get("content-type", "")

        def taken() -> tuple[Parsed[Any], Clock, Asked, list[Ticket]]:  # what grows with the body
            body = parsed(sent, media_type, schema, limits.values, strict=limits.strict)
            served, adapter = models.find(body.asked.model)
            clock = metrics.clock(served.name)
            found = read(body.asked, served, adapter)
            return body, clock, found, found.submit()

        body, clock, found, tickets = await run_in_threadpool(taken)
        asked, served = body.asked, found.served
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
        live.add(made.events)
        if asked.stream:
            chunks, on_end = made.chunks(wants_usage), partial(live.remove, made.events)
            return EventStream(chunks, limits.seconds, on_end, body.headers)
        try:
            async with asyncio.timeout(limits.seconds):
                whole = await while_there(made.whole(), request.receive)
                return JSONResponse(whole, headers=body.headers)
        except TimeoutError:
            raise too_long(limits.seconds) from None
        except Gone:
            return Response(status_code=499)  # nobody reads it
        finally:
            live.remove(made.events)

    _guard(app, metrics, access or Access(), limits)
    return app


def _to_look_at(app: FastAPI, models: Models, metrics: Metrics) -> None:
    """The page, the server's health and figures, and what it serves."""
    page = files("accel.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def root() -> Response:
        told = {"Content-Security-Policy": _PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(page, headers=told)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(await run_in_threadpool(lambda: metrics.text), media_type=TYPE)

    @app.get("/v1/models")
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": models.entries()}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        served, _ = models.find(name)
        return served.entry(name)


def _guard(app: FastAPI, metrics: Metrics, access: Access, limits: Limits) -> None:
    """Let errors be answers, and requests pass the gates."""
    for kind, handler in (
        (ApiError, errors.on_exception),
        (AccelError, errors.on_exception),
        (HTTPException, errors.on_http_exception),
        (Exception, errors.on_exception),
    ):
        app.add_exception_handler(kind, handler)
    app.add_middleware(BodyGate, most=limits.body, live=app.state.live)
    if access.key is not None:
        app.add_middleware(KeyGate, key=access.key)
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key"],
            expose_headers=["Retry-After", IGNORED],
        )
    if access.key is None:
        app.add_middleware(HostGate, allowed=access.hosts)
    app.add_middleware(HeadGate)
    routes = [route for route in app.routes if isinstance(route, Route)]
    app.add_middleware(Watched, metrics=metrics, routes=routes)


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
