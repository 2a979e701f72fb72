"""What is served."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from accel.serve.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    """GET /v1/models and /v1/models/{name}."""

    @app.get("/v1/models")
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": serving.models.entries()}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        place, _ = serving.models.place(name)
        return place.entry(name)
