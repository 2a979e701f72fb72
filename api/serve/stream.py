"""Server-sent events: sent as they come, until the client goes away or the time is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from accel.ir.errors import AccelError
from accel.serve.errors import ApiError, of_exception

T = TypeVar("T")
LAST_WORDS = 5.0  # seconds that a reader has for the error that ends its stream


class Gone(Exception):
    """The client went away."""


async def while_there(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What it returns. Raises Gone, with the work cancelled, where the client goes away first."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of chunks, each a `data:` line of JSON, then `data: [DONE]`. An error on the way is the last chunk."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[Any],
        seconds: float,
        on_end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`seconds`: the most that it may take; `on_end`: called in any case."""
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**own, **(headers or {})})
        del self.headers["content-length"]
        self._chunks, self._seconds, self._on_end = chunks, seconds, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(self._send(send), receive)
        except Gone:
            pass
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in self._chunks:
                    await send(_event(json.dumps(chunk)))
                    await asyncio.sleep(0)  # others get in, and the watch for the client
                await send(_event("[DONE]"))
                await send({"type": "http.response.body", "body": b""})
                return
        except TimeoutError:
            error: ApiError = too_long(self._seconds)
        except AccelError as raised:
            error = of_exception(raised)
        except ApiError as raised:
            error = raised
        except Exception as raised:
            await _end(send, of_exception(raised))
            raise
        await _end(send, error)


def too_long(seconds: float) -> ApiError:
    """The time of a request is over."""
    return ApiError(
        504,
        f"the request took more than {seconds:g} s; ask for fewer tokens, or serve with a larger --timeout",
        code="timeout",
    )


async def _end(send: Send, error: ApiError) -> None:
    """Tell a reader that may have stopped reading."""

    async def send_error() -> None:
        await send(_event(json.dumps(error.body)))
        await send({"type": "http.response.body", "body": b""})

    await _within(send_error())


async def _within(words: Awaitable[None]) -> None:
    try:
        await asyncio.wait_for(words, LAST_WORDS)
    except TimeoutError:
        pass


def _event(text: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}
