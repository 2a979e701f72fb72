"""Make the trained parts and tables of the bundled model again, each as the file that is there was made.

    python tools/train/again.py                what was not made of the weights that are bundled now
    python tools/train/again.py leank trim-kv  some
    python tools/train/again.py --list         the command of each

A file tells its options. What is made lies in build/parts, in a folder for each set of weights, until it is whole;
then it takes the old one's place. A run that was stopped goes on. The draft model, which lengths' heads are for, and
the diffusion model are made before: see api/reference/README.md. `stand.json` is tools/tree_template.py's.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "pages"))
import typer
from reference_data import REFERENCE
from results import folder
from run import state_of
from safetensors import safe_open

OPTIONS = ("budget", "pressure", "length", "rows", "samples", "inner", "latents", "rate", "seed")
TRAIN = Path(__file__).with_name("train.py")


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
    found = ["python", "tools/train/train.py", method, "--out", str(made(method))]
    for name in OPTIONS:
        found += [f"--{name}", told[name]] if name in told else []
    if "seconds" in told:
        found += ["--minutes", f"{float(told['seconds']) / 60:g}"]
    return found


def main(
    methods: Annotated[list[str] | None, typer.Argument(help="By default all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Run nothing.")] = False,
) -> None:
    """Make them again, one after another; one that fails does not keep the others from it."""
    there, failed = bundled(), []
    if wrong := [name for name in methods or () if name not in there]:
        raise typer.BadParameter(f"there is no part of {wrong[0]!r}; there are {', '.join(there)}")
    for name in methods or there:
        line = command(name, there[name])
        if made(name).exists():
            print(f"{name}: made", flush=True)
            continue
        print(shlex.join(line), flush=True)
        if listed:
            continue
        made(name).parent.mkdir(parents=True, exist_ok=True)
        going_on = ["--resume"] if state_of(made(name)).exists() else []
        done = subprocess.run([sys.executable, str(TRAIN), *line[2:], *going_on], check=False)
        if done.returncode or not made(name).exists():
            failed.append(name)
            continue
        new = REFERENCE / f".{name}.new"
        shutil.copyfile(made(name), new)
        new.replace(REFERENCE / made(name).name)
    if failed:
        print("FAILED:", ", ".join(failed))
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
