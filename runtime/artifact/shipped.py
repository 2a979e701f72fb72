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
from accel.ir.errors import RecipeError
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
    """An artifact's tables with the places of what it ships, which its manifest lists as `files`."""
    if not any(name.startswith(f"{DATA_FOLDER}/") for name in files):
        return tables
    tables = deepcopy(tables)
    for _, table, option in _named(tables, axes):
        name = table[option]
        if name in files or any(file.startswith(f"{name}/") for file in files):
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
    """(place, table, option) of each option that names a file, also of methods within methods."""
    for axis in axes:
        if axis in tables:
            yield from _in(axis, tables[axis], axis)


def _in(axis: str, table: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    method = Axis(axis, f"accel.runtime.{axis}").method(table["use"])
    yield from ((where, table, option) for option in method.files if table.get(option))
    for value in table.values():
        if isinstance(value, list):
            for n, inner in enumerate(value):
                if isinstance(inner, dict) and "use" in inner:
                    yield from _in(axis, inner, f"{where}.{n}")
