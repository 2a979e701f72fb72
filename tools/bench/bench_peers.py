"""Engines in processes of their own: which environment has one, its model prepared, its turns taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bench_cases import Spec
from bench_worker import read_engine

WORKER = Path(__file__).with_name("bench_worker.py")
FOLDER = Path(__file__).resolve().parents[1] / "peers"
ENGINES: dict[str, ModuleType] = {f.stem: read_engine(f) for f in sorted(FOLDER.glob("*.py"))}
PROBE = "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"


class Unusable(Exception):
    """An engine cannot be measured: which, where, why, and what to do."""


@dataclass(frozen=True)
class Where:
    """What the user points at: pythons, folders of packages lent to them, a folder for models and logs."""

    pythons: tuple[str, ...]
    packages: tuple[Path, ...]
    cache: Path
    threads: int

    def environment(self) -> dict[str, str]:
        lent = os.pathsep.join(str(p.resolve()) for p in self.packages)
        own = {"OMP_NUM_THREADS": str(self.threads), "BENCH_PACKAGES": lent}
        # modules are compiled once, as where a package is installed
        return {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | own

    def find(self) -> dict[str, str]:
        """The python of each engine that is present: the first given one that has it, or else this one."""
        found: dict[str, str] = {}
        for python in (*self.pythons, sys.executable):
            has = modules(python)
            for engine, module in ENGINES.items():
                if set(module.PACKAGES) <= has:
                    found.setdefault(engine, python)
        return found

    def missing(self, engine: str) -> Unusable:
        looked = ", ".join((*self.pythons, sys.executable))
        packages, install = ", ".join(ENGINES[engine].PACKAGES), ENGINES[engine].INSTALL
        return Unusable(
            f"{engine}: no {packages} in {looked}: install {install} in an environment, and point "
            "--python at its python"
        )


def modules(python: str) -> set[str]:
    """Those that an environment has, of all that engines need."""
    names = sorted({p for e in ENGINES.values() for p in e.PACKAGES})
    try:
        done = subprocess.run(
            [python, "-c", PROBE, *names],
            capture_output=True,
            text=True,
            check=True,
            cwd=FOLDER.parent.parent,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unusable(
            f"--python {python} does not run ({error}): give the path of a python"
        ) from None
    return set(done.stdout.split())


def prepare(
    spec: Spec, python: str, checkpoint: Path, where: Where, context: int, batch: int
) -> Path:
    """The model of a spec, made where the cache has none that is up to date."""
    if spec.path:
        if not spec.path.exists():
            raise Unusable(
                f"{spec.name}: {spec.path} does not exist: give the path of a ready model"
            )
        return spec.path
    name = ENGINES[spec.engine].file_name(spec.variant, context, batch)
    if not name:
        return checkpoint
    out = where.cache / checkpoint.name / spec.engine / name
    out.parent.mkdir(parents=True, exist_ok=True)
    log = log_of(spec, checkpoint, where)
    file = FOLDER / f"{spec.engine}.py"
    words = [file, "prepare", spec.variant, checkpoint, out, context, batch]
    with log.open("w") as output:
        done = subprocess.run(
            [python, WORKER, *map(str, words)], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, env=where.environment(),
        )  # fmt: skip
    if done.returncode:
        raise Unusable(f"{spec.name} was not prepared: {last_line(log)} (all of it: {log})")
    return out


def log_of(spec: Spec, checkpoint: Path, where: Where) -> Path:
    folder = where.cache / checkpoint.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{spec.engine}-{spec.variant}.log"


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


class Peer:
    """A worker process that waits for its turn. `loaded`: seconds until its first token."""

    def __init__(self, spec: Spec, python: str, model: Path, where: Where, log: Path):
        file = FOLDER / f"{spec.engine}.py"
        words = [file, "serve", spec.variant, model, where.threads]
        self.name, self.log = spec.name, log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [python, WORKER, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=output, text=True, env=where.environment(),
            )  # fmt: skip
        try:
            self.loaded: float = self._answer()["load"]
        except BaseException:
            self.close()
            raise

    def turn(self, **shape: int) -> dict[str, Any]:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(shape) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise Unusable(
                f"{self.name} ended with {code}: {last_line(self.log)} (all of it: {self.log})"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
