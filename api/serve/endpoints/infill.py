"""llama.cpp's infill, which editors ask: a text between two others."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from accel.serve.choices import Choices
from accel.serve.replies import CompletionReply
from accel.serve.requests import of_infill
from accel.serve.schemas import InfillRequest
from accel.serve.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    """POST /infill."""

    @app.post("/infill")
    async def infill(request: Request) -> Response:
        kind = partial(Choices, CompletionReply)
        found = await serving.generated(request, InfillRequest, of_infill, kind)
        if not isinstance(found, JSONResponse):
            return found
        headers = {k: v for k, v in found.headers.items() if k.startswith("x-")}
        return JSONResponse(_as_theirs(json.loads(bytes(found.body))), headers=headers)


def _as_theirs(whole: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's object of a completion, with llama.cpp's names."""
    (choice, *_), usage = whole["choices"], whole["usage"]
    return {
        "index": 0,
        "content": choice["text"],
        "model": whole["model"],
        "tokens_predicted": usage["completion_tokens"],
        "tokens_evaluated": usage["prompt_tokens"],
        "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
        "stop": True,
        "stop_type": "limit" if choice["finish_reason"] == "length" else "eos",
        "truncated": False,
        "timings": whole["timings"],
    }
