"""Server-sent events: sent as they come, until the client goes away or the time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from accel.ir.errors import AccelError
from accel.serve.errors import ApiError, of_exception
from accel.serve.renderer import Frame, Renderer

T = TypeVar("T")
LAST_WORDS = 5.0  # seconds that a reader has for the error that ends its stream
SILENCE = 10.0  # seconds after which a stream tells that it goes on


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
    """A response of frames. An error on the way is told as the renderer tells it, and nothing follows."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[Frame],
        renderer: Renderer,
        seconds: float,
        on_end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`seconds`: the most that it may take; `on_end`: called in any case."""
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**own, **(headers or {})})
        del self.headers["content-length"]
        self._frames, self._renderer = frames, renderer
        self._seconds, self._on_end = seconds, on_end
        self._sent = 0.0  # when the last bytes went, of the loop's clock

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
        beat = asyncio.create_task(self._beat(send))
        try:
            async with asyncio.timeout(self._seconds):
                async for frame in self._frames:
                    await self._put(send, frame.bytes)
                    await asyncio.sleep(0)  # others get in, and the watch for the client
                beat.cancel()
                await send(_END)
                return
        except TimeoutError:
            error: ApiError = too_long(self._seconds)
        except AccelError as raised:
            error = of_exception(raised)
        except ApiError as raised:
            error = raised
        except Exception as raised:
            beat.cancel()
            await self._fail(send, of_exception(raised))
            raise
        finally:
            beat.cancel()
        await self._fail(send, error)

    async def _put(self, send: Send, data: bytes) -> None:
        self._sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _beat(self, send: Send) -> None:
        """Tell who reads, and what is between, that the stream goes on."""
        loop = asyncio.get_running_loop()
        self._sent = self._sent or loop.time()
        while True:
            await asyncio.sleep(max(self._sent + SILENCE - loop.time(), 0.01))
            if loop.time() >= self._sent + SILENCE:
                await self._put(send, self._renderer.beat)

    async def _fail(self, send: Send, error: ApiError) -> None:
        """Tell a reader that may have stopped reading."""

        async def last_words() -> None:
            for frame in self._renderer.failed(error):
                await self._put(send, frame.bytes)
            await send(_END)

        try:
            await asyncio.wait_for(last_words(), LAST_WORDS)
        except TimeoutError:
            pass


_END = {"type": "http.response.body", "body": b""}


def too_long(seconds: float) -> ApiError:
    """The time of a request is over."""
    return ApiError(
        504,
        f"the request took more than {seconds:g} s; ask for fewer tokens, or serve with a larger --timeout",
        code="timeout",
    )
