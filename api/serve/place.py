"""Where one of a server's models stands: loaded or not, who uses it, who waits for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from accel.serve.errors import ApiError
from accel.serve.models import About, Served, Source

WAITING = 64  # most requests that wait for one model


@dataclass(eq=False)
class Place:
    """A model's: what is there. `source`: what is loaded there; None: it is loaded from the start, and stays. `added`:
    adapters that clients brought, and their folders; `users`: requests that use it, by adapter; `last`: when one came
    or went; `waits`: those of requests for which it is loaded; `leaving`: it makes room for others, and takes no more
    requests before it has.
    """

    name: str
    source: Source | None
    served: Served | None = None
    added: dict[str, Path] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    users: Counter[str | None] = field(default_factory=Counter)
    last: float = field(default_factory=monotonic)
    waits: list[tuple[Future[Served], str | None]] = field(default_factory=list)
    leaving: bool = False
    totals: dict[str, float] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def about(self) -> About:
        if (served := self.served) is not None:
            return served.about
        assert self.source is not None, "it is loaded, or has a source"
        return self.source.about

    @property
    def names(self) -> dict[str, str | None]:
        """The ids that requests name it by -> the adapter that they choose so."""
        served = self.served
        known = self.about.adapters if served is None else served.model.adapters
        return {self.name: None, **{f"{self.name}:{one}": one for one in [*known, *self.added]}}

    def owns(self, adapter: str) -> bool:
        """Whether it has an adapter that no client brought."""
        return f"{self.name}:{adapter}" in self.names and adapter not in self.added

    @property
    def most_waits(self) -> int:
        """Requests that may wait for it."""
        most = None if self.source is None else self.source.options.get("max_waiting")
        return most or WAITING

    @property
    def bytes(self) -> int:
        """Of memory that it is counted with."""
        return 0 if self.source is None or self.served is None else self.source.bytes

    def entry(self, name: str) -> dict[str, Any]:
        """One of its ids, as GET /v1/models lists it: OpenAI's fields, and what the page shows."""
        served = self.served
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "accel",
            "parent": None if name == self.name else self.name,
            "loaded": served is not None,
            **self.about.entry,
            "sharing": None if served is None else served.engine.how,
        }

    def asked_for(self) -> bool:
        """Whether a request waits for it."""
        self.waits = [one for one in self.waits if not one[0].cancelled()]
        return bool(self.waits)

    def give(self) -> None:
        """Who waits for it uses it."""
        assert self.served is not None, "it is loaded"
        waits, self.waits = self.waits, []
        for wait, adapter in waits:
            if wait.set_running_or_notify_cancel():
                self.users[adapter] += 1
                self.last = monotonic()
                wait.set_result(self.served)

    def refuse(self, error: ApiError) -> None:
        """Tell those who wait."""
        waits, self.waits = self.waits, []
        for wait, _ in waits:
            if wait.set_running_or_notify_cancel():
                wait.set_exception(error)

    def stats(self) -> Mapping[str, float]:
        """Of its engine, since the start of the server; `loaded`, 0 or 1."""
        served, before = self.served, dict(self.totals)
        now = {} if served is None else served.engine.stats
        found = {name: value + before.pop(name, 0) for name, value in now.items()}
        return {**found, **before, "loaded": float(served is not None)}

    def count(self, name: str, more: float = 1) -> None:
        """Add to a figure of `stats`."""
        self.totals[name] = self.totals.get(name, 0) + more
