"""The recipe reference, written from the recipe files and their methods before Sphinx reads the pages."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import papers

from accel.compiler.assemble import Incompatible, Plan, assemble, assemble_alone
from accel.compiler.capabilities import table
from accel.compiler.explain.words import about, details, options
from accel.ir.errors import RecipeError
from accel.ir.invariants import Invariant, Method
from accel.ir.parts import Part, parts
from accel.ir.recipe import Group, Recipe, bundled, groups, merge

if TYPE_CHECKING:
    from sphinx.application import Sphinx

INTRO = """# Recipes

This reference is generated from the recipe files and the dataclass fields of the methods that they name.
`accel-compile recipes NAME` prints the same. A grade says how the output compares with the model's own:
see [grades](../concepts/capabilities.md#grades). Which paper is where: [papers](papers.md).
Which recipe to take: [choose a recipe](../guides/choose-a-recipe.md).

| recipe | page | grade | what it does |
|---|---|---|---|
"""


def write(folder: Path) -> None:
    """`index.md`, a page for each group of recipes, and what other pages include: invariants, when to take which."""
    recipes = {name: Recipe.load(name) for name in bundled()}
    plans = {name: assemble(recipe) for name, recipe in recipes.items()}
    clashes, refusals = _pairs(recipes)
    folder.mkdir(exist_ok=True)
    _put(folder / "invariants.inc", table() + "\n")
    _put(folder / "parts.inc", _parts(recipes))
    _put(folder / "choose.inc", "\n".join(_choice(group, plans) for group in groups()))
    index = INTRO
    for group in groups():
        page = f"# {group.title}\n\nTake one of these when {group.when}.\n\n"
        for name in group.recipes:
            plan = plans[name]
            index += (
                f"| [`{name}`](#recipe-{name}) | [{group.title}]({group.name}.md) | {plan.grade} "
            )
            index += f"| {_cell(plan.recipe.about)} |\n"
            page += _recipe(name, recipes[name], plan, clashes[name], refusals[name])
        _put(folder / f"{group.name}.md", page)
    _put(folder / "papers.md", papers.page())
    pages = "\n".join(["papers", *(group.name for group in groups())])
    _put(folder / "index.md", f"{index}\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n")


def _choice(group: Group, plans: dict[str, Plan]) -> str:
    """When to take each recipe of a group, and how its output compares."""
    lines = [f"**{group.title}**: when {group.when}", "", "| recipe | take it when | the output |"]
    lines += ["|---|---|---|"]
    for name in group.recipes:
        plan = plans[name]
        lines += [f"| [`{name}`](#recipe-{name}) | {_cell(plan.recipe.when)} | {plan.grade} |"]
    return "\n".join(lines) + "\n"


def _needed(recipe: Recipe) -> list[Part]:
    """The parts that its methods need of a model."""
    used = {table["use"] for table in recipe.tables.values()}
    return [one for key, one in parts().items() if key in used]


def _parts(recipes: dict[str, Recipe]) -> str:
    """All that must be measured or trained, for which recipes, how long it takes, and the command."""
    lines = ["| method | for the recipes | what is done | command |", "|---|---|---|---|"]
    for key, one in parts().items():
        users = [name for name, recipe in recipes.items() if one in _needed(recipe)]
        lines.append(f"| `{key}` | {_names(users)} | {one.verb[1]}: {one.time} | `{one.command}` |")
    return "\n".join(lines) + "\n"


def _pairs(
    recipes: dict[str, Recipe],
) -> tuple[dict[str, list[str]], dict[str, dict[str, list[str]]]]:
    """Of each recipe: those that set the same axis, and reason -> those that it is refused with."""
    clashes: dict[str, list[str]] = defaultdict(list)
    refusals: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one, other in combinations(recipes, 2):
        try:
            both = merge([recipes[one], recipes[other]])
        except RecipeError:
            clashes[one].append(other)
            clashes[other].append(one)
            continue
        try:
            assemble_alone(both)
        except RecipeError as error:
            reason = str(error).removeprefix(f"recipe '{both.name}': ")
            if not isinstance(error, Incompatible):  # which has no advice at its end
                reason = reason.rpartition("; ")[0]
            refusals[one][reason or str(error)].append(other)
            refusals[other][reason or str(error)].append(one)
    return clashes, refusals


def _recipe(
    name: str, recipe: Recipe, plan: Plan, same: list[str], refused: dict[str, list[str]]
) -> str:
    """One section: what it does, papers, the file, options, what it goes with."""
    lines = [f"(recipe-{name})=", f"## `{name}`", "", f"{recipe.about}.", ""]
    lines += [
        f"- Take it when {recipe.when}.",
        f"- Grade: {plan.grade}",
        f"- Axes: {', '.join(f'`{axis}`' for axis in plan.recipe.tables)}",
    ]
    lines += [
        f"- First: `{one.command}` ({one.time}); see [train parts](../guides/train-parts.md)"
        for one in _needed(recipe)
    ]
    lines += [
        f"- Paper: {papers.linked(title, recipe.arxiv.get(title, ''))}" for title in recipe.papers
    ]
    lines.append(f"- Evidence: {papers.evidence_of(name)}")
    for axis, method in plan.methods.items():
        lines += [
            "",
            f"**`{axis}` = `{plan.recipe.tables[axis]['use']}`**: {about(method)} {details(method)}".rstrip(),
        ]
        lines += _options(options(method, plan.recipe.tables[axis]))
        lines += _declared(method)
        lines += ["", f"It lacks, of its paper: {method.lacks}."] if method.lacks else []
    lines += ["", *_together(same, refused), "", ""]
    return "\n".join(lines)


def _options(found: list[dict[str, Any]]) -> list[str]:
    """A table of a method's options; nothing where it has none."""
    if not found:
        return []
    rows = ["", "| option | type | default | range | here |", "|---|---|---|---|---|"]
    for one in found:
        here = f"`{one['value']!r}`" if one["set"] else ""
        row = (
            f"`{one['name']}`",
            f"`{_cell(one['type'])}`",
            f"`{one['default']!r}`",
            one["range"],
            here,
        )
        rows.append(f"| {' | '.join(row)} |")
    return rows


def _declared(method: Method) -> list[str]:
    """What a method relies on, breaks and provides."""
    sets = {"Relies on": method.relies, "Breaks": method.breaks, "Provides": method.provides}
    names = {
        word: ", ".join(f"`{one.name}`" for one in Invariant if one in found)
        for word, found in sets.items()
        if found
    }
    return (
        ["", "; ".join(f"{word} {found}" for word, found in names.items()) + "."] if names else []
    )


def _together(same: list[str], refused: dict[str, list[str]]) -> list[str]:
    """What the recipe cannot be merged with; all others it can."""
    if not same and not refused:
        return ["Goes with every other recipe."]
    lines = ["Goes with every other recipe but these:", "", "| not with | because |", "|---|---|"]
    if same:
        lines.append(
            f"| {_names(same)} | both set the same axis; options of one file can be changed instead |"
        )
    lines += [f"| {_names(names)} | {_cell(why)} |" for why, names in refused.items()]
    return lines


def _names(names: list[str]) -> str:
    return ", ".join(f"[`{name}`](#recipe-{name})" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _put(file: Path, text: str) -> None:
    """Write what differs, so that Sphinx reads again only what changed."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls it before it looks for pages."""
    write(Path(app.srcdir) / "recipes")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
