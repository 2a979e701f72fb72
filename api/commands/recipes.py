"""recipes: what can be done to a model, read from the recipes and the methods themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from accel.commands import options
from accel.commands.console import pairs, print_json, table

if TYPE_CHECKING:
    from accel.ir.recipe import Recipe

EXAMPLES = """\b
Examples:
  accel-compile recipes
  accel-compile recipes float16
  accel-compile recipes ./my.toml
"""


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Recipe name or TOML file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List all recipes, or show one in detail.

    With NAME: its methods, papers, grade, and every option with its default.
    """
    from accel.ir.recipe import Recipe, bundled

    if name is not None:
        _one(Recipe.load(name), as_json)
        return
    found = [Recipe.load(n) for n in bundled()]
    if as_json:
        print_json([r.to_json() for r in found])
        return
    rows = [[r.name, ", ".join(r.tables), r.about] for r in found]
    table(["recipe", "sets", "about"], rows)
    typer.echo("Details: accel-compile recipes NAME. Merge recipes with --recipe A --recipe B.")


def _one(recipe: Recipe, as_json: bool) -> None:
    """Everything about one recipe. Methods are imported for it, and with them torch."""
    from accel.compiler.assemble import assemble
    from accel.compiler.explain.words import about
    from accel.compiler.explain.words import options as told

    plan = assemble(recipe)
    recipe = plan.recipe  # with what it leaves out
    found = {axis: told(m, recipe.tables[axis]) for axis, m in plan.methods.items()}
    if as_json:
        print_json({**recipe.to_json(), "grade": plan.grade, "options": found})
        return
    pairs([
        ("recipe", recipe.name),
        ("about", recipe.about),
        *(("paper", paper) for paper in recipe.papers),
        ("grade", plan.grade),
    ])  # fmt: skip
    for axis, method in plan.methods.items():
        typer.echo(f'\n[{axis}]\nuse = "{recipe.tables[axis]["use"]}"')
        typer.echo(f"  {about(method)}")
        if rows := [[o["name"], o["value"], o["default"], o["type"]] for o in found[axis]]:
            table(["option", ">value", ">default", "type"], rows)
