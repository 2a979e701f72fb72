"""One piece of work at a time, in a thread beside the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from accel.runtime.serve.job import Job


@dataclass(frozen=True)
class Part:
    """A part of a prompt that runs, or ran. threads: those that it has."""

    job: Job
    tokens: int
    threads: int
    future: Future[None]


class PromptThread:
    """Runs parts of prompts while others decode. All methods are of the engine's thread. `cores`: those of all calls
    together.
    """

    def __init__(self, cores: int):
        self.cores = cores
        self.shares = [k / cores for k in range(1, cores)]
        self.share = 0.0  # of the cores that prompts had while others decoded
        self.part: Part | None = None
        self._work = SimpleQueue[tuple[Future[None], Callable[[], None]] | None]()
        self._thread = Thread(target=self._run, name="accel-prompts", daemon=True)
        self._thread.start()

    def start(
        self, job: Job, tokens: int, threads: int, run: Callable[[Job, int, int], None]
    ) -> None:
        """Begin `run(job, tokens, threads)`; nothing runs now."""
        assert self.part is None
        self.part = Part(job, tokens, threads, Future())
        self._work.put((self.part.future, lambda: run(job, tokens, threads)))

    def ended(self, wait: bool = False) -> Part | None:
        """The part that is through, once; None: it runs, or there is none. Its error is in its `future`."""
        part = self.part
        if part is None or not (wait or part.future.done()):
            return None
        part.future.exception()
        self.part = None
        return part

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, run = work
            try:
                run()
            except BaseException as error:  # it is raised in the engine's thread
                future.set_exception(error)
            else:
                future.set_result(None)
