"""OpenAI's responses. Nothing is stored."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from accel.serve import responses_request
from accel.serve.responses_reply import ResponseReply
from accel.serve.responses_request import ResponsesRequest
from accel.serve.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    """POST /v1/responses."""

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        return await serving.generated(
            request, ResponsesRequest, responses_request.read, ResponseReply
        )
