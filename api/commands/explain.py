"""explain: what a recipe does to a model, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel.commands import options
from accel.commands.console import console, options_table, pairs, print_json, progress, table
from accel.ir.errors import extra

if TYPE_CHECKING:
    from accel.compiler.explain import Explanation

EXAMPLES = """\b
Examples:
  accel-compile explain snapkv                        # on the bundled model
  accel-compile explain edge ./my-model --out edge.html
  accel-compile explain my.toml ./config.json --max-context 32768
  accel-compile explain shortgpt llama --no-speed     # a transformers model type in its default size
"""


def explain(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="Recipe name or TOML file; A+B merges two of either."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model directory, a GGUF file, a cached repository (org/name), a config.json, a transformers model "
            "type, or package.module:callable. "
            "Default: the bundled model.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write an HTML page with diagrams of one layer."),
    ] = None,
    max_context: options.MaxContext = 2048,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed/--no-speed",
            help="Predict tokens per second. The first use measures this machine for a few seconds.",
        ),
    ] = True,
    threads: options.Threads = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Show what a recipe does to a model, before it is built.

    Shows its methods and options, the change that each pass makes to the graph, one layer before and
    after, the grade, bytes of KV cache and weights per token, and the predicted speed. If the model does
    not support the recipe: the reason and the nearest recipe that works. Large models are estimated
    from a few layers; their weights are not read. Exits 1 if the recipe is refused.
    """
    from accel.commands.demo import reference

    with extra("compile"):
        from accel.compiler.explain import explain as told
        from accel.compiler.explain.page import write_page

    names = [recipe] if Path(recipe).is_file() else recipe.split("+")
    with progress("explain") as show:
        explained = told(
            names[0] if len(names) == 1 else names,
            reference() if model is None else model,
            max_context=max_context,
            speed=speed,
            threads=threads,
            progress=show,
            trust_remote_code=trust_remote_code,
        )
    if out is not None:
        write_page(out, explained)
    if as_json:
        print_json(_json(explained))
    else:
        _show(explained, out, options.speech(context))
    if explained.refused:
        raise typer.Exit(1)


def _json(e: Explanation) -> dict[str, Any]:
    """All of it, for programs."""
    from accel.compiler.explain.page import nearest

    near = (
        e.nearest.recipe.to_json()
        if e.nearest is not None and e.nearest.recipe is not None
        else None
    )
    prompts = e.cache.tokens if e.cache is not None else ()
    kept = {
        "recipe",
        "methods",
        "rewrites",
        "nearest",
        "pictures",
        "cache",
        "cache_base",
        "weights",
        "speed",
    }
    return {
        **{k: v for k, v in asdict(e).items() if k not in (*kept, "weights_base", "rates")},
        "recipe": e.recipe.to_json(),
        "methods": [asdict(m) for m in e.methods],
        "rewrites": [asdict(r) for r in e.rewrites],
        "nearest": None if e.nearest is None else {"said": nearest(e), "recipe": near},
        "kv_bytes": {
            n: {"base": e.cache_base.bytes(n), "recipe": e.cache.bytes(n)}
            for n in prompts
            if e.cache is not None and e.cache_base is not None
        },
        "weights_bytes": None if e.weights is None else e.weights.kinds,
        "tokens_per_second": {
            n: [getattr(x, "tokens_per_second", None) for x in pair] for n, pair in e.speed.items()
        },
    }


def _show(e: Explanation, out: Path | None, say: Callable[[str], str]) -> None:
    """`say`: a reason in the command line's words."""
    from accel.compiler.explain import page

    pairs([
        ("recipe", e.recipe.name),
        ("about", e.recipe.about),
        *(("paper", paper) for paper in e.recipe.cited),
        ("model", e.model),
        ("grade", page.grade(e)),
        *(("note", note) for note in e.notes),
    ])  # fmt: skip
    for method in e.methods:
        typer.echo(f"\n[{method.axis}] {method.use}: {method.about}")
        if method.details and method.details != method.about:
            typer.echo(f"  {method.details}")
        options_table(method.options)
    if e.refused:
        typer.echo(f"\nrefused: {say(' '.join(e.refused.split()))}\n{page.nearest(e)}")
        if e.nearest is not None and e.nearest.recipe is not None:
            _toml(e.nearest.recipe.tables)
        return
    for rewrite in e.rewrites:
        typer.echo(f"\npass {rewrite.name}: {rewrite.about}\n  {page.effect(rewrite)}")
        pairs([("  not changed", say(reason)) for reason in rewrite.refused])
    _layer(e)
    columns, rows = page.costs(e)
    table(["per token", *(f">{c}" for c in columns[1:])], rows)
    for line in page.rests(e):
        typer.echo(line)
    if out is not None:
        typer.echo(f"pictures: {out}")


def _toml(tables: dict[str, dict[str, Any]]) -> None:
    """A recipe as a file would have it."""
    for axis, values in tables.items():
        typer.echo(f"  [{axis}]")
        for key, value in values.items():
            typer.echo(
                f"  {key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            )


def _layer(e: Explanation) -> None:
    """Both sides of one layer, line by line; equal lines dim."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from accel.compiler.explain import page
    from accel.compiler.explain.layer import side_by_side

    if e.pictures is None or not e.rewrites:
        return
    before, after = e.pictures
    typer.echo(f"\n{page.title(e)}")
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("base", "", e.recipe.name):
        shown.add_column(name, overflow="fold")
    for left, right, equal in side_by_side(before, after):
        style = "dim" if equal else "bold"
        mark = " " if equal else "-" if not right else "+" if not left else "~"
        shown.add_row(Text(left, style), mark, Text(right, style))
    if after.otherwise is not None:
        shown.add_section()
        for left, right, equal in side_by_side(after, after.otherwise):
            if not equal or not left:
                continue
            shown.add_row("", "|", Text(f"left out: {right}", "dim"))
    console().print(shown)
