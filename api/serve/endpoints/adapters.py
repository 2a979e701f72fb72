"""vLLM's way to add LoRA adapters to a model that runs, and to take them away."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from accel.serve.adapters import allowed
from accel.serve.body import Parsed
from accel.serve.errors import ApiError
from accel.serve.schemas import Adapter, AdapterFolder
from accel.serve.serving import Serving

A = TypeVar("A", bound=Adapter)


def add(app: FastAPI, serving: Serving) -> None:
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

    async def read(request: Request, schema: type[A]) -> Parsed[A]:
        if not serving.adapters:
            told = "adapters are read for clients only where the server has an --api-key and --adapters DIR"
            raise ApiError(403, told, code="adapters_not_allowed")
        sent, media_type = await request.body(), request.headers.get("content-type", "")
        return await run_in_threadpool(serving.parsed, sent, media_type, schema)

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        body = await read(request, AdapterFolder)
        asked = body.asked
        path = await run_in_threadpool(allowed, asked.lora_path, serving.adapters)
        served, _ = await serving.model(request, asked.model)

        def taken() -> dict[str, Any]:
            serving.models.add_adapter(served.name, asked.lora_name, path)
            place, _ = serving.models.place(name := f"{served.name}:{asked.lora_name}")
            return place.entry(name)

        return JSONResponse(await run_in_threadpool(taken), headers=body.headers)

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        body = await read(request, Adapter)
        asked = body.asked

        def taken() -> dict[str, Any]:
            place, _ = serving.models.place(asked.model)
            serving.models.remove_adapter(place.name, asked.lora_name)
            return {"id": f"{place.name}:{asked.lora_name}", "object": "model", "deleted": True}

        return JSONResponse(await run_in_threadpool(taken), headers=body.headers)
