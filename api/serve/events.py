"""The events of tickets, which come from an engine's thread, in the server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

from accel.runtime.serve.engine import Event, Ticket
from accel.serve.errors import ApiError

CANCELLED = ApiError(503, "the server is shutting down; try again later", code="shutting_down")


class Events:
    """The events of several tickets, as they come: (which ticket, event). A thread for each ticket reads it, so no
    reader holds up the engine: what is not read yet waits here, at most a context's length of it.
    """

    def __init__(self, tickets: Sequence[Ticket]):
        """To be made in the event loop."""
        self._tickets = tickets
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[tuple[int, Event | BaseException]]()
        for i in range(len(tickets)):
            Thread(target=self._read, args=(i,), name="accel-ticket", daemon=True).start()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Until all tickets have ended. Raises what made one fail, or ApiError where the server ends first."""
        left = len(self._tickets)
        while left:
            i, event = await self._queue.get()
            if isinstance(event, BaseException):
                raise event
            if event.finish == "cancelled":
                raise CANCELLED
            left -= event.finish is not None
            yield i, event

    def cancel(self) -> None:
        """Nobody reads any more."""
        for ticket in self._tickets:
            ticket.cancel()

    def end(self) -> None:
        """The server ends: whoever reads is told so, whatever the engine does. Of the event loop."""
        self._queue.put_nowait((0, CANCELLED))

    def _read(self, i: int) -> None:
        try:
            for event in self._tickets[i]:
                self._put(i, event)
        except Exception as error:
            self._put(i, error)

    def _put(self, i: int, event: Event | BaseException) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (i, event))
        except RuntimeError:  # the loop has ended, and its readers with it
            pass


class Live:
    """The requests that are being answered. All methods are of the event loop."""

    def __init__(self) -> None:
        self._events = set[Events]()
        self._waits = set[asyncio.Timeout]()
        self.ended = False
        """Whether the server ended them."""

    def add(self, events: Events) -> None:
        """One more."""
        self._events.add(events)
        if self.ended:
            events.end()

    def remove(self, events: Events) -> None:
        """Its answer is over; its tickets are cancelled."""
        self._events.discard(events)
        events.cancel()

    def end(self) -> None:
        """The server ends: nothing more is answered."""
        self.ended = True
        for events in self._events:
            events.end()
        for limit in self._waits:
            limit.reschedule(0)

    @contextmanager
    def waiting(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Around a wait for the rest of a request: its time is over where the server ends."""
        self._waits.add(limit)
        if self.ended:
            limit.reschedule(0)
        try:
            yield
        finally:
            self._waits.discard(limit)
