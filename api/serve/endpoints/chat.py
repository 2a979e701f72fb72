"""OpenAI's chat completions: answers to messages."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from accel.serve.choices import Choices
from accel.serve.replies import ChatReply
from accel.serve.requests import of_chat
from accel.serve.schemas import ChatRequest
from accel.serve.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    """POST /v1/chat/completions."""

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await serving.generated(request, ChatRequest, of_chat, partial(Choices, ChatReply))
