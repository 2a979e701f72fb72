"""Listening and serving, until a signal; then what runs may end."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from accel.ir.errors import InputError
from accel.serve.connection import Connection
from accel.serve.events import Live
from accel.serve.gate import HEAD_BYTES
from accel.serve.stream import LAST_WORDS

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens at the address; port 0: any that is free. Who connects before `server` runs waits. Raises
    InputError.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:  # of a name, a part of which is empty or too long
        raise InputError(
            f"--host {host}: {getattr(error, 'strerror', None) or error}; give an address of this machine"
        ) from None
    found = socket.socket(family, kind, proto)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
        found.listen()  # two that are only bound may share a port
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {port} of {host} is in use; give another --port, or end what listens there"
            ) from None
        raise InputError(f"--host {host} --port {port}: {error.strerror}; give others") from None
    return found


def server(app: FastAPI, drain: float, ready: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """Of an application. `run(sockets=[…])` serves until SIGTERM or SIGINT (or `should_exit`), then takes no more
    requests and gives those that it has `drain` seconds to end; who waits still is answered 503. `ready`: called once
    it takes requests.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain + LAST_WORDS) + 1,  # who does not read it
        lifespan="off",
        ws="none",
        http=Connection,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    return _Server(config, app.state.live, drain, ready)


class _Server(uvicorn.Server):
    """Ends the answers that are not over `drain` seconds after it was told to end."""

    def __init__(self, config: uvicorn.Config, live: Live, drain: float, ready: Callable[[], None]):
        super().__init__(config)
        self._live, self._drain, self._ready = live, drain, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(self._drain, self._live.end)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()
