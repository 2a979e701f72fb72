"""The page that compares the models."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from accel.serve.serving import Serving

_POLICY = (  # the page fetches nothing from elsewhere
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add(app: FastAPI, serving: Serving) -> None:
    """GET /."""
    page = files("accel.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def root() -> Response:
        told = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(page, headers=told)
