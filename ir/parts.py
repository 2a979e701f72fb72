"""What must be measured or trained of a model before some methods can be used: by which command, and how long it takes.

Read from the files that come with accel, so that a list of them needs neither numpy nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """How the part of a method is made: `settings` are the options by which the bundled one was."""

    key: str
    settings: Mapping[str, str]
    of_two: bool  # whether it is for a model and its draft model

    @property
    def measured(self) -> bool:
        """Whether it needs statistics only, and so can be made at build."""
        return "rate" not in self.settings

    @property
    def only(self) -> dict[str, str]:
        """The options with which alone its method needs it."""
        return {n: self.settings[n] for n in ("by",) if n in self.settings}

    @property
    def verb(self) -> tuple[str, str]:
        """What is done, and was done."""
        return ("measure", "measured") if self.measured else ("train", "trained")

    @property
    def mark(self) -> str:
        """How a list of recipes marks what needs it."""
        return "+" if self.measured else "*"

    @property
    def command(self) -> str:
        """What makes it."""
        if self.of_two:
            return f"accel-compile train {self.key} MODEL --draft DRAFT"
        return f"accel-compile train {self.key} MODEL"

    @property
    def time(self) -> str:
        """How long that takes, by default."""
        rows = int(self.settings.get("samples", 0)) * int(self.settings["rows"])
        if self.measured:
            return f"reads {rows * int(self.settings['length']):,} tokens"
        return f"goes through {rows} texts" if rows else "30 minutes (minutes=…)"


@cache
def parts() -> dict[str, Part]:
    """Every part that comes with accel, by method: all that must be measured or trained."""
    found = {}
    for file in sorted(Path(str(files("accel.reference"))).glob("*.safetensors")):
        about = _metadata(file)
        if "told" in about:
            model = json.loads(about["model"])
            of_two = isinstance(model, dict) and "draft" in model
            found[file.stem] = Part(file.stem, json.loads(about["told"]), of_two)
    return found


def part(key: str, measured: bool) -> Part:
    """How a method's part is made, also where none comes with accel."""
    plain = {"rows": "1", "length": "768", **({"samples": "64"} if measured else {"rate": ""})}
    return parts().get(key, Part(key, plain, False))


def how(part: Part) -> str:
    """What makes a part, as the end of an error."""
    at_build = ", or build with train=True" if part.measured else ""
    return f"{part.verb[0]} it: {part.command} ({part.time}){at_build}"


def bundled(key: str) -> Path:
    """The part that comes with accel, where there is one."""
    return Path(str(files("accel.reference") / f"{key}.safetensors"))


def _metadata(file: Path) -> dict[str, Any]:
    """Of a safetensors file: the length of its header in 8 bytes, and the header, which is JSON."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        found: dict[str, Any] = json.loads(opened.read(size)).get("__metadata__", {})
    return found
