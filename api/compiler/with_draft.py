"""A recipe that drafts with what lies at a path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from accel.compiler.draft_build import PLAIN
from accel.compiler.load.heads._folder import head_at
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe

_MODEL = "model"


def with_draft(recipe: Any, path: str | Path) -> Recipe:
    """The recipe with a drafter for what lies at a path: a head, by its format, or a smaller model. Raises RecipeError
    where the recipe drafts in another way.
    """
    found = Recipe.load(recipe)
    named = found.tables.get("draft", {}).get("use", "")
    head = head_at(Path(path).expanduser(), method=named)
    use = _MODEL if head is None else head.format.method
    table = found.tables.get("draft", {"use": use})
    if table["use"] != use:
        raise RecipeError(
            f"recipe '{found.name}': it drafts with draft = {table['use']}, and {path} is for draft = {use}; leave "
            "[draft] out of the recipe, or give no draft=…"
        )
    others = {axis: t for axis, t in found.tables.items() if (axis, t["use"]) != ("loop", PLAIN)}
    return replace(found, tables={**others, "draft": {**table, "path": str(path)}})
