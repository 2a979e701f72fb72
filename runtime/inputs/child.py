"""Work on what strangers wrote, in processes of their own that are kept warm: a crash, an endless loop or a flood of
memory is an error of one request. On Linux the system also holds them to their memory and processor time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import marshal
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel.ir.errors import AccelError, InputError
from accel.runtime.inputs import child_loop

_LOOP = Path(__file__).with_name("child_loop.py")
_START = 60.0  # seconds in which one has imported what it needs
_MOST = 4  # processes that work at once


class ChildDied(Exception):
    """The process ended in its work; its text says how."""


class ChildLate(ChildDied):
    """It took too long, and was ended."""


class Children:
    """Processes that each run the function `work` of one file, on one request at a time. Requests are plain data that
    `marshal` takes, results are JSON. It may be used from several threads.
    """

    def __init__(self, work: Path, *, memory: int):
        """`memory`: most bytes of addresses of each."""
        self._work, self._memory = work, memory
        self._places = threading.BoundedSemaphore(_MOST)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def ask(self, request: Any, seconds: float, packages: Sequence[str]) -> Any:
        """What `work` returns for it. `packages`: folders that it imports from. Raises ChildDied, AccelError."""
        data = marshal.dumps((seconds, request))
        with self._places, self._one(packages) as child:
            return json.loads(child.ask(data, seconds).decode("utf-8", "surrogatepass"))

    def close(self) -> None:
        """End those that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.end()

    @contextlib.contextmanager
    def _one(self, packages: Sequence[str]) -> Iterator[_Child]:
        """One that is idle, or a new one; it stays where the work went well."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is not None and not child.lives:
            child.end()
            child = None
        child = child or _Child([str(self._work), str(self._memory), *packages])
        try:
            yield child
        except BaseException:
            child.end()
            raise
        with self._lock:
            self._idle.append(child)

    def _forget(self) -> None:
        """In a fork: the parent's processes serve the parent."""
        self._lock, self._places = threading.Lock(), threading.BoundedSemaphore(_MOST)
        for child in self._idle:
            child.leave()
        self._idle = []


class _Child:
    """One process."""

    def __init__(self, arguments: Sequence[str]):
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LOOP), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise AccelError(f"a process for the work could not be started: {error}") from error
        try:
            self._reply(_START)
        except BaseException:
            self.end()
            raise

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Its reply, within so many seconds. Raises ChildDied."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it ended is found below
            child_loop.write(self._process.stdin, data)
        return self._reply(seconds)

    def _reply(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            data = child_loop.read(self._process.stdout)
        finally:
            timer.cancel()
        if data is not None:
            return data
        code = self._process.wait()
        if late.is_set() or code == -getattr(signal, "SIGXCPU", 0):
            raise ChildLate("it took too long")
        if code == child_loop.OUT_OF_MEMORY:
            raise ChildDied("it ran out of memory")
        raise ChildDied(f"status {code}" if code >= 0 else signal.Signals(-code).name)

    def end(self) -> None:
        """It works for nobody any more."""
        self._process.kill()
        self._process.wait()
        self.leave()

    def leave(self) -> None:
        """Close what leads to it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def plain(value: Any, what: str) -> Any:
    """Data without the classes that `marshal` does not take: a copy where there are some. Raises InputError."""
    try:
        marshal.dumps(value)
        return value
    except ValueError:
        pass
    try:
        return _plain(value, what)
    except RecursionError:
        raise InputError(f"{what} are nested too deeply; nest them less") from None


def _plain(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an Enum's own says its name
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(name, what): _plain(one, what) for name, one in value.items()}
    for many in (tuple, set, frozenset, list):
        if isinstance(value, many):
            return many(_plain(one, what) for one in value)
    raise InputError(
        f"{what} hold a {type(value).__name__}; give dicts, lists, text, numbers and booleans"
    )
