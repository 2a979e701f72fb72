"""Whether the server lives, and what it counted."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from accel.serve.metrics import TYPE
from accel.serve.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    """GET /health and /metrics."""

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(await run_in_threadpool(lambda: serving.metrics.text), media_type=TYPE)
