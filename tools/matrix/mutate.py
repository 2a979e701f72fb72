"""Which mistakes in method files the default tests do not notice: a table of the mutants that survive.

    python tools/matrix/mutate.py passes/kv/score runtime/verify --most 20

A mutant (`mutants.py`) is written into a copy of the working tree, never in place. The tests that name the method run
on it, `tests/test_<name>.py` first, each in a process forked from one that has torch and the like imported; the first
that fails catches it. Results are appended to `--out`; a run goes on where one of the same sources ended.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = [
    "passes/kv/score", "passes/kv/keep", "passes/kv/refine", "passes/kv/select", "passes/kv/codec",
    "passes/prefill/prune", "passes/prefill/sparse", "passes/depth", "runtime/kv/budget",
    "runtime/kv/when", "runtime/verify", "runtime/draft", "runtime/sample", "runtime/length",
    "runtime/canvas",
]  # fmt: skip
SLACK = 30.0  # seconds that a mutant may take beyond three times its tests


@dataclass(frozen=True)
class Tests:
    """What runs on a file's mutants: its own, its axis' laws and whoever imports it, whole; of others, by `words`, what
    names it.
    """

    own: tuple[str, ...]
    other: tuple[str, ...]
    words: str

    def calls(self) -> Iterator[list[str]]:
        """Arguments of pytest."""
        if self.own:
            yield [*self.own]
        if self.other:
            yield [*self.other, "-k", self.words]


def tests_of(root: Path, file: Path) -> Tests:
    """By the name that a recipe has for the method, or the file's own; in texts, as many names are words."""
    names = {file.stem, file.stem.replace("_", "-")}
    named = re.compile(r"(?<=[\"'=])(" + "|".join(map(re.escape, names)) + r")(?![\w-])")
    axis, module = file.parent.name, ".".join(("accel", *file.with_suffix("").parts))
    imported = re.compile(rf"(?<![\w.]){re.escape(module)}(?![\w.])")
    own, other, words = [], [], set(names)
    for test in sorted((root / "tests").rglob("test_*.py")):
        where = test.relative_to(root).as_posix()
        if "/parity/" in where:
            continue
        text = test.read_text(encoding="utf-8")
        law = "/laws/" in where and test.stem.endswith(f"_{axis}")
        if law or test.stem == f"test_{file.stem}" or imported.search(text):
            own.append(where)
        elif named.search(text) or ("/laws/" in where and re.search(rf"\b{axis}\b", text)):
            other.append(where)
            words |= {name for name, source in functions(text) if named.search(source)}
    return Tests(tuple(own), tuple(other), " or ".join(sorted(words)))


def functions(text: str) -> Iterator[tuple[str, str]]:
    """The tests at the top of a file, each with its source; without parameters, whose ids have the name."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, "\n".join(ast.unparse(part) for part in node.body)


def copied(root: Path, place: Path) -> None:
    """The files of the working tree that git knows or does not ignore, with links of their own."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True
    ).stdout  # fmt: skip
    for name in filter(None, listed.decode().split("\0")):
        if (root / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name)
    subprocess.run([sys.executable, str(place / "tools/links.py")], check=True)


def run(place: Path, tests: Tests, limit: float) -> str:
    """`passed`, `failed` or `timeout`, of the tests in a child that imports the copied tree."""
    child = os.fork()
    if not child:
        os.setsid()
        _child(place, tests)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def _child(place: Path, tests: Tests) -> None:
    """Never returns: ends with 0 where all tests pass, or none is there."""
    os.chdir(place)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.path[:0] = [str(place / "build/links"), str(place)]
    sys.dont_write_bytecode = True
    import pytest

    try:
        for call in tests.calls():
            found = pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *call])
            if found not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                os._exit(1)
        os._exit(0)
    except BaseException:
        os._exit(1)


def chosen(source: str, most: int) -> list[Mutant]:
    """Some mutants of a file, always the same, in its order."""
    found = list({(m.line, m.column, m.kind): m for m in mutants(source)}.values())
    if most and len(found) > most:
        found = random.Random(len(source)).sample(found, most)
    return sorted(found, key=lambda m: (m.line, m.column, m.kind))


def files(names: list[str]) -> Iterator[Path]:
    """The Python files of these, templates and packages' own left out."""
    for name in names:
        path = ROOT / name
        if not path.exists():
            raise SystemExit(f"mutate.py: no file or folder {name} in {ROOT}")
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            if file.name not in ("__init__.py", "_template.py"):
                yield file.relative_to(ROOT)


def known(out: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(file, hash of its source, mutant) -> what was found of it; of `tests`, how long they take."""
    if not out.exists():
        return {}
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {(row["file"], row["source"], row["mutant"]): row for row in rows}


def measured(place: Path, file: Path, most: int, out: Path) -> Iterator[dict[str, Any]]:
    """Of each mutant of a file a row, the known ones as they are."""
    source = (place / file).read_text(encoding="utf-8")
    tests, before = tests_of(place, file), known(out)
    mark = hashlib.sha256(source.encode()).hexdigest()[:12]

    def noted(mutant: str, **row: Any) -> dict[str, Any]:
        found = {"file": file.as_posix(), "source": mark, "mutant": mutant, **row}
        with out.open("a", encoding="utf-8") as written:
            written.write(json.dumps(found) + "\n")
        return found

    plain = before.get((file.as_posix(), mark, "tests"))
    if plain is None:
        start = time.monotonic()
        result = run(place, tests, 3600)
        plain = noted("tests", result=result, seconds=time.monotonic() - start)
    if plain["result"] != "passed":
        print(f"{file}: its tests fail without a change; mend them first", file=sys.stderr)
        return
    for mutant in chosen(source, most):
        if (row := before.get((file.as_posix(), mark, mutant.name))) is None:
            (place / file).write_text(mutant.source, encoding="utf-8")
            try:
                found = run(place, tests, 3 * plain["seconds"] + SLACK)
            finally:
                (place / file).write_text(source, encoding="utf-8")
            result = "survives" if found == "passed" else "caught"
            row = noted(mutant.name, result=result, before=mutant.before, after=mutant.after)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=DEFAULT, help="files or folders of methods")
    parser.add_argument("--most", type=int, default=0, help="mutants of a file; 0: all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl")
    options = parser.parse_args()
    for module in ("torch", "numpy", "pytest", "hypothesis", "transformers", "onnxruntime"):
        __import__(module)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        copied(ROOT, place)
        print("| file | caught | survive | |\n|---|---:|---:|---|")
        for file in files(options.paths):
            rows = list(measured(place, file, options.most, options.out))
            left = [row for row in rows if row["result"] == "survives"]
            print(f"| `{file}` | {len(rows) - len(left)} | {len(left)} | |", flush=True)
            for row in left:
                told = f"`{row['before']}` → `{row['after']}`".replace("|", "\\|").replace(
                    "\n", " "
                )
                print(f"| | | | line {row['mutant']}: {told} |", flush=True)


if __name__ == "__main__":
    main()
