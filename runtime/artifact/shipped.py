"""Files that methods of the loop read as they run (`Method.files`): a build copies them into the artifact, and a load
finds them there.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from accel.ir.axis import Axis
from accel.ir.errors import ArtifactError, RecipeError, shown
from accel.runtime.artifact.manifest import DATA_FOLDER

Tables = dict[str, dict[str, Any]]


def ship(tables: Tables, axes: Collection[str], folder: Path) -> Tables:
    """Copy what the tables of these axes name into an artifact's folder: the tables, which then name the copies."""
    tables = deepcopy(tables)
    for where, table, option in _named(tables, axes):
        source = _source(where, table, option)
        name = f"{DATA_FOLDER}/{where}.{option}{source.suffix}"
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
        table[option] = name
    return tables


def check_shipped(tables: Tables, axes: Collection[str]) -> None:
    """Raise RecipeError where a file that would ship is not there."""
    for where, table, option in _named(tables, axes):
        _source(where, table, option)


def located(tables: Any, axes: Collection[str], folder: Path, files: Collection[str]) -> Any:
    """An artifact's tables with the places of what it ships, which its manifest lists as `files`. Raises ArtifactError
    where they name another file: an artifact reads nothing outside its folder.
    """
    tables = deepcopy(tables)
    for where, table, option in _named(tables, axes):
        name = table[option]
        if name not in files and not any(file.startswith(f"{name}/") for file in files):
            raise ArtifactError(
                f"{folder}: recipe: {where}.{table['use']}: {option} = {shown(name)} is no file of the artifact; do "
                "not trust it, or build it again"
            )
        table[option] = str(folder / name)
    return tables


def _source(where: str, table: Mapping[str, Any], option: str) -> Path:
    path = Path(table[option]).expanduser()
    if not path.exists():
        raise RecipeError(
            f"{where}.{table['use']}: {option} = {table[option]!r} does not exist, or was moved; give the path of the "
            "file or folder, which the build copies into the artifact"
        )
    return path


def _named(tables: Tables, axes: Collection[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(place, table, option) of each option that names a file, also of methods within methods. What is no table is
    left to who builds the methods.
    """
    for axis in axes if isinstance(tables, dict) else ():
        yield from _in(axis, tables.get(axis), axis)


def _in(axis: str, table: Any, where: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    if not isinstance(table, dict) or not isinstance(table.get("use"), str):
        return
    method = Axis(axis, f"accel.runtime.{axis}").method(table["use"])
    for option in method.files:
        if isinstance(name := table.get(option), str) and name:
            yield where, table, option
    for value in table.values():
        if isinstance(value, list):
            for n, inner in enumerate(value):
                yield from _in(axis, inner, f"{where}.{n}")
