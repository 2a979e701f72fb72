"""recipes: what can be done to a model, read from the recipes and the methods themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from accel.commands import options
from accel.commands.console import options_table, pairs, print_json
from accel.ir.errors import extra

if TYPE_CHECKING:
    from accel.ir.parts import Part
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
    """List all recipes by what they are for, or show one in detail.

    With NAME: its methods, papers, grade, and every option with its default and range.
    """
    from accel.ir.parts import parts
    from accel.ir.recipe import Recipe, groups

    if name is not None:
        _one(Recipe.load(name), as_json)
        return
    found = groups()
    if as_json:
        print_json([
            {
                **Recipe.load(name).to_json(),
                "group": {"title": group.title, "when": group.when},
                "parts": [one.command for one in parts_of(Recipe.load(name))],
            }
            for group in found
            for name in group.recipes
        ])  # fmt: skip
        return
    width = max(len(name) for group in found for name in group.recipes)
    typer.echo("A recipe is right when its line holds: take it when …\n")
    marked = set()
    for group in found:
        typer.echo(f"{group.title}: when {group.when}")
        for name in group.recipes:
            needed = parts_of(Recipe.load(name))
            marked |= {one.key for one in needed}
            mark = "".join(sorted({one.mark for one in needed}))
            typer.echo(f"{mark:>1} {name:<{width}}  {Recipe.load(name).when}")
        typer.echo("")
    typer.echo(
        "+ needs a table that is measured on your model, * a part that is trained, by its command:\n"
    )
    width = max(len(parts()[key].command) for key in marked)
    for one in (parts()[key] for key in sorted(marked)):
        typer.echo(f"{one.mark} {one.command:<{width}}  {one.time}")
    typer.echo("\nBuilds find them by model and method; build --train measures tables itself.\n")
    typer.echo("Details: accel-compile recipes NAME. Merge recipes with --recipe A --recipe B.")


def parts_of(recipe: Recipe) -> list[Part]:
    """The parts that must be measured or trained for a recipe's methods."""
    from accel.ir.parts import parts

    used = {table["use"]: table for table in recipe.tables.values()}
    return [
        one for key, one in parts().items() if key in used and one.only.items() <= used[key].items()
    ]


def _one(recipe: Recipe, as_json: bool) -> None:
    """Everything about one recipe. Methods are imported for it, and with them torch."""
    with extra("compile"):
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
        ("take it when", recipe.when),
        *(("paper", paper) for paper in recipe.cited),
        ("grade", plan.grade),
        *(("first", f"{one.command} ({one.time})") for one in parts_of(recipe)),
    ])  # fmt: skip
    for axis, method in plan.methods.items():
        typer.echo(f'\n[{axis}]\nuse = "{recipe.tables[axis]["use"]}"')
        typer.echo(f"  {about(method)}")
        options_table(found[axis])
