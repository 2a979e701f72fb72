"""What a request must pass before anything reads it: its headers, its host, the API key, the limits of its body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accel.ir.errors import shown
from accel.serve.errors import ApiError
from accel.serve.events import CANCELLED, Live

BODY_SECONDS = 30.0  # in which a body must have come
HEAD_BYTES = 1 << 16  # of the first line and the headers of a request
HEAD_LINES = 100
ANY_HOST = "*"
OPEN = frozenset(["/", "/health", "/metrics"])  # paths that no key is asked for


def too_large() -> ApiError:
    """The error of a head that is too large."""
    return ApiError(
        431,
        f"the headers are more than {HEAD_LINES}, or {HEAD_BYTES:,} bytes; send fewer",
        code="headers_too_large",
    )


def _check_head(scope: Scope) -> None:
    """Raise ApiError for the head of a request that came whole, and is too large."""
    headers = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in headers)
    if len(headers) > HEAD_LINES or size > HEAD_BYTES:
        raise too_large()


class HeadGate:
    """Takes a head of a request that is not too large; the connection holds up one that has not come whole."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                _check_head(scope)
            except ApiError as error:
                return await error.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)


class HostGate:
    """Asks for a `Host` that is an address, localhost or one that is allowed. A page of another name, which its owner
    points at this machine's address, would reach the server as its own: its browser sends that name.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]):
        self._app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if wrong := [host for host in hosts if not self._allows(host)]:
                error = ApiError(
                    403,
                    f"the Host {shown(wrong[0])} is not one of this server's; use its address or localhost, or serve "
                    "with --allowed-host NAME",
                    code="host_not_allowed",
                )
                return await error.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        name = re.sub(r":[0-9]*$", "", host).lower().rstrip(".")
        if name in self._allowed or ANY_HOST in self._allowed:
            return True
        if name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


class KeyGate:
    """Asks for `Authorization: Bearer KEY`, or `x-api-key: KEY`, but for the page, and what tells that all is well."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._key = app, key.strip().encode()  # of a header no space at its ends comes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            headers = dict(scope["headers"])
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            keys = [given.strip()] if kind.lower() == b"bearer" else []
            keys += [headers[b"x-api-key"].strip()] if b"x-api-key" in headers else []
            if not any([hmac.compare_digest(one, self._key) for one in keys]):
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await error.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)


class BodyGate:
    """Takes a body whole, of at most so many bytes. What is larger is read and dropped, so that its sender gets to
    read the answer.
    """

    def __init__(self, app: ASGIApp, most: int, live: Live):
        """`live`: ends the wait for a body, too."""
        self._app, self._most, self._live = app, most, live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            async with asyncio.timeout(BODY_SECONDS) as limit:
                with self._live.waiting(limit):
                    body = await self._read(receive)
        except TimeoutError:
            late = ApiError(408, f"the body did not come within {BODY_SECONDS:g} s")
            late.headers["Connection"] = "close"
            error = CANCELLED if self._live.ended else late
            return await error.response(scope["path"])(scope, receive, send)
        except ApiError as error:
            return await error.response(scope["path"])(scope, receive, send)
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
