"""build: a model becomes an artifact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from accel.commands import options
from accel.commands.console import print_json, progress
from accel.commands.show import show_report
from accel.compiler.report import loss_text
from accel.ir.errors import extra

EXAMPLES = """\b
Examples:
  accel-compile build ./my-model --out ./artifact
  accel-compile build org/name --download --out ./artifact
  accel-compile build ./my-model.Q4_0.gguf --out ./artifact
  accel-compile build ./my-model --recipe float16 --max-context 8192 --out ./artifact
  accel-compile build ./my-model --recipe int4-gptq --calibration my-text.txt --out ./artifact
  accel-compile build ./my-model --recipe kvquant --train --out ./artifact
  accel-compile build ./my-model --recipe int8 --draft ./my-eagle3-head --out ./artifact
  accel-compile build ./my-model --adapter poet=./poet --adapter coder=./coder --out ./artifact
  accel-compile build ./all-MiniLM-L6-v2 --max-batch 32 --out ./artifact
  accel-compile build ./my-model --recipe my.toml --dump ./text --json --out ./artifact
"""


@dataclass(frozen=True)
class Target:
    """What the artifact is for."""

    target: Annotated[str, typer.Option(metavar="NAME", help="Target to build for: onnx.")] = "onnx"
    tokenizer: options.Tokenizer = None
    max_context: options.MaxContext = 2048
    max_batch: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum batch size.")] = 8
    pooling: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Build a model that gives vectors for texts: mean, cls or last. Default: what the directory's "
            "sentence-transformers files say; without such files the model makes text.",
        ),
    ] = None


@dataclass(frozen=True)
class Steps:
    """What the build does beside."""

    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare logits with the model after the passes and in the artifact; measure quantisation loss.",
        ),
    ] = True
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Calibration text for weight quantisation and its loss. Default: the bundled text.",
        ),
    ] = None
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="What drafts for the model: the folder of a published head (EAGLE, DFlash, DFlash2, DSpark or Medusa, "
            "in its authors' layout or that of speculators; speculators' MTP; Gemma 4's assistant), or a smaller "
            "model: a directory, a GGUF file or an artifact.",
        ),
    ] = None
    merge_adapter: options.MergeAdapter = None
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=DIR",
            help="LoRA adapter that peft saved, which run --adapter NAME chooses. May be repeated.",
        ),
    ] = None
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Measure the tables that the recipe needs and that are not there for this model, on the bundled text. "
            "What must be trained: accel-compile train.",
        ),
    ] = False


@options.grouped
def build(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face model directory, a GGUF file, or the id of a repository in the Hugging Face cache "
            "(org/name). Weights quantised by GPTQ, AWQ, compressed-tensors, bitsandbytes, FP8 or llama.cpp are read "
            "as they are.",
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Output folder. An existing artifact there is replaced."),
    ],
    recipe: options.Recipes = None,
    target: Target,
    work: Steps,
    trust_remote_code: options.TrustRemoteCode = False,
    download: options.Download = False,
    dump: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the program text after each pass to this folder."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compile a model into an artifact.

    An artifact is a folder that runs without PyTorch. The build is atomic: a failed one writes nothing.
    """
    with progress("build") as watch:
        with extra("compile"):
            from accel.compiler.optimize import optimize

        compiled = optimize(
            model,
            options.recipe(recipe),
            **vars(target),
            out=out,
            **{**vars(work), "adapters": _named(work.adapters or [])},
            progress=watch,
            trust_remote_code=trust_remote_code,
            dump=dump,
            download=download,
        )
    with compiled:
        if compiled.report.get("loss"):
            for name, said in loss_text(compiled.report):
                typer.echo(f"{name}: {said}", err=True)
        if as_json:
            print_json(compiled.report)
            return
        show_report(compiled.report)
    then = f'run {out} --prompt "def quicksort("'
    if (how := compiled.facts.embedding) is not None:
        then = f"serve {out}, and POST /v1/{'embeddings' if how.pairs is None else 'rerank'}"
    typer.echo(f"\nwritten to {out}; try: accel-compile {then}")


def _named(items: list[str]) -> dict[str, Path]:
    """The adapters of NAME=DIR options."""
    found: dict[str, Path] = {}
    for item in items:
        name, equals, folder = item.partition("=")
        if not (name and equals and folder):
            raise typer.BadParameter(
                f"--adapter {item} is not NAME=DIR; give a name and the folder that peft wrote (one adapter for good: "
                "--merge-adapter DIR)"
            )
        if name in found:
            raise typer.BadParameter(f"--adapter {name} is given twice; give each another name")
        found[name] = Path(folder)
    return found
