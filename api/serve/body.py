"""A body's bytes -> the request that it asks for. It runs beside the event loop: what it costs grows with the body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from accel.ir.errors import shown, unknown
from accel.serve.errors import ApiError, unsupported
from accel.serve.schemas import REFUSED

MOST_VALUES = 1 << 18  # of a body
IGNORED = "X-Accel-Ignored"
_MOST_NAMED, _LONGEST = 16, 40  # fields of that header, characters of each
# also one without an end, or each of its quotes would be tried as a beginning
_STRING = re.compile(rb'"(?:[^"\\]+|\\.?)*+(?:"|\Z)', re.DOTALL)
T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """A request, and what of its body nothing comes of: fields that nothing knows, say."""

    asked: T
    unknown: Sequence[str]

    @property
    def headers(self) -> dict[str, str]:
        """What the client is told of them."""
        if not self.unknown:
            return {}
        named = [re.sub(r"[^\w.-]", "?", name[:_LONGEST], flags=re.ASCII) for name in self.unknown]
        return {IGNORED: ", ".join(named)}

    def ignoring(self, ignored: Sequence[str], strict: bool) -> Parsed[T]:
        """More of it, in a reader's words. Raises ApiError where `strict`."""
        if strict and ignored:
            told = f"{shown(ignored[0])} is not supported; leave it out, or serve without --strict"
            raise ApiError(
                400, told, param=ignored[0].partition(".")[0], code="unsupported_parameter"
            )
        return replace(self, unknown=[*self.unknown, *ignored][:_MOST_NAMED])


def parsed(
    body: bytes, media_type: str, kind: type[T], most: int = MOST_VALUES, *, strict: bool = False
) -> Parsed[T]:
    """The request, of at most so many values; `strict`: of fields that are known. Raises ApiError with the first thing
    that is wrong.
    """
    if not re.match(r"(?i)\s*application/(\S+\+)?json\s*(;|$)", media_type):
        raise _unread("its Content-Type is not application/json; send a JSON object")
    found = _json(body, most)
    if not isinstance(found, dict):
        raise _unread("it is no JSON object; send a JSON object")
    try:
        asked = kind.model_validate(found)
    except ValidationError as error:
        raise _invalid(error, found) from None
    for name, field in kind.model_fields.items():
        if REFUSED in field.metadata and getattr(asked, name):
            raise unsupported(name)
    strange = list(islice(_unknown(asked), _MOST_NAMED))
    if strict and strange:
        told = f"{unknown('field', strange[0], kind.model_fields)}; leave it out, or serve without --strict"
        raise ApiError(400, told, param=strange[0].partition(".")[0], code="unsupported_parameter")
    return Parsed(asked, strange)


def _unknown(model: BaseModel, of: str = "") -> Iterator[str]:
    """The paths of fields that no class names."""
    yield from (of + name for name in model.model_extra or ())
    for name, field in type(model).model_fields.items():
        if isinstance(value := getattr(model, name), BaseModel):
            yield from _unknown(value, f"{of}{field.alias or name}.")


def _json(body: bytes, most: int) -> Any:
    """The reader lets no other thread run until it is done, so the values are counted before."""
    if not body.strip():
        raise _unread("it is no JSON object; send a JSON object")
    if body.count(b",") > most and _STRING.sub(b"", body).count(b",") > most:
        raise ApiError(
            413,
            f"the body has more than {most:,} values; send several requests, or serve with a larger --max-body",
            code="body_too_large",
        )
    try:
        return json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"the body is not UTF-8 (byte {error.start}); send JSON in UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ApiError(
            400, f"the body is not JSON: {error.msg}, at character {error.pos}"
        ) from None
    except RecursionError:
        raise ApiError(
            400, "the body is nested too deeply; send the request's JSON object"
        ) from None
    except ValueError:
        raise _unread("a number has more than 4,300 digits; give a smaller one") from None


def _unread(why: str) -> ApiError:
    return ApiError(400, f"the body cannot be read: {why}")


def _invalid(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """What is wrong with the field of the first error; the others may be of other types that it might have."""
    errors = error.errors(include_url=False, include_context=True, include_input=False)
    place = errors[0]["loc"]
    param = str(place[0])
    if errors[0]["type"] == "missing":
        return ApiError(400, f"{_where(place, body)} is missing; give it", param=param)
    said = {_words(one["type"], one["msg"], one.get("ctx", {})): one["loc"] for one in errors
            if one["loc"][0] == place[0]}  # fmt: skip
    where = _where(max(said.values(), key=len), body) if len(said) == 1 else param
    return ApiError(400, f"{where}: {'; or: '.join(said)}", param=param)


def _where(place: Sequence[str | int], value: Any) -> str:
    """The path of a value, without the names that pydantic puts in for types."""
    path = []
    for i, part in enumerate(place):
        inside = isinstance(value, dict) and part in value
        inside |= isinstance(value, list) and isinstance(part, int)
        if inside:
            value = value[part]
        if inside or i in (0, len(place) - 1) and "[" not in str(part):
            path.append(str(part))
    return shown(".".join(path))[1:-1]


def _words(kind: str, message: str, facts: dict[str, Any]) -> str:
    if kind == "too_long":
        return f"it has more than {facts['max_length']:,} entries"
    return message.replace("Input should", "it must").replace("for input", "here")
