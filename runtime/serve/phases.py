"""An engine of several processes: prompts run in some, and are decoded in others (schedule `splitwise`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from accel.ir.errors import AccelError, InputError
from accel.lowering.onnx.threads import default_threads
from accel.runtime.backends.onnx.tune import AUTO
from accel.runtime.inputs.prompts import as_count
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.schedule import Place, Route, chosen
from accel.runtime.serve.engine import BLOCK, Engine
from accel.runtime.serve.request import Event, Full, Request, Ticket
from accel.runtime.serve.wire import (
    Wire,
    error_from_json,
    event_from_json,
    prompt_logprobs_from_json,
    request_to_json,
)

PATIENCE = 10.0  # seconds that a process has to answer, or to end


def serving(
    model: CompiledModel,
    *,
    max_batch: int | None = None,
    max_waiting: int = 64,
    threads: int | None = None,
    kernels: str = AUTO,
    public_key: str | os.PathLike[str] | None = None,
) -> Engine | Phases:
    """An engine for a model, of as many processes as the recipe's schedule wants. Raises InputError, RecipeError."""
    if len(chosen(model.recipe).homes) == 1:
        return Engine(model, max_batch=max_batch, max_waiting=max_waiting)
    return Phases(
        model,
        max_batch=max_batch,
        max_waiting=max_waiting,
        threads=threads,
        kernels=kernels,
        public_key=public_key,
    )


@dataclass
class _Sent:
    """A request on its way. `at`: the process that has it. `began`: whether its first token came."""

    ticket: Ticket
    route: Route
    request: dict[str, Any]
    prompt: int
    most: int
    at: int
    began: bool = False


class _Process:
    """One that was started, and what is sent to it."""

    def __init__(self, home: str, options: Mapping[str, Any]):
        self.home, self.gone = home, False
        words = [sys.executable, "-m", "accel.runtime.serve.worker", json.dumps(options)]
        self.child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which drains first
        )
        assert self.child.stdin is not None and self.child.stdout is not None
        self.wire = Wire(self.child.stdout, self.child.stdin)

    def ready(self) -> None:
        """Wait until it can serve. Raises AccelError."""
        try:
            message, _ = self.wire.receive()
        except EOFError:
            raise AccelError(
                f"a {self.home} process ended at its start (exit code {self.child.wait()}); its errors are on stderr"
            ) from None
        if message["do"] == "failed":
            raise error_from_json(message)

    @property
    def code(self) -> int | None:
        """Its exit code; None where it runs a second after it was heard of last. Its pipes end before it does."""
        try:
            return self.child.wait(1.0)
        except subprocess.TimeoutExpired:
            return None

    def send(self, message: Mapping[str, Any], data: bytes = b"") -> None:
        """What a process that is gone does not get, its reader answers for."""
        try:
            self.wire.send(message, data)
        except (OSError, ValueError):
            pass

    def close(self) -> None:
        """End it: at once, or by force."""
        self.wire.close()
        try:
            self.child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()


class Phases:
    """Serves as `Engine` does, in processes with a model and an engine each; this one reads texts, sends requests and
    hands out events. A request's prompt runs in one process, and what `Session.export_row` and `Row.numbers` tell of it
    goes to another, which decodes. Each request gets the tokens that `generate` gives it alone.

    A process that ends takes its requests with it: their tickets raise AccelError. The others go on.
    """

    def __init__(
        self,
        model: CompiledModel,
        *,
        max_batch: int | None = None,
        max_waiting: int = 64,
        blocks: int | None = None,
        threads: int | None = None,
        kernels: str = AUTO,
        public_key: str | os.PathLike[str] | None = None,
    ):
        """`max_batch`, `blocks`: of each process, as of `Engine`. `max_waiting`: most requests beyond those that can
        run. `threads`: of a call in each process (default: an equal part of the cores). `kernels`,
        `public_key`: as of `load`, in each. Raises InputError where the
        recipe's requests cannot move, RecipeError.
        """
        facts = model.facts
        self.max_batch = as_count(
            facts.max_batch if max_batch is None else max_batch, "max_batch", 1, facts.max_batch
        )
        if model.artifact is None:
            raise InputError(
                "this model is of no artifact, which other processes could load; save it, and load it again"
            )
        self.bytes_sent = 0
        """Bytes of state that went from process to process."""
        self._model, self._schedule = model, chosen(model.recipe)
        homes = self._schedule.homes
        everything = self.max_batch * -(-facts.max_context // BLOCK)
        self._capacity = BLOCK * (everything if blocks is None else as_count(blocks, "blocks", 1))
        self._most = as_count(max_waiting, "max_waiting", 1) + self.max_batch * len(homes)
        self.max_waiting = max_waiting
        self._changed = Condition()
        self._sent: dict[int, _Sent] = {}
        self._answers: dict[int, dict[str, float]] = {}
        self._number, self._closing = 0, False
        options = {
            "load": {
                "path": str(model.artifact.path),
                "threads": threads or max(1, default_threads() // len(homes)),
                "kernels": kernels,
                "public_key": None if public_key is None else os.fspath(public_key),
            },
            "max_batch": self.max_batch,
            "blocks": self._capacity // BLOCK,
            "moves": len(homes) > 1,
        }
        self._processes = [_Process(home, options) for home in homes]
        try:
            for one in self._processes:
                one.ready()
        except BaseException:
            for one in self._processes:
                one.close()
            raise
        self._readers = [
            Thread(target=self._read, args=(i,), name=f"accel-{home}-{i}", daemon=True)
            for i, home in enumerate(homes)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def how(self) -> str:
        """How requests share the model, in a sentence."""
        counts = Counter(one.home for one in self._processes)
        shown = ", ".join(f"{count} {home}" for home, count in counts.items())
        name = type(self._schedule).__module__.rpartition(".")[2].replace("_", "-")
        return f"processes: {shown}; prompts run whole, and their state moves ({name})"

    def submit(self, request: Request) -> Ticket:
        """Take a request. Raises Full where as many wait as may, InputError where it can never be served, AccelError
        where no process is left.
        """
        row = self._model.prepare(
            request.prompt,
            request.params,
            encoder_input=request.encoder_input,
            adapter=request.adapter,
            sample=request.sample,
            marks=request.marks,
            prompt_logprobs=request.prompt_logprobs,
        ).sample.row
        size = int(row.prompt.size)
        most = size + row.left
        if row.finish or most > self._capacity:
            raise InputError(
                f"the request has {size} tokens and may hold {most}, and there is room for "
                f"{min(self._capacity, self._model.facts.max_context)}; shorten it, or lower max_tokens"
            )
        request_json = request_to_json(request, row.prompt_text)
        with self._changed:
            if self._closing:
                raise InputError("this engine is closed; make another")
            if len(self._sent) >= self._most:
                raise Full(f"{self.max_waiting} requests wait already; try again later")
            number = self._number
            route = self._route(size, most)
            ticket = Ticket(size, lambda: self._cancel(number))
            self._sent[number] = _Sent(ticket, route, request_json, size, most, route.prompt)
            self._number += 1
        hands = route.prompt != route.token
        self._processes[route.prompt].send(
            {"do": "submit", "id": number, "request": request_json, "hands": hands}
        )
        if self._processes[route.prompt].gone:  # it ended meanwhile
            self._lost(route.prompt)
        return ticket

    @property
    def stats(self) -> Mapping[str, float]:
        """As of `Engine`, of all processes together; a request that moved counts in each. `moved_bytes` of state."""
        with self._changed:
            self._answers = {}
            alive = [i for i, one in enumerate(self._processes) if not one.gone]
        if not self._closing:
            for i in alive:
                self._processes[i].send({"do": "stats", "id": i})
            with self._changed:
                self._changed.wait_for(lambda: self._answers.keys() >= set(alive), PATIENCE)
        with self._changed:
            answers = list(self._answers.values())
            names = sorted({name for one in answers for name in one})
            found = {name: sum(one.get(name, 0) for one in answers) for name in names}
            return {**found, "requests_total": self._number, "moved_bytes": self.bytes_sent}

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """As of `Engine`; the processes end."""
        with self._changed:
            self._closing = True
            if drain:
                self._changed.wait_for(lambda: not self._sent, timeout)
            left = [one.ticket for one in self._sent.values()]
        for ticket in left:
            ticket.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._sent, PATIENCE)
        for one in self._processes:
            one.close()
        for reader in self._readers:
            reader.join()

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _route(self, size: int, most: int) -> Route:
        """Where a request goes, of the processes that are left."""
        alive = [i for i, one in enumerate(self._processes) if not one.gone]
        if not alive:
            raise AccelError("all processes of this engine have ended; start it again")
        pending, held = Counter[int](), Counter[int]()
        for sent in self._sent.values():
            pending[sent.route.prompt] += 0 if sent.began else sent.prompt
            held[sent.route.token] += sent.most
        places = [
            Place(self._processes[i].home, pending[i], held[i], self._capacity) for i in alive
        ]
        found = self._schedule.route(places, size, most)
        return Route(alive[found.prompt], alive[found.token])

    def _cancel(self, number: int) -> None:
        with self._changed:
            sent = self._sent.get(number)
        if sent is not None:
            for i in {sent.route.prompt, sent.route.token}:
                self._processes[i].send({"do": "cancel", "id": number})

    def _read(self, place: int) -> None:
        """What a process tells, in a thread of its own."""
        process = self._processes[place]
        while True:
            try:
                message, data = process.wire.receive()
            except (EOFError, OSError, ValueError):
                process.gone = True
                self._lost(place)
                return
            if message["do"] == "stats":
                with self._changed:
                    self._answers[place] = message["stats"]
                    self._changed.notify_all()
            else:
                sent = self._sent.get(message.get("id", -1))  # one that fails names none
                if sent is not None:
                    self._hear(sent, message, data)

    def _hear(self, sent: _Sent, message: dict[str, Any], data: bytes) -> None:
        """What a process tells of a request."""
        number, ticket = message["id"], sent.ticket
        if message["do"] == "handed":
            with self._changed:
                self.bytes_sent += len(data)
                sent.at = sent.route.token
            process = self._processes[sent.route.token]
            again = {"do": "submit", "id": number, "request": sent.request, "hands": False}
            process.send({**again, "numbers": message["numbers"]}, data)
            if process.gone:
                self._lost(sent.route.token)
            if ticket.cancelled:
                process.send({"do": "cancel", "id": number})
            return
        if message["do"] == "event":
            event: Event | AccelError = event_from_json(message)
            ticket.stop_reason = message["stop"]
            ticket.count(*message["drafts"])
            ticket.reuse(message["reused"])
            if "prompt_logprobs" in message:
                ticket.prompt_logprobs = prompt_logprobs_from_json(message["prompt_logprobs"])
        else:
            event = error_from_json(message)
        over = message["do"] == "error" or message["finish"] is not None
        with self._changed:
            sent.began = True
            if over:
                self._sent.pop(number, None)
                self._changed.notify_all()
        ticket.put(event)

    def _lost(self, place: int) -> None:
        """A process is gone: so are the requests that it has, or will be given."""
        with self._changed:
            found = [
                (number, sent)
                for number, sent in self._sent.items()
                if place in (sent.at, sent.route.token)
            ]
            for number, _ in found:
                del self._sent[number]
            self._changed.notify_all()
        code = self._processes[place].code
        for number, sent in found:
            for i in {sent.route.prompt, sent.route.token} - {place}:
                self._processes[i].send({"do": "cancel", "id": number})
            sent.ticket.put(
                AccelError(
                    f"the {self._processes[place].home} process that served this request ended (exit code {code}); "
                    "send the request again"
                )
            )
