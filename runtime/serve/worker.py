"""A process of an engine of several: an engine of its own, told over its standard input what to run.

Run as a module by `phases.py`, never by hand.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from accel.ir.errors import InputError
from accel.runtime.model.load import load
from accel.runtime.serve.engine import Engine
from accel.runtime.serve.request import Event, Handed, Ticket
from accel.runtime.serve.wire import (
    Wire,
    error_to_json,
    event_to_json,
    request_from_json,
)


def main(options: dict[str, Any]) -> None:
    """Serve until the standard input ends. `options`: of `load` and of `Engine`."""
    writes = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes elsewhere
    wire = Wire(os.fdopen(os.dup(0), "rb"), writes)
    try:
        with load(**options["load"]) as model:
            blocks = options["blocks"]
            engine = Engine(
                model, max_batch=options["max_batch"], max_waiting=1 << 30, blocks=blocks
            )
            try:
                if options["moves"] and (why := engine.stays):
                    raise InputError(
                        f"requests cannot go from process to process: {why}; serve with the schedule "
                        "continuous-batching"
                    )
                wire.send({"do": "ready"})
                _serve(wire, engine)
            finally:
                engine.close(drain=False)
    except Exception as error:
        wire.send({"do": "failed", **error_to_json(error)})


def _serve(wire: Wire, engine: Engine) -> None:
    tickets: dict[int, Ticket] = {}
    while True:
        try:
            message, data = wire.receive()
        except EOFError:
            return
        number = message["id"]
        if message["do"] == "stats":
            wire.send({"do": "stats", "id": number, "stats": dict(engine.stats)})
        elif message["do"] == "cancel":
            if number in tickets:
                tickets[number].cancel()
        else:
            _submit(wire, engine, tickets, message, data)


def _submit(
    wire: Wire, engine: Engine, tickets: dict[int, Ticket], message: dict[str, Any], data: bytes
) -> None:
    number = message["id"]

    def listen(ticket: Ticket, event: Event | Handed | BaseException) -> None:
        over = True
        try:
            if isinstance(event, Handed):
                numbers = {"numbers": event.numbers}
                wire.send({"do": "handed", "id": number, **numbers}, event.state)
            elif isinstance(event, Event):
                over = event.finish is not None
                wire.send({"do": "event", "id": number, **event_to_json(event, ticket)})
            else:
                wire.send({"do": "error", "id": number, **error_to_json(event)})
        except OSError:  # nobody listens any more; the standard input has ended, too
            ticket.cancelled = True
        if over:
            ended.append(number)
            tickets.pop(number, None)

    ended = list[int]()
    handoff = Handed(data, message["numbers"]) if "numbers" in message else None
    try:
        request = request_from_json(message["request"])
        ticket = engine.submit(request, listener=listen, hands=message["hands"], handoff=handoff)
    except Exception as error:
        wire.send({"do": "error", "id": number, **error_to_json(error)})
    else:
        tickets[number] = ticket
        if ended:  # before it was known here
            tickets.pop(number, None)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
