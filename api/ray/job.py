"""A file of prompts to a folder of texts, on a Ray that runs or on one of its own."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import ray
from ray.data import DataContext, Dataset
from ray.exceptions import RayError

from accel.ir.errors import AccelError, InputError
from accel.ray import files
from accel.ray.batches import BATCH, check_sampling, generate
from accel.ray.room import machines, share
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.artifact.atomic import AtomicOutputDir
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.serve.opening import check_served

_RAISED = re.compile(r"^(?!ray\.)(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.M)


@dataclass(frozen=True)
class Job:
    """Fields as the arguments of `accel.ray.generate`. `source`: as of `files.input_files`; `out`: the folder to make;
    `cpus` None: all of Ray but one, shared out.
    """

    artifact: Path
    source: Path
    out: Path
    prompt: str
    row: str | None
    actors: int
    cpus: float | None
    params: SamplingParams

    def run(self, progress: Callable[[int, int], None]) -> tuple[int, int]:
        """Make the folder, whole or not at all; gives how many rows it has, and how many of them failed. `progress` is
        called with rows done and all rows. Raises AccelError.
        """
        # what is wrong is told before Ray takes its time to start
        check_served(open_artifact(self.artifact, hashes=False))
        check_sampling(self.params, self.row)
        if self.cpus is not None:
            share(self.cpus)
        names, kind = files.input_files(self.source)
        with AtomicOutputDir(self.out, what="output") as folder, _ray(), in_a_line():
            with in_a_line(f"{self.source} cannot be read as {kind}"):
                rows = files.read(names, kind)
                total = rows.count()
            if not total:
                raise InputError(f"{self.source} has no rows")
            progress(0, total)
            made = generate(
                rows,
                self.artifact,
                actors=self.actors,
                cpus=self._share() if self.cpus is None else self.cpus,
                params=self.params,
                prompt=self.prompt,
                row=self.row,
                batch=min(BATCH, -(-total // self.actors)),
            )
            failed = [0]
            done = 0
            for done in files.write(_tables(made, failed), folder, kind):
                progress(done, total)
            if done != total:
                raise AccelError(f"{done} of {total} rows came back; run it again")
        return total, failed[0]

    def _share(self) -> float:
        """CPUs of an actor: the most that all of them can have."""
        each = machines()
        most = min(max(each), (sum(each) - 1) // self.actors)
        return max(1.0, most)


def _tables(rows: Dataset, failed: list[int]) -> Iterator[pa.Table]:
    """The rows as they come, in their order; counts those with an error."""
    for table in rows.iter_batches(
        batch_size=files.ROWS, batch_format="pyarrow", prefetch_batches=0
    ):
        errors = table.column("error")
        failed[0] += len(errors) - errors.null_count
        yield table


@contextmanager
def _ray() -> Iterator[None]:
    """The Ray at RAY_ADDRESS; where that is not set, one that ends with the block. It prints nothing."""
    address = os.environ.get("RAY_ADDRESS")
    here: dict[str, object] = {} if address else {"address": "local", "include_dashboard": False}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **here)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"Ray cannot be used: {error}; look at RAY_ADDRESS") from error
    try:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        yield
    finally:
        ray.shutdown()


@contextmanager
def in_a_line(what: str = "Ray could not do it") -> Iterator[None]:
    """Errors of Ray, which are tracebacks of several processes, and of Arrow as accel's own: what was raised first."""
    try:
        yield
    except AccelError:
        raise
    except RayError as error:
        found = _RAISED.search(str(error))
        told = f"{found[1]}: {found[2]}" if found else str(error)
        raise AccelError(f"{what}: {told}") from error
    except pa.ArrowException as error:  # Ray looks into Parquet files in this process
        raise AccelError(f"{what}: {type(error).__name__}: {error}") from error
