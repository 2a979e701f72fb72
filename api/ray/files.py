"""Files of rows: Parquet, JSON lines and CSV, read by Ray and written one part after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray
from ray.data import Dataset

from accel.ir.errors import InputError, shown

ROWS = 1024  # of a part


def input_files(path: Path) -> tuple[list[Path], str]:
    """A file, or a folder's files in their order, and the ending that says their format. Raises InputError."""
    files = [path]
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.is_file() and one.name[0] not in "._")
    elif not path.exists():
        raise InputError(f"{path}: there is no such file; give one, or a folder")
    endings = {one.suffix.lower() for one in files}
    kind = endings.pop() if len(endings) == 1 else ""
    if kind not in _READ:
        told = "files of no one kind" if path.is_dir() else "an unknown ending"
        raise InputError(f"{path} has {told}; give files that end in {', '.join(_READ)}")
    return files, kind


def read(files: list[Path], kind: str) -> Dataset:
    """The rows of all."""
    return _READ[kind]([str(one.resolve()) for one in files])


def write(tables: Iterator[pa.Table], folder: Path, kind: str) -> Iterator[int]:
    """Write each table as a part of a folder, in the format of this ending; gives the rows written so far. Raises
    InputError.
    """
    rows = 0
    for i, table in enumerate(tables):
        part = folder / f"part-{i:05}{kind}"
        try:
            _WRITE[kind](table, part)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError, ValueError) as error:
            raise InputError(
                f"the rows cannot be written as {kind}: {error}; give a Parquet file"
            ) from error
        rows += table.num_rows
        yield rows


def _lines(table: pa.Table, part: Path) -> None:
    with part.open("w", encoding="utf-8") as file:
        for row in table.to_pylist():
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _read_lines(files: list[str]) -> Dataset:
    """JSON lines as they are, null where a row lacks a column. (What Ray has for them makes a number of "007", a date
    of what stands in `created_at`, and NaN of what is lacking.) Raises InputError.
    """
    schema = pa.schema([])
    for rows in _parts(files):
        names = dict.fromkeys(name for row in rows for name in row)
        for name in names:
            try:
                found = pa.schema({name: pa.array([row.get(name) for row in rows]).type})
                schema = pa.unify_schemas([schema, found], promote_options="permissive")
            except (pa.ArrowException, OverflowError) as error:
                raise InputError(f"column {name!r} is not of one type: {error}") from error
    parts = [ray.put(pa.Table.from_pylist(rows, schema)) for rows in _parts(files)]
    return ray.data.from_arrow_refs(parts or [ray.put(schema.empty_table())])


def _parts(files: list[str]) -> Iterator[list[dict[str, Any]]]:
    """The objects of all lines, a part after the other. Raises InputError."""
    part: list[dict[str, Any]] = []
    for name in files:
        with Path(name).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line, parse_constant=_no_constant)
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{name}, line {number}: not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise InputError(f"{name}, line {number}: give an object, not {shown(row)}")
                part.append(row)
                if len(part) == ROWS:
                    yield part
                    part = []
    if part:
        yield part


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON; write null")


_READ: dict[str, Callable[[list[str]], Dataset]] = {
    ".parquet": lambda files: ray.data.read_parquet(files),
    ".jsonl": _read_lines,
    ".csv": lambda files: ray.data.read_csv(files),
}
_WRITE: dict[str, Callable[[pa.Table, Path], Any]] = {
    ".parquet": pyarrow.parquet.write_table,
    ".jsonl": _lines,
    ".csv": pyarrow.csv.write_csv,
}
