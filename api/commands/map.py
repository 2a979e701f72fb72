"""map: a text for each row of a file, by Ray Data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from accel.commands import options
from accel.commands.console import progress
from accel.ir.errors import extra

EXAMPLES = """\b
Examples:
  accel-compile map ./artifact prompts.parquet ./texts
  accel-compile map ./artifact prompts.jsonl ./texts --prompt-column question --max-new-tokens 200
  accel-compile map ./artifact rows.csv ./texts --temperature 0.8 --seed 7 --id-column id
  RAY_ADDRESS=auto accel-compile map ./artifact /shared/prompts ./texts --actors 8 --cpus 16
"""


@dataclass(frozen=True)
class Columns:
    """The columns of the file that are read."""

    prompt_column: Annotated[
        str,
        typer.Option(metavar="NAME", help="Column of prompts: text, token ids, or messages."),
    ] = "prompt"
    id_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column of ids of rows, which --seed needs."),
    ] = None


@dataclass(frozen=True)
class Workers:
    """How the work is shared out."""

    actors: Annotated[
        int, typer.Option(min=1, metavar="N", help="Processes that each hold a model.")
    ] = 1
    cpus: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="CPUs and compute threads of each actor. Default: all that Ray has but one, shared out.",
        ),
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are picked, and where texts end."""

    max_new_tokens: options.MaxNewTokens = 64
    temperature: options.Temperature = 0.0
    top_k: options.TopK = None
    top_p: options.TopP = None
    seed: options.Seed = None
    stop: options.Stop = None


@options.grouped
def map(
    artifact: Annotated[Path, typer.Argument(metavar="DIR", help="An artifact.")],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A .parquet, .jsonl or .csv file, or a folder of one kind of them."
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to make, with files of the same kind.")
    ],
    *,
    columns: Columns,
    share: Workers,
    picks: SamplingOptions,
) -> None:
    """Continue the prompt of each row of a file.

    Each row gets the columns generated_text, finish_reason, prompt_tokens, completion_tokens and error: a
    row that fails says why there, and the others go on. OUT is made whole or not at all. Runs on the Ray at
    RAY_ADDRESS, or on one of its own that ends with it. Needs the extra `ray`.
    """
    with extra("ray"):
        from accel.ray.job import Job

    from accel.runtime.decode.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=picks.max_new_tokens,
        temperature=picks.temperature,
        top_k=picks.top_k,
        top_p=picks.top_p,
        seed=picks.seed,
        stop=picks.stop or None,
    )
    job = Job(
        artifact,
        source,
        out,
        columns.prompt_column,
        columns.id_column,
        share.actors,
        share.cpus,
        params,
    )
    with progress("map") as show:
        rows, failed = job.run(lambda done, total: show(f"{done} of {total} rows", done / total))
    typer.echo(f"{out}: {rows} rows" + (f", {failed} of them with an error" if failed else ""))
