"""Errors of the API: OpenAI's JSON object, {"error": {"message", "type", "param", "code"}}, and on Anthropic's path its
own, {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from accel.ir.errors import AccelError, ExtraError, InputError
from accel.runtime.serve.engine import Full

RETRY_SECONDS = 1  # what a client is told to wait where the queue is full
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = "/v1/messages"  # the path of its API, and of what is under it
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LONGEST = 2000  # characters of a message: it may name what was given


class ApiError(Exception):
    """What a client is answered in place of a reply. `param`: the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self._told,
            "type": _TYPES.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Anthropic's. It has no code: clients know a prompt that is too long by the first words."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        long = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        error = {"type": _ANTHROPIC_TYPES.get(self.status, kind), "message": long + self._told}
        return {"type": "error", "error": error}

    @property
    def _told(self) -> str:
        return self.message if len(self.message) <= _LONGEST else f"{self.message[:_LONGEST]}..."

    def in_words(self, words: Mapping[str, str]) -> ApiError:
        """It with another API's names: of a field or of an entry of it ("tools[0]"), as `param` and at the beginning of
        the message; of parts of a field (".part") and values ('"value"') anywhere in it.
        """
        message = self.message
        first = re.match(r"(\w+)(\[\d+\])?", message)
        for own in (first[0], first[1]) if first else ():
            if own in words:
                message = words[own] + message.removeprefix(own)
                break
        for own, theirs in words.items():
            if own[0] in '".':
                message = message.replace(own, theirs)
        param = None if self.param is None else words.get(self.param, self.param)
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)

    def response(self, path: str = "") -> Response:
        """It as the answer to a request of a path."""
        theirs = path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")
        # in ASCII: a message may quote a lone surrogate, which UTF-8 lacks
        body = json.dumps(self.anthropic if theirs else self.body)
        return Response(body, self.status, self.headers, media_type="application/json")


def unsupported(name: str) -> ApiError:
    """A field of a request that asks for what this server does not do."""
    told = f"{name} is not supported; leave it out"
    return ApiError(400, told, param=name, code="unsupported_parameter")


def of_exception(error: BaseException, fields: Collection[str] = ()) -> ApiError:
    """What a client is told of an exception; `fields`: of its request, of which a message may begin with one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Full):
        told = {"Retry-After": str(RETRY_SECONDS)}
        return ApiError(429, str(error), code="queue_full", headers=told)
    if isinstance(error, ExtraError):
        return ApiError(501, str(error))
    if isinstance(error, InputError):
        named = re.match(r"\w+", text := str(error))
        return ApiError(400, text, param=named[0] if named and named[0] in fields else None)
    if isinstance(error, AccelError):
        return ApiError(500, str(error))
    return ApiError(500, "the server failed; its log says more")


@contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """Errors of a request that stands for one of another API, in that one's words."""
    try:
        yield
    except (ApiError, AccelError) as error:
        raise of_exception(error, words).in_words(words) from error


async def on_exception(request: Request, error: Exception) -> Response:
    """Of any kind that has no handler of its own."""
    return of_exception(error).response(request.url.path)


async def on_gone(_: Request, __: Exception) -> Response:
    """The client went away: nobody reads it."""
    return Response(status_code=499)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Of the framework: an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = "there is nothing at this path; the API is under /v1 (GET /v1/models)"
    else:
        message = str(error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)
