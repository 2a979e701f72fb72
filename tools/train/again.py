"""Make the trained parts and tables of the bundled model again, each as the file that is there was made.

    python tools/train/again.py                what was not made of the weights that are bundled now
    python tools/train/again.py leank trim-kv  some
    python tools/train/again.py --list         the command of each

A file tells its options. What is made lies in build/parts, in a folder for each set of weights, until it is whole;
then it takes the old one's place. As many run at a time as there are cores, each on one thread; what they print is in
NAME.log there. A run that was stopped goes on. The draft model, which lengths' heads are for, and the diffusion model
are made before: see api/reference/README.md. `stand.json` is tools/tree_template.py's.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
import typer
from reference_data import REFERENCE
from results import folder
from safetensors import safe_open

from accel.compiler.train.run import state_of

OPTIONS = ("budget", "pressure", "length", "rows", "samples", "inner", "rate", "seed")
PART = Path(__file__).with_name("part.py")


def bundled() -> dict[str, dict[str, Any]]:
    """Method -> what its bundled file tells of how it was made."""
    found = {}
    for path in sorted(REFERENCE.glob("*.safetensors")):
        with safe_open(path, "np") as inside:
            about = inside.metadata() or {}
        if "told" in about:
            found[about["method"]] = json.loads(about["told"])
    return found


def made(method: str) -> Path:
    return folder("parts") / f"{method}.safetensors"


def command(method: str, told: dict[str, Any]) -> list[str]:
    """What makes it again: as long a training, where there was one."""
    found = ["python", "tools/train/part.py", method, "--threads", "1", "--out", str(made(method))]
    for name in OPTIONS:
        found += [f"--{name}", told[name]] if name in told else []
    if {"rate", "seconds"} <= told.keys():
        found += ["--minutes", f"{float(told['seconds']) / 60:g}"]
    return found


def make(name: str, line: list[str]) -> bool:
    """Run a command, put its part into its place, and say how long it took; whether it is there."""
    start, log = time.monotonic(), made(name).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    going_on = ["--resume"] if state_of(made(name)).exists() else []
    with log.open("a") as out:
        done = subprocess.run(
            [sys.executable, str(PART), *line[2:], *going_on], check=False, stdout=out, stderr=out
        )
    if done.returncode or not made(name).exists():
        print(f"{name}: FAILED, see {log}", flush=True)
        return False
    new = REFERENCE / f".{name}.new"
    shutil.copyfile(made(name), new)
    new.replace(REFERENCE / made(name).name)
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    return True


def main(
    methods: Annotated[list[str] | None, typer.Argument(help="By default all.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="At a time.")] = os.cpu_count() or 1,
    listed: Annotated[bool, typer.Option("--list", help="Run nothing.")] = False,
) -> None:
    """Make them again, those that take longest first; one that fails does not keep the others from it."""
    there = bundled()
    if wrong := [name for name in methods or () if name not in there]:
        raise typer.BadParameter(f"there is no part of {wrong[0]!r}; there are {', '.join(there)}")
    wanted = sorted(methods or there, key=lambda name: -float(there[name].get("seconds", 0)))
    todo = {}
    for name in wanted:
        if made(name).exists():
            print(f"{name}: made", flush=True)
        else:
            todo[name] = command(name, there[name])
            print(shlex.join(todo[name]), flush=True)
    if listed:
        return
    with ThreadPoolExecutor(jobs) as pool:
        whole = list(pool.map(make, todo, todo.values()))
    if not all(whole):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
