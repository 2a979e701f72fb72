"""Recipes as TOML files: a table is an axis, `use` names the method, the other keys are its options."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from accel.ir.errors import RecipeError, shown, unknown

_HEADER = ("about", "when", "papers")
_GROUP = "_group.toml"
_ARXIV = re.compile(r"(.+) \(arXiv:(\d{4}\.\d{4,5})\)")  # a paper as a recipe writes it
_RENAMED = {"bit-exact": "batch-invariant"}


@dataclass(frozen=True)
class Recipe:
    """One method per axis, with options. Names are resolved when the recipe is assembled.

    Attributes: `name`; `tables` (axis -> table with `use` and options); `about`: what it does; `when`: what must
    hold for it to be the right choice ("take it when …"); `papers`: titles; `arxiv`: title -> number on arXiv, of
    those that a file writes as "Title (arXiv:2404.14469)".
    """

    name: str = "recipe"
    about: str = ""
    when: str = ""
    papers: tuple[str, ...] = ()
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)  # axis -> {"use": …, options}
    arxiv: dict[str, str] = field(default_factory=dict)

    @property
    def cited(self) -> list[str]:
        """The papers as a file writes them: with their numbers on arXiv."""
        return [f"{p} (arXiv:{self.arxiv[p]})" if p in self.arxiv else p for p in self.papers]

    @staticmethod
    def load(spec: Any) -> Recipe:
        """Load a recipe from a name, a list of names (merged), a path to a TOML file, a dict, or a Recipe.

        Raises:
            RecipeError: the recipe does not exist or is invalid, or two recipes set the same axis.
        """
        if isinstance(spec, Recipe):
            return spec
        if isinstance(spec, Mapping):
            return _from_dict("recipe", dict(spec))
        if isinstance(spec, Path) or (
            isinstance(spec, str) and ("/" in spec or spec.endswith(".toml"))
        ):
            return _from_file(Path(spec))
        if isinstance(spec, str):
            found = bundled()
            if spec in _RENAMED:
                raise RecipeError(f"recipe {spec!r} is called {_RENAMED[spec]!r}; use that name")
            if spec not in found:
                raise RecipeError(unknown("recipe", spec, found) + " (see accel-compile recipes)")
            return _from_text(spec, found[spec].read_text(encoding="utf-8"))
        if isinstance(spec, Sequence):
            return merge([Recipe.load(s) for s in spec])
        raise RecipeError(
            f"recipe is a {type(spec).__name__}; give a name, a list of names, a path to a TOML file, "
            "a dict or a Recipe"
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON form, as stored in an artifact."""
        return {
            "name": self.name,
            "about": self.about,
            "when": self.when,
            "papers": self.cited,
            "tables": self.tables,
        }


@dataclass(frozen=True)
class Group:
    """A folder of bundled recipes of one purpose, as its `_group.toml` tells it: `when` is what must hold for one of
    them to be the right choice ("take these when …"); groups of lower `rank` are listed first.
    """

    name: str
    title: str
    when: str
    rank: int
    recipes: tuple[str, ...]


def groups() -> list[Group]:
    """The bundled recipes by what they are for."""
    found = []
    for folder in files("accel.recipes").iterdir():
        if names := tuple(sorted(_recipes(folder))):
            told = tomllib.loads((folder / _GROUP).read_text(encoding="utf-8"))
            found.append(Group(folder.name, told["title"], told["when"], told["rank"], names))
    return sorted(found, key=lambda group: group.rank)


def bundled() -> dict[str, Traversable]:
    """Name -> file of every bundled recipe, sorted by name."""
    folders = list(files("accel.recipes").iterdir())
    if not all(isinstance(folder, Path) for folder in folders):  # in a zip file
        return _sorted(folders)
    return dict(_unchanged(tuple((f, os.stat(str(f)).st_mtime_ns) for f in folders)))


@cache
def _unchanged(folders: tuple[tuple[Traversable, int], ...]) -> dict[str, Traversable]:
    """Of folders that last changed then: a scan takes milliseconds, and each load of a recipe asks for one."""
    return _sorted(folder for folder, _ in folders)


def _sorted(folders: Iterable[Traversable]) -> dict[str, Traversable]:
    return dict(sorted(pair for folder in folders for pair in _recipes(folder).items()))


def _recipes(folder: Traversable) -> dict[str, Traversable]:
    """Name -> file of the recipes of a folder of `accel.recipes`."""
    if not folder.is_dir():
        return {}
    return {
        item.name.removesuffix(".toml"): item
        for item in folder.iterdir()
        if item.name.endswith(".toml") and item.name != _GROUP
    }


def merge(recipes: Sequence[Recipe]) -> Recipe:
    """Merge recipes. Raises RecipeError if two set the same axis differently."""
    tables: dict[str, dict[str, Any]] = {}
    owner: dict[str, str] = {}
    for recipe in recipes:
        for axis, table in recipe.tables.items():
            if axis in tables and tables[axis] != table:
                raise RecipeError(
                    f"recipes '{owner[axis]}' and '{recipe.name}' both set {axis} "
                    f"({shown(tables[axis].get('use'))} and {shown(table.get('use'))}); leave one out"
                )
            tables[axis] = table
            owner[axis] = recipe.name
    return Recipe(
        "+".join(r.name for r in recipes) or "recipe",
        "; ".join(r.about for r in recipes if r.about),
        " and ".join(r.when for r in recipes if r.when),
        tuple(dict.fromkeys(p for r in recipes for p in r.papers)),
        tables,
        {title: number for r in recipes for title, number in r.arxiv.items()},
    )


def _from_file(path: Path) -> Recipe:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such recipe file; give an existing TOML file, or a name (see accel-compile recipes)"
        ) from None
    except IsADirectoryError:
        raise RecipeError(
            f"{path}: is a folder, and a recipe is a TOML file or a name (see accel-compile recipes); if this is "
            "the model, give it in the model's place"
        ) from None
    except (
        OSError,
        ValueError,
    ) as error:  # ValueError: a NUL in the path, or text that is not UTF-8
        raise RecipeError(f"{path}: cannot be read as a recipe: {error}") from error
    return _from_text(path.stem, text, str(path))


def _from_text(name: str, text: str, where: str = "") -> Recipe:
    try:
        return _from_dict(name, tomllib.loads(text), where or f"{name}.toml")
    except RecursionError:
        raise RecipeError(
            f"{where or name}: not valid TOML: tables or lists lie too deep"
        ) from None
    except ValueError as error:  # integers of thousands of digits, too
        raise RecipeError(f"{where or name}: not valid TOML: {error}") from error


def _from_dict(name: str, data: dict[str, Any], where: str = "recipe") -> Recipe:
    about, when, papers = data.get("about", ""), data.get("when", ""), data.get("papers", [])
    name = data.get("name", name)
    if not (isinstance(name, str) and isinstance(about, str) and isinstance(when, str)):
        raise RecipeError(f"{where}: name, about and when must be strings")
    if not isinstance(papers, (list, tuple)) or not all(isinstance(p, str) for p in papers):
        raise RecipeError(f"{where}: papers must be a list of titles")
    tables: dict[str, dict[str, Any]] = {}
    body = {k: v for k, v in data.items() if k not in (*_HEADER, "name")}
    _flatten(where, "", body.pop("tables", body), tables)
    found = {m[1]: m[2] for m in map(_ARXIV.fullmatch, papers) if m}
    titles = tuple(m[1] if (m := _ARXIV.fullmatch(p)) else p for p in papers)
    return Recipe(name, about, when, titles, tables, found)


def _flatten(where: str, axis: str, data: Any, tables: dict[str, dict[str, Any]]) -> None:
    """Nested TOML tables -> {"kv.score": {"use": …}}."""
    if not isinstance(data, Mapping):
        raise RecipeError(f"{where}: '{axis}' is a {type(data).__name__}, not a table with `use`")
    if wrong := [key for key in data if not isinstance(key, str)]:
        raise RecipeError(f"{where}: key {shown(wrong[0])} of '{axis}' is not a string")
    if "use" in data:
        if not isinstance(data["use"], str):
            raise RecipeError(
                f"{where}: {axis}.use is {shown(data['use'])}, not the name of a method"
            )
        tables[axis] = dict(data)
        return
    if axis and not any(isinstance(v, Mapping) for v in data.values()):
        raise RecipeError(f'{where}: table [{axis}] has no `use`; name a method: use = "name"')
    for key, value in data.items():
        _flatten(where, f"{axis}.{key}" if axis else key, value, tables)
