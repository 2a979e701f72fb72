"""Ranks as processes: each opens the artifact, whose weights are mapped and so shared, and has a pipe to each other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from accel.ir.errors import AccelError
from accel.lowering.onnx.threads import default_threads
from accel.lowering.onnx.variants import PORTABLE
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.call import Arrays
from accel.runtime.prefill.exchange.rank import Compute, Done, Job, Tag, work

_PATIENCE = 5.0  # seconds that a process has to end by itself


class Crew:
    """The processes of a model. They start with the first prompt that is shared, and serve one prompt at a time."""

    def __init__(self, path: Path, ranks: int, threads: int | None = None):
        """`threads`: of all ranks together, by default `default_threads()`."""
        self._path, self._ranks = path, ranks
        self._threads = max(1, (threads or default_threads()) // ranks)
        self._lock = threading.Lock()
        self._running: list[Any] = []
        self._controls: list[Connection] = []

    @property
    def pids(self) -> list[int]:
        """Of the processes that run, by rank."""
        return [one.pid for one in self._running]

    def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run one prompt, a job for each rank.

        Raises AccelError where a process fails or ends; the others are ended too, and the next prompt starts new ones.
        """
        with self._lock:
            try:
                if any(not one.is_alive() for one in self._running):
                    self._stop()  # it ended between two prompts
                if not self._running:
                    self._start()
                for rank, job in enumerate(jobs):
                    self._tell(rank, job)
                return self._gather()
            except BaseException:
                self._stop()
                raise

    def close(self) -> None:
        """End the processes. Closing twice is harmless."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        context = get_context("spawn")
        links: list[dict[int, Connection]] = [{} for _ in range(self._ranks)]
        for a in range(self._ranks):
            for b in range(a):
                links[a][b], links[b][a] = context.Pipe()
        for rank in range(self._ranks):
            ours, theirs = context.Pipe()
            given = self._path, rank, self._threads, theirs, links[rank]
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            self._running.append(process)
            self._controls.append(ours)
            for end in (theirs, *links[rank].values()):
                end.close()  # so that the others see where it ends

    def _tell(self, rank: int, job: Job) -> None:
        try:
            self._controls[rank].send(job)
        except OSError:
            raise self._ended(rank) from None

    def _gather(self) -> list[Done]:
        done: dict[int, Done] = {}
        while len(done) < self._ranks:
            left = {self._controls[r]: r for r in range(self._ranks) if r not in done}
            ends = {one.sentinel: rank for rank, one in enumerate(self._running)}
            ready = wait([*left, *ends])
            for end in (one for one in ready if isinstance(one, Connection)):
                rank = left[end]
                try:
                    said = end.recv()
                except (EOFError, OSError):
                    raise self._ended(rank) from None
                if isinstance(said, Done):
                    done[rank] = said
                elif isinstance(said, int):
                    raise self._ended(said)
                else:
                    raise AccelError(f"prefill.ranks: rank {rank} of {self._ranks} failed: {said}")
            gone = [ends[one] for one in ready if not isinstance(one, Connection)]
            if late := [rank for rank in gone if rank not in done]:
                raise self._ended(late[0])
        return [done[rank] for rank in range(self._ranks)]

    def _ended(self, rank: int) -> AccelError:
        process = self._running[rank]
        process.join(_PATIENCE)
        code = process.exitcode
        why = "; a script must start its work under if __name__ == '__main__'" if code == 1 else ""
        return AccelError(
            f"prefill.ranks: the process of rank {rank} of {self._ranks} ended (exit code {code}{why}); the session "
            "is as before, and the next prompt starts new processes"
        )

    def _stop(self) -> None:
        for control in self._controls:
            control.close()
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.join(_PATIENCE)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        self._running, self._controls = [], []


class _PeerGone(Exception):
    def __init__(self, rank: int):
        super().__init__(rank)
        self.rank = rank


def _serve(
    path: Path, rank: int, threads: int, control: Connection, links: dict[int, Connection]
) -> None:
    """A rank's process: a job, what came of it, the next job, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session's process says when it is over
    mail = _Mail(links, control)
    compute: Compute | None = None
    while True:
        try:
            job = control.recv()
        except (EOFError, OSError):
            return
        said: Done | str | int
        try:
            compute = compute or _computing(path, threads)
            said = _worked(rank, job, compute, mail)
        except _PeerGone as gone:
            said = gone.rank
        except EOFError:
            return
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        try:
            control.send(said)
        except OSError:
            return


def _computing(path: Path, threads: int) -> Compute:
    """Calls of the artifact's entries, each opened when first called."""
    artifact = open_artifact(path, hashes=False)
    backend = OrtBackend(artifact, threads=threads, kernels=PORTABLE, mapped=True)

    def compute(entry: str, inputs: Arrays) -> Arrays:
        session = backend.other(entry)
        names = [one.name for one in session.get_outputs()]
        taken = {i.name: np.ascontiguousarray(inputs[i.name]) for i in session.get_inputs()}
        return dict(zip(names, session.run(names, taken), strict=True))

    return compute


def _worked(rank: int, job: Job, compute: Compute, mail: _Mail) -> Done:
    running = work(rank, job, compute, mail.post)
    try:
        wanted = next(running)
        while True:
            wanted = running.send(mail.get(*wanted))
    except StopIteration as end:
        done: Done = end.value
        return done


class _Mail:
    """Messages by source and tag. A thread sends, so that no rank waits for another to receive; whoever waits for a
    message takes in all that come, so that no sender waits for ever.
    """

    def __init__(self, links: dict[int, Connection], control: Connection):
        self._links, self._control = links, control
        self._sources = {link: rank for rank, link in links.items()}
        self._came: dict[tuple[int, Tag], Arrays] = {}
        self._queue: SimpleQueue[tuple[int, Tag, Arrays]] = SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def post(self, to: int, tag: Tag, arrays: Arrays) -> None:
        """See rank.Post."""
        self._queue.put((to, tag, arrays))

    def get(self, source: int, tag: Tag) -> Arrays:
        """Wait for a message. Raises _PeerGone, or EOFError where the session's process is gone."""
        while (source, tag) not in self._came:
            for link in wait([*self._sources, self._control]):
                assert isinstance(link, Connection)
                if link is self._control:
                    raise EOFError  # nothing is said while a job runs
                rank = self._sources[link]
                try:
                    came, arrays = link.recv()
                except (EOFError, OSError):
                    raise _PeerGone(rank) from None
                self._came[rank, came] = arrays
        return self._came.pop((source, tag))

    def _send(self) -> None:
        while True:
            to, tag, arrays = self._queue.get()
            try:
                self._links[to].send((tag, arrays))
            except OSError:
                continue  # who waits for it is gone, which the session's process sees
