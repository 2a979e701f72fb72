"""Texts of a model for each row of a dataset of Ray Data."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from ray.data import Dataset

from accel.ir.errors import AccelError, InputError, shown, unknown
from accel.ray.room import actor_environment, check_room, machines, share
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.inputs.prompts import as_count, is_conversation, without_messages
from accel.runtime.serve.engine import Full, Request, Ticket
from accel.runtime.serve.opening import check_served, opened

WAITING = 256  # requests that an engine holds beside those that run
BATCH = 256  # rows of a call: an engine at its end runs fewer and fewer
MADE = pa.schema(
    {
        "generated_text": pa.string(),
        "finish_reason": pa.string(),
        "prompt_tokens": pa.int64(),
        "completion_tokens": pa.int64(),
        "error": pa.string(),
    }
)
"""The columns that each row gets; `error` is null where there is a text, the others where there is none."""


def row_seed(seed: int, row: Any) -> int:
    """The seed of the row that has this id, which depends on nothing else."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row}".encode()).digest()[:8], "big")


class Generate:
    """For `Dataset.map_batches(Generate, fn_constructor_kwargs={…}, concurrency=…, batch_format="pyarrow")`, which
    makes one in each actor: a model and an engine, loaded once. `generate` does that.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        params: SamplingParams | None = None,
        prompt: str = "prompt",
        row: str | None = None,
        threads: int | None = None,
        mapped: bool = False,
    ):
        """Arguments as of `generate`; `threads`: of compute. Raises AccelError."""
        self._stack = ExitStack()
        self._model, self._engine = self._stack.enter_context(
            opened(path, max_waiting=WAITING, threads=threads, mapped=mapped)
        )
        self._params, self._prompt, self._row = params or SamplingParams(), prompt, row

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table with the columns MADE. Raises InputError where it has no such columns, or has those already."""
        if not isinstance(table, pa.Table):
            raise InputError('Generate takes Arrow tables; give map_batches batch_format="pyarrow"')
        check_columns(table.column_names, self._prompt, self._row)
        prompts = table.column(self._prompt).to_pylist()
        ids = [None] * len(prompts) if self._row is None else table.column(self._row).to_pylist()
        made = [_Made() for _ in prompts]
        running = deque[_Made]()
        for one, prompt, row in zip(made, prompts, ids, strict=True):
            try:
                request = Request(self._given(prompt), self._sampling(row))
                one.ticket = self._taken(request, running)
            except InputError as error:
                one.error = str(error)
            else:
                running.append(one)
        for one in running:
            one.wait()
        for field in MADE:
            values = [getattr(one, field.name) for one in made]
            table = table.append_column(field, pa.array(values, field.type))
        return table

    def _taken(self, request: Request, running: deque[_Made]) -> Ticket:
        """What the engine gives for it, once there is room. Raises InputError."""
        while True:
            try:
                return self._engine.submit(request)
            except Full:
                running.popleft().wait()

    def _given(self, prompt: Any) -> Any:
        """A cell of the column of prompts, as an engine takes it. Raises InputError."""
        if prompt is None:
            raise InputError(f"the row has no {self._prompt}")
        if is_conversation(prompt):  # Arrow gives each message the fields of all
            prompt = [{k: v for k, v in one.items() if v is not None} for one in prompt]
            return without_messages(prompt, self._model.tokenizer, None)
        ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not (ids or isinstance(prompt, str)):
            raise InputError(f"{self._prompt} is no text, no token ids and no messages")
        return prompt

    def _sampling(self, row: Any) -> SamplingParams:
        """The options of the row with this id. Raises InputError."""
        if self._params.seed is None or self._row is None:
            return self._params
        if row is None:
            raise InputError(f"the row has no {self._row}, which its seed is made of")
        return replace(self._params, seed=row_seed(self._params.seed, row))


@dataclass(eq=False)
class _Made:
    """A row's text, or why there is none."""

    ticket: Ticket | None = None
    generated_text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

    def wait(self) -> None:
        """Take all that its ticket gives. Raises what is no error of accel."""
        assert self.ticket is not None
        try:
            events = list(self.ticket)
        except AccelError as error:
            self.error = str(error)
            return
        self.generated_text = "".join(event.text for event in events)
        self.finish_reason = events[-1].finish
        usage = self.ticket.usage
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens


def check_sampling(params: Any, row: str | None) -> None:
    """Raise InputError where the options are not those of one text for each row."""
    if not isinstance(params, SamplingParams):
        raise InputError(f"params is {shown(params)}; give accel.SamplingParams(…)")
    if params.n != 1:
        raise InputError(f"n = {params.n}: a row gets one text; leave n at 1, and repeat rows")
    if params.seed is not None and not params.greedy and row is None:
        raise InputError(
            "a seed needs ids of rows, of which each row's own seed is made; name their column"
        )


def check_columns(names: list[str], prompt: str, row: str | None) -> None:
    """Raise InputError where a dataset lacks a column that is read, or has one that is made."""
    for name in [prompt] if row is None else [prompt, row]:
        if name not in names:
            raise InputError(unknown("column", name, names))
    if there := [name for name in MADE.names if name in names]:
        raise InputError(
            f"the rows have a column {there[0]} already, which is to be made; rename or drop it"
        )


def generate(
    rows: Dataset,
    path: str | os.PathLike[str],
    *,
    actors: int = 1,
    cpus: float = 1,
    params: SamplingParams | None = None,
    prompt: str = "prompt",
    row: str | None = None,
    batch: int = BATCH,
    mapped: bool = False,
) -> Dataset:
    """The rows with what a model makes of each: columns `generated_text`, `finish_reason`, `prompt_tokens`,
    `completion_tokens` and `error`. Runs when the dataset that it gives is read.

    A row that cannot be served, such as a prompt past the context, says why in `error`; the others go on. What each row
    gets depends on nothing but the row and the options.

    Args:
        rows: a dataset with a column of prompts, each a text, token ids [n], or messages for the model's chat template.
        path: the artifact's folder, at the same path on every machine. Checked here, loaded by each actor.
        actors: processes, each with a model and an engine.
        cpus: CPUs of each actor; its compute threads are as many, at least one. One CPU more must be there for reading.
        params: sampling and stop options of all rows; None: 64 tokens, greedy. With a `seed`, each row's own seed is
            `row_seed(seed, id)`, and `row` must be given.
        prompt: the column of prompts.
        row: the column of ids of rows; needed for a `seed` only.
        batch: rows that an actor is given at once; the engine takes them as it has room.
        mapped: as of `app`.

    Raises:
        AccelError: the artifact cannot be served, a column or option is wrong, or Ray has too few CPUs.
    """
    artifact = open_artifact(path)
    check_served(artifact)
    params = SamplingParams() if params is None else params
    check_sampling(params, row)
    as_count(actors, "actors", 1)
    as_count(batch, "batch", 1)
    threads = share(cpus)
    check_columns(rows.schema().names, prompt, row)
    check_room(machines(), actors, cpus, "actors", spare=1)
    # a call takes rows of one block only, and an actor whole blocks
    return rows.repartition(target_num_rows_per_block=batch).map_batches(
        Generate,
        fn_constructor_kwargs={
            "path": str(artifact.path.resolve()),
            "params": params,
            "prompt": prompt,
            "row": row,
            "threads": threads,
            "mapped": mapped,
        },
        batch_format="pyarrow",
        batch_size=batch,
        concurrency=actors,
        num_cpus=cpus,
        runtime_env=actor_environment(threads),
    )
