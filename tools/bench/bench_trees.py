"""Trees of a draft model at equal nodes, and what look-ups save of its calls (`staged-spec`). Counts, no times.

    python tools/bench/bench_trees.py [MODEL --draft MODEL] [--nodes 15 ...] [--prompts 1] [--tokens 64]
        [--temperature 0]

Over the six kinds of prompts, without a guard. Of a call of the model that checks a draft: the tokens that it gives,
the drafted ones, and the calls of the draft model. Looked up: nodes that n-grams said before they were drawn, of all
that the draft model was asked for.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import numpy as np
import turns
import typer

import accel
from accel.ir.axis import find_axes
from accel.reference.kinds import KINDS, prompts
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import staged_spec
from accel.runtime.loop.speculative import Speculative
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.follow import Follower

WAYS: dict[str, dict[str, Any]] = {
    "mcsd-improved": {"tree": {"use": "static", "widths": [3, 2, 1, 1, 1]}, "length": {"use": "mcsd-improved"}},
    "widths 3, 2, 1, 1, 1": {"tree": {"use": "static", "widths": [3, 2, 1, 1, 1]}},
    "eagle-tree": {"tree": {"use": "eagle-tree"}, "verify": {"use": "sample-match"}},
    "dyspec": {"tree": {"use": "dyspec"}},
    "dyspec, staged": {"tree": {"use": "dyspec"}, "draft": {"use": "staged-spec"}},
    "chain": {"tree": {"use": "chain"}},
    "chain, staged": {"tree": {"use": "chain"}, "draft": {"use": "staged-spec"}},
}  # fmt: skip


def run(
    model: Annotated[str, typer.Argument(help="A model directory or a GGUF file.")] = "",
    draft: Annotated[str, typer.Option(help="The draft model; empty: the bundled one.")] = "",
    nodes: Annotated[list[int] | None, typer.Option(min=1, help="Of a draft, at most.")] = None,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Of each kind.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0,
) -> None:
    """A line for each way and number of nodes."""
    table = {"use": "model", **({"path": draft} if draft else {})}
    recipe = {"draft": table, "tree": {"use": "eagle-tree"}, "verify": {"use": "sample-match"}}
    given = ("tokens of a call", "drafted", "draft calls", "looked up")
    with accel.optimize(model or str(turns.REFERENCE), recipe, verify=False) as built:
        turns.head("nodes", "way", *given)
        for most in nodes or [15]:
            for name, tables in WAYS.items():
                found = _counted(built, tables, most, count, tokens, temperature)
                rounds = max(1, found["rounds"])
                cells = [f"{found[n] / rounds:.2f}" for n in ("given", "drafted", "calls")]
                share = found["known"] / max(1, found["asked"])
                turns.row(most, name, *cells, f"{share:.0%}" if found["asked"] else "")


def _counted(
    model: CompiledModel, tables: dict[str, Any], most: int, count: int, tokens: int, heat: float
) -> Counter[str]:
    axes = find_axes()
    usual = {"draft": {"use": "model"}, "verify": {"use": "rrs-wor"}, "length": {"use": "fixed"}}
    methods = {}
    for axis, table in (usual | tables).items():
        options = {k: v for k, v in table.items() if k != "use"}
        if axis == "length":
            options |= {"tokens" if table["use"] == "fixed" else "most": most}
        if table["use"] == "eagle-tree":
            options["nodes"] = most
        methods[axis] = axes[axis].build(table["use"], **options)
    context, found = DecodeContext(methods, None, model), Counter[str]()
    with _Counting(found):
        for number, text in enumerate(text for kind in KINDS for text in prompts(kind, count)):
            assert model.tokenizer is not None
            row = Row(
                np.array(model.tokenizer.encode(text), np.int64),
                Standard(temperature=heat) if heat else Standard(),
                np.random.default_rng(number),
                limit=tokens,
                max_context=model.facts.max_context,
            )
            with model.session() as session:
                given = sum(1 for _ in Speculative().tokens(session, [row], context))
            found += Counter(row.drafting)
            found["given"] += given - 1
    return found


class _Counting:
    """Counts calls of draft models, and what staged ones were asked for and knew."""

    def __init__(self, found: Counter[str]):
        self._found, self._whole = found, (Follower.run, Follower.guess)
        self._trees, self._chains = staged_spec._StagedLevels._call, staged_spec._Staged.further

    def __enter__(self) -> None:
        found, (run, guess), trees, chains = self._found, self._whole, self._trees, self._chains

        def ran(self: Any, *given: Any, **more: Any) -> Any:
            found["calls"] += 1
            return run(self, *given, **more)

        def guessed(self: Any, *given: Any, **more: Any) -> Any:
            found["calls"] += 1
            return guess(self, *given, **more)

        def called(self: Any, i: int, paths: Any) -> Any:
            found["asked"] += len(paths)
            found["known"] += sum(path in self._known[i] for path in paths)
            return trees(self, i, paths)

        def further(self: Any, tokens: dict[int, int]) -> Any:
            known = [bool(self._known[i]) and self._known[i][0][0] == t for i, t in tokens.items()]
            found["asked"] += len(tokens)
            found["known"] += sum(known)
            return chains(self, tokens)

        Follower.run, Follower.guess = ran, guessed  # type: ignore[method-assign]
        staged_spec._StagedLevels._call = called  # type: ignore[method-assign]
        staged_spec._Staged.further = further  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Follower.run, Follower.guess = self._whole  # type: ignore[method-assign]
        staged_spec._StagedLevels._call = self._trees  # type: ignore[method-assign]
        staged_spec._Staged.further = self._chains  # type: ignore[method-assign]


if __name__ == "__main__":
    typer.run(run)
