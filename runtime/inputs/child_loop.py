"""What a child process runs: each request from stdin goes to the function `work` of one module, and what it returns
goes to stdout. It imports nothing of accel, so that it starts fast.

    python child_loop.py MODULE MEMORY PACKAGES…
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import marshal
import math
import os
import sys
from typing import IO, Any

HEAD = 8  # bytes of a length
OUT_OF_MEMORY = 3  # the status that it ends with


def write(stream: IO[bytes], data: bytes) -> None:
    """A frame: its length, then itself."""
    stream.write(len(data).to_bytes(HEAD, "little") + data)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """A frame; None where the stream ended before it was whole."""
    head = stream.read(HEAD)
    if len(head) < HEAD:
        return None
    size = int.from_bytes(head, "little")
    data = stream.read(size)
    return data if len(data) == size else None


def _limited(memory: int) -> Any:
    """No core is dumped, and so many bytes of addresses are there. The module that limits time; None: there is none."""
    with contextlib.suppress(ImportError):  # of POSIX systems
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        return resource
    return None


def _allow(resource: Any, seconds: float) -> None:
    """The system ends this process that much processor time later, even where nobody is left who waits for it."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(used + seconds) + 1
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def main() -> None:
    """Until stdin ends."""
    module, memory, *packages = sys.argv[1:]
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no reply
    sys.path += packages
    resource = _limited(int(memory))
    spec = importlib.util.spec_from_file_location("child_work", module)
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = worker
    spec.loader.exec_module(worker)
    write(replies, b"")
    while (data := read(requests)) is not None:
        seconds, request = marshal.loads(data)
        if resource is not None:
            _allow(resource, seconds)
        try:
            told = json.dumps(worker.work(request), ensure_ascii=False)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # what is left may be in pieces: the next gets a new process
        write(replies, told.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()
