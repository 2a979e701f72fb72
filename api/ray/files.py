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

from accel.ir.errors import InputError

ROWS = 1024  # of a part


def found(path: Path) -> tuple[list[Path], str]:
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


_READ: dict[str, Callable[[list[str]], Dataset]] = {
    ".parquet": lambda files: ray.data.read_parquet(files),
    ".jsonl": lambda files: ray.data.read_json(files, lines=True),
    ".csv": lambda files: ray.data.read_csv(files),
}
_WRITE: dict[str, Callable[[pa.Table, Path], Any]] = {
    ".parquet": pyarrow.parquet.write_table,
    ".jsonl": _lines,
    ".csv": pyarrow.csv.write_csv,
}
