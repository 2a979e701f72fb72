"""OpenAI's completions: texts that go on."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from accel.serve.choices import Choices
from accel.serve.replies import CompletionReply
from accel.serve.requests import of_completion
from accel.serve.schemas import CompletionRequest
from accel.serve.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    """POST /v1/completions."""

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await serving.generated(
            request, CompletionRequest, of_completion, partial(Choices, CompletionReply)
        )
