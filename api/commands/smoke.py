"""smoke: a small clone of a model through every recipe on every target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from accel.commands import options
from accel.commands.console import error_text, pairs, print_json, progress, table
from accel.ir.errors import extra

if TYPE_CHECKING:
    from accel.compiler.smoke.smoke import Smoke

EXAMPLES = """\b
Examples:
  accel-compile smoke llama                          # a transformers model type
  accel-compile smoke ./my-model                     # its config.json; weights are not read
  accel-compile smoke ./config.json --recipe base --target onnx --json
  accel-compile smoke mypackage.model:make           # a callable that returns an nn.Module
"""


def smoke(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model directory, a GGUF file, a config.json, a transformers model type, or "
            "package.module:callable.",
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Try only this recipe. May be repeated. Default: every recipe.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Try this target: onnx, eager or triton. May be repeated. Default: onnx and eager.",
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Test a model architecture without its weights: a recipe in seconds, all in minutes.

    Builds a clone of two layers (more if the layer pattern is longer) with random weights, with every
    recipe and target, and compares it with the module in PyTorch: prefill, single-token decoding,
    several tokens after a rewind, a ragged batch. Exits 1 if a result is wrong or a build
    crashes; a refusal is not a failure.
    """
    with extra("compile"):
        from accel.compiler.smoke.smoke import smoke as try_out

    with progress("smoke") as show:
        found = try_out(model, recipe, target, trust_remote_code=trust_remote_code, progress=show)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found, options.speech(context))
    if not found.ok:
        raise typer.Exit(1)


def _show(result: Smoke, say: Callable[[str], str]) -> None:
    """`say`: a reason in the command line's words."""
    rows = [
        [
            *(cell.recipe, cell.target),
            cell.status.upper() if cell.status in ("wrong", "crashed") else cell.status,
            *(error_text(cell.error), cell.where, f"{cell.seconds:.1f}"),
        ]
        for cell in result.cells
    ]
    table(["recipe", "target", "result", ">largest error", "where", ">seconds"], rows)
    pairs([
        *((f"{c.recipe} for {c.target}: {c.status}", say(c.reason)) for c in result.cells if c.reason),
        ("clone", f"{result.model}, {result.layers or 'its own'} layers, {result.parameters:,} parameters"),
        *(("note", note) for note in result.notes),
        ("seconds", f"{result.seconds:.1f}"),
    ])  # fmt: skip
