"""train: the part of a method that must be trained or measured, for a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from accel.commands import options
from accel.commands.console import training
from accel.ir.errors import extra

EXAMPLES = """\b
Examples:
  accel-compile train kvquant ./my-model
  accel-compile train trim-kv ./my-model --minutes 60 --text my-text.txt
  accel-compile train trim-kv ./my-model --minutes 60 --text my-text.txt --resume
  accel-compile train specdec-pp ./my-model --draft ./my-draft --text my-text.txt
  accel-compile train q-filter ./my-model.Q4_0.gguf --out filters.safetensors
  accel-compile train my-recipe.toml ./my-model
  accel-compile train distillspec ./my-draft --target ./my-model --text my-text.txt --out ./my-tuned-draft
  accel-compile train cllm ./my-model --text my-text.txt --out ./my-tuned-model
"""
_DEFAULT = "Default: as for the bundled model's part."


@dataclass(frozen=True)
class Sources:
    """What is read beside the model."""

    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to learn from. Default: the bundled text."),
    ] = None
    tasks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON lines {"prompt": …, "answer": …}, for what learns from answers. Default: halves of the text.',
        ),
    ] = None
    draft: Annotated[
        Path | None,
        typer.Option(metavar="DRAFT", help="Draft model, for the head of a length."),
    ] = None
    aux: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A smaller model, for kv-prediction.")
    ] = None
    target: Annotated[
        Path | None,
        typer.Option(
            metavar="TARGET",
            help="The model that a draft model is tuned to; MODEL is the draft model.",
        ),
    ] = None
    reference: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A draft model tuned by distillspec, for adaspec."),
    ] = None


@dataclass(frozen=True)
class Tuning:
    """How a model is tuned."""

    divergence: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="From the target: forward-kl, reverse-kl, jsd or tvd. Default: forward-kl.",
        ),
    ] = None
    beta: Annotated[
        float | None, typer.Option(metavar="X", help="The target's weight in jsd. Default: 0.5.")
    ] = None
    on_policy: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Share of steps whose text the draft model draws. Default: 0."
        ),
    ] = None
    keep: Annotated[
        float | None,
        typer.Option(metavar="X", help="Share of tokens that adaspec learns. Default: 0.4."),
    ] = None
    block: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of a block, for cllm, set-block and lud. Default: 16, of lud 4.",
        ),
    ] = None
    mask: Annotated[
        int | None,
        typer.Option(
            metavar="ID",
            help="Token that stands for one that is not known, for set-block and lud. Default: the model's own mask, "
            "or the token that it pads with.",
        ),
    ] = None
    sure: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Probability from which lud counts a token to a unit. Default: 0.5."
        ),
    ] = None
    heads: Annotated[
        int | None,
        typer.Option(metavar="N", help="KV heads of which mha2gqa makes one. Default: 2."),
    ] = None


@dataclass(frozen=True)
class TrainingOptions:
    """How long and on how much it learns."""

    minutes: Annotated[float, typer.Option(metavar="N", help="Training time of all sessions.")] = (
        30.0
    )
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Batches that a table is measured on. {_DEFAULT}"),
    ] = None
    length: Annotated[
        int | None, typer.Option(metavar="N", help=f"Tokens of a row. {_DEFAULT}")
    ] = None
    rows: Annotated[int | None, typer.Option(metavar="N", help=f"Rows of a batch. {_DEFAULT}")] = (
        None
    )
    inner: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Width of a gate or a head, or rank of a coprocessor's products. {_DEFAULT}",
        ),
    ] = None
    budget: Annotated[
        int | None, typer.Option(metavar="N", help=f"Tokens that a head should hold. {_DEFAULT}")
    ] = None
    pressure: Annotated[
        float | None,
        typer.Option(metavar="X", help=f"Weight of what goes beyond the budget. {_DEFAULT}"),
    ] = None
    rate: Annotated[float | None, typer.Option(metavar="X", help=f"Learning rate. {_DEFAULT}")] = (
        None
    )
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of products with weights: float32 or bfloat16, which is faster where the processor multiplies it. "
            "Default: float32.",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where heads that draft learn: cpu or cuda. Default: cpu.",
        ),
    ] = None
    seed: options.Seed = None
    threads: options.Threads = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was left (Ctrl-C).")
    ] = False


@options.grouped
def train(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="A method with a trained part or a table (accel-compile recipes marks them), a recipe file that "
            "names one with its options, or a tuning: of a draft model (distillspec, adaspec) or of a model (cllm, "
            "set-block, lud, mha2gqa).",
        ),
    ],
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face model directory, a GGUF file, or the id of a repository in the Hugging Face cache.",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the part to this file, which a recipe names as `trained` or `table`. Default: the user's "
            "cache, where builds find it.",
        ),
    ] = None,
    sources: Sources,
    effort: TrainingOptions,
    tuning: Tuning,
    tokenizer: options.Tokenizer = None,
    trust_remote_code: options.TrustRemoteCode = False,
    download: options.Download = False,
) -> None:
    """Train or measure the part that a method needs of a model, which stays as it is.

    Builds find the part again by model and method; nothing has to be named. Statistics (tables) are measured in one
    reading of a text, and build --train makes them too. What is trained takes --minutes; Ctrl-C keeps what was
    learnt, for --resume. A tuning writes a model of its own to --out: a draft model, which build takes as --draft,
    or one to build.
    """
    with extra("compile"):
        from accel.compiler.train.train import train as make

    given: dict[str, Any] = {"out": out, **vars(sources), **vars(effort), **vars(tuning)}
    with training("train") as (progress, say):
        made = make(
            method,
            model,
            {name: value for name, value in given.items() if value is not None},
            tokenizer=tokenizer,
            download=download,
            trust_remote_code=trust_remote_code,
            progress=progress,
            say=say,
        )
    if made.file is None:
        typer.echo(f"{method}: {made.message}", err=True)
        raise typer.Exit(130)
    typer.echo(f"{made.file}: {made.message}")
