"""How a request is answered in a client's form, whole or as events of a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.runtime.serve.engine import Event
from accel.serve.errors import ApiError

Object = dict[str, Any]


@dataclass(frozen=True)
class Frame:
    """One server-sent event. `data`: an object, or the text that is sent; `name`: its type, where events have one."""

    data: Object | str
    name: str | None = None

    @property
    def bytes(self) -> bytes:
        """It as it is sent."""
        head = "" if self.name is None else f"event: {self.name}\n"
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return f"{head}data: {data}\n\n".encode()


class Renderer(ABC):
    """Of one request, whose tickets' events it takes in the order in which they come. `beat`: what is sent in a stream
    that would be silent for long.
    """

    beat: ClassVar[bytes] = b":\n\n"  # a comment

    @abstractmethod
    def begin(self) -> Iterable[Frame]:
        """What stands before all else in a stream."""

    @abstractmethod
    def take(self, i: int, event: Event) -> Iterable[Frame]:
        """An event of ticket i came: what it adds to a stream. It counts for `whole` once all of this is read."""

    @abstractmethod
    def end(self) -> Iterable[Frame]:
        """What ends a stream whose tickets have ended."""

    @abstractmethod
    def failed(self, error: ApiError) -> Iterable[Frame]:
        """What ends a stream that fails."""

    @abstractmethod
    def whole(self) -> Object:
        """The answer at once; all tickets have ended."""
