"""One connection: the headers of a request have limits of size, number and time."""

from __future__ import annotations

import asyncio
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from accel.serve.errors import ApiError
from accel.serve.gate import too_large

HEAD_SECONDS = 10.0  # in which they must have come


class Connection(H11Protocol):
    """Of HTTP/1.1. Who does not ask in time is left."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Of what is no HTTP: as the errors of the API."""
        cause = sys.exc_info()[1]
        if getattr(cause, "error_status_hint", 400) == 431:
            self._refuse(too_large())
        else:
            self._refuse(ApiError(400, "this is no HTTP request; send one of HTTP/1.1"))

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error.response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """The time of a head begins with the connection, or with its first byte."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._late is None and self.timeout_keep_alive_task is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def on_response_complete(self) -> None:
        self._stop_watching()
        super().on_response_complete()
