"""What a request must pass before anything reads it: the API key, and the limits of its body."""

from __future__ import annotations

import asyncio
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accel.serve.errors import ApiError

BODY_SECONDS = 30.0  # in which a body must have come


class KeyGate:
    """Asks for `Authorization: Bearer KEY` under /v1."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.strip().encode()  # of a header no space at its ends comes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            kind, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await error.response(scope, receive, send)
        await self._app(scope, receive, send)


class BodyGate:
    """Takes a body whole, of at most so many bytes. What is larger is read and dropped, so that its sender gets to
    read the answer.
    """

    def __init__(self, app: ASGIApp, most: int):
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not come within {BODY_SECONDS:g} s")
            error.headers["Connection"] = "close"
            return await error.response(scope, receive, send)
        except ApiError as error:
            return await error.response(scope, receive, send)
        if body is None:
            return
        first = [body]

        async def again() -> Message:
            if first:
                return {"type": "http.request", "body": first.pop(), "more_body": False}
            return await receive()

        await self._app(scope, again, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None where the client went away before it was whole. Raises ApiError."""
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= self._most:
                parts.append(part)
            else:
                parts.clear()
        if size > self._most:
            raise ApiError(
                413,
                f"the body has {size:,} bytes, and {self._most:,} are allowed; shorten the prompt, or serve with a "
                "larger --max-body",
                code="body_too_large",
            )
        return b"".join(parts)
