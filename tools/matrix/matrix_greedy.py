"""Every way to guess tokens with every KV codec and depth method, in float32 and int4, on the bundled model: over 200
prompts, greedily, each token is that of plain decoding of the same artifact, or the recipe is refused.

    python tools/matrix/matrix_greedy.py [--sample N] [--seed S] [--having METHOD] [--part K/N] [--results FILE]

All of them with batch-invariant rows, so that no rounding of wide calls excuses a difference. A way is a drafter with a
shape, a rule or a length with drafts that reach it, or a loop that guesses by itself and is to give the same tokens.
Codecs with depth methods are matrix.py's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
import matrix
import matrix_loops
import numpy as np
from matrix import Case
from tokenizers import Tokenizer

from accel.compiler.load.source import open_source
from accel.compiler.over_state import over_state
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.reference.kinds import KINDS, prompts
from accel.runtime.model.compiled import CompiledModel

MODEL = Path(str(files("accel.reference")))
EACH, ROWS, LONGEST, NEW = (
    34,
    8,
    256,
    24,
)  # prompts of a kind, rows of a session, tokens of a prompt, new ones
EXACT = ("numerics", "batch-invariant")


def cases() -> list[Case]:
    """Found by folder; those that a recipe cannot be are refused as they run. Each way alone, with each codec and with
    each depth method, in turns in float32 and int4.
    """
    graph = [
        (),
        *(((axis, name),) for axis in ("kv.codec", "depth") for name in find_axes()[axis].names()),
    ]
    bits: list[tuple[tuple[str, str], ...]] = [(), (("weights", "int4"),)]
    found = []
    for turn, way in enumerate(ways()):
        found += [
            Case("bundled", (*tables, *bits[(turn + i) % 2], EXACT, *way))
            for i, tables in enumerate(graph)
        ]
        found.append(Case("bundled", (*bits[1 - turn % 2], EXACT, *way)))
    return found


def ways() -> list[tuple[tuple[str, str], ...]]:
    axes = find_axes()
    found: list[tuple[tuple[str, str], ...]] = []
    for draft in axes["draft"].names():
        trees = axes["tree"].names() if "tree" in axes["draft"].build(draft).asks else ()
        found += [(("draft", draft), ("tree", tree)) for tree in trees] or [(("draft", draft),)]
    rules = (name for name in axes["verify"].names() if matrix_loops.is_tried("verify", name))
    found += [(("verify", name),) for name in rules]
    found += [(("length", name),) for name in axes["length"].names()]
    for name in axes["loop"].names():
        loop = axes["loop"].method(name)
        if not loop.masked_diffusion and getattr(loop, "grade", None) == "lossless":
            found.append((("loop", name),))
    return found


@dataclass
class Greedy(matrix_loops.Loops):
    """Runs cases of the bundled model."""

    def _recipe(self, case: Case) -> Recipe:
        tables = {axis: {"use": name} for axis, name in case.tables}
        if "draft" in tables:
            tables["verify"] = {"use": "sample-match"}
        for axis, name in case.tables:
            tables = matrix_loops.reaching(axis, name) | tables
            if axis == "verify":  # a rule that is exact only so
                tables[axis] |= find_axes()[axis].small(name)
        return Recipe(name=str(case), tables=tables)

    def _program(self, architecture: str) -> Program:
        return _captured().copy()

    def _like_plain(self, built: CompiledModel) -> tuple[str, str]:
        """Over all prompts, some rows at a time."""
        ids, drafted, stood = _prompts(), 0, 0
        with matrix_loops.opened(built) as (plain, model):
            for start in range(0, len(ids), ROWS):
                some = ids[start : start + ROWS]
                want, got = (m.generate(some, NEW, eos=[]) for m in (plain, model))
                kind, why = matrix_loops.alike(want, got, some, None)
                if kind != "equal":
                    return kind, f"prompt {start}, {why}"
                figures = got.stats["speculation"]
                drafted, stood = drafted + figures["drafted"], stood + figures["accepted"]
        if not stood:
            return "wrong", f"of {drafted} drafted tokens none stood: nothing was tested"
        return "equal", f"{len(ids)} prompts, {drafted} tokens drafted, {stood} stood"


@cache
def _captured() -> Program:
    loaded = open_source(MODEL).load()
    return over_state(capture(loaded.model, max_context=512, stored=loaded.stored))


@cache
def _prompts() -> list[Any]:
    """Of every kind, the last tokens of long ones."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return [
        np.array(tokenizer.encode(text).ids[-LONGEST:])
        for kind in KINDS
        for text in prompts(kind, EACH)
    ]


def main() -> int:
    return matrix.main(cases(), Greedy(), Path("build/matrix-greedy.jsonl"), __doc__)


if __name__ == "__main__":
    sys.exit(main())
