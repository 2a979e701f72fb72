"""Anthropic's messages."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from accel.serve import messages_request
from accel.serve.messages_reply import MessageReply
from accel.serve.messages_request import CountRequest, MessagesRequest
from accel.serve.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    """POST /v1/messages and /v1/messages/count_tokens."""

    def counted(asked: CountRequest) -> dict[str, Any]:
        served, _ = serving.models.find(asked.model)
        return {"input_tokens": messages_request.count(asked, served)}

    @app.post("/v1/messages")
    async def message(request: Request) -> Response:
        return await serving.generated(
            request, MessagesRequest, messages_request.read, MessageReply
        )

    @app.post("/v1/messages/count_tokens")
    async def count(request: Request) -> Response:
        return await serving.at_once(request, CountRequest, counted)
