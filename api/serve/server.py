"""Listening and serving, until a signal; then what runs may end."""

from __future__ import annotations

import errno
import socket

import uvicorn
from fastapi import FastAPI

from accel.ir.errors import InputError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the address; port 0: any that is free. Raises InputError."""
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
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {port} of {host} is in use; give another --port, or end what listens there"
            ) from None
        raise InputError(f"--host {host} --port {port}: {error.strerror}; give others") from None
    return found


def server(app: FastAPI, drain: float) -> uvicorn.Server:
    """Of an application. `run(sockets=[…])` serves until SIGTERM or SIGINT (or `should_exit`), then takes no more
    requests and gives those that it has `drain` seconds to end.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain)),
        lifespan="off",
        ws="none",
    )
    return uvicorn.Server(config)
