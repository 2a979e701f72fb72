"""llguidance recurses as deep as a grammar goes, and without an end on a few. An overflow of the stack ends the process
that compiles, such as a server with all its requests; so another process compiles each grammar first.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from accel.ir.errors import InputError
from accel.runtime.inputs.child import ChildDied, ChildLate, Children

_CHILD = Path(__file__).with_name("grammar_child.py")
PATIENCE = 30.0  # seconds that a grammar may compile
_LONGEST = 1 << 20  # characters of a grammar
_MEMORY = 2 << 30  # bytes of addresses
_ADVICE = "nest it and chain its references less, and keep bounds of integers within ±2^53"


def try_grammar(library: Any, kind: str, source: str, overrides: dict[str, Any]) -> None:
    """Compile it elsewhere. Whether it is valid is not asked. Raises InputError where that process did not live."""
    if len(source) > _LONGEST:
        raise InputError(
            f"structured_outputs: {kind} has {len(source):,} characters; give at most {_LONGEST:,}"
        )
    packages = str(Path(library.__file__).parent.parent)
    if wrong := _trial(packages, kind, source, json.dumps(overrides)):
        raise InputError(f"structured_outputs: {kind} {wrong}; {_ADVICE}")


@lru_cache(maxsize=256)
def _trial(packages: str, kind: str, source: str, overrides: str) -> str:
    given = {"kind": kind, "source": source, "overrides": json.loads(overrides)}
    try:
        _children().ask(given, PATIENCE, [packages])
    except ChildLate:
        return f"takes llguidance more than {PATIENCE:.0f} seconds to compile"
    except ChildDied as error:
        return f"is more than llguidance can compile: it ended a process that tried ({error})"
    return ""


@lru_cache(maxsize=1)
def _children() -> Children:
    return Children(_CHILD, memory=_MEMORY)
