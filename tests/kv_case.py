"""Sessions that evict, on the eager target, without the checks of a whole build."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from accel.compiler.assemble import EVICTION, assemble
from accel.ir.axis import find_axes
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.ir.spec import verify
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.session.session import Session
from accel.runtime.session.state._kv_plan import KvPlan, kv_plan

from .session_case import session_of
from .session_ways import close, singles

EVICTING = [axis for name, axis in find_axes().items() if name in EVICTION]
FOREVER = {"use": "uniform", "tokens_kept": 1 << 20}


def table(name: str, where: str = "", **options: Any) -> dict[str, Any]:
    """The table of a method that evicts, its sizes small. `where`: the axis, if several have one of the name."""
    axis = next(a for a in EVICTING if name in a.names() and a.name.endswith(where))
    return {"use": name, **axis.small(name), **options}


def recipe(score: str = "snapkv", kept: int = 12, **axes: Any) -> dict[str, Any]:
    """Tables of a recipe that keeps `kept` tokens; `axes`: budget, keep, when."""
    tables = {"kv.score": table(score, "score"), "kv.when": {"use": "prompt"}}
    tables["kv.budget"] = table(axes.pop("budget", "uniform"), "budget", tokens_kept=kept)
    return tables | {f"kv.{axis}": table(name, axis) for axis, name in axes.items()}


SCORES = ["snapkv", "knorm", "h2o", "streaming-llm"]
RECIPES = {
    **{score: recipe(score) for score in SCORES},
    "ada-kv": recipe(budget="ada-kv"),
    "pyramidkv": recipe(budget="pyramidkv"),
    "value-merge": recipe(keep="value-merge"),
}
LENGTHS = [40, 23, 9]


@dataclass
class Case:
    """A program that evicts; sessions over it may follow other budgets and moments than it was built for."""

    program: Program
    tables: dict[str, Any]

    @property
    def plan(self) -> KvPlan:
        found = kv_plan(self.tables, self.program.facts.kv, self.program.state)
        assert found is not None
        return found

    @property
    def engine(self) -> EagerBackend:
        return EagerBackend(self.program)

    def session(self, batch: int = 1, wrap: Any = None, **axes: dict[str, Any]) -> Session:
        """`axes`: tables of budget and when instead of the recipe's."""
        return session_of(self.program, batch, tables=self.other(**axes).tables, wrap=wrap)

    def other(self, **axes: dict[str, Any]) -> Case:
        return Case(self.program, {**self.tables, **{f"kv.{a}": t for a, t in axes.items()}})

    def tokens(self, *shape: int, seed: int = 0) -> np.ndarray:
        """Each token once in a row, where the vocabulary has so many."""
        rng, most = np.random.default_rng(seed), self.program.facts.vocab_size
        if shape[1] > most - 3:
            return rng.integers(3, most, shape)
        return np.stack([3 + rng.permutation(most - 3)[: shape[1]] for _ in range(shape[0])])


def rest(table: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k != "use"}


def evicting(program: Program, tables: dict[str, Any]) -> Case:
    """A program over state (conftest's `stateful`) with the passes of a recipe."""
    plan = assemble(Recipe(tables=tables))
    for step in plan.passes:
        report = step.run(program)
        assert report.changed, report.refused
        verify(program, type(step).__name__)
    return Case(program, plan.recipe.tables)


def state(session: Session) -> dict[str, Any]:
    """Name -> array, of an eager session."""
    return {n: t.numpy() for n, t in session._core.backend._state.items()}


def kept(session: Session) -> dict[int, np.ndarray]:
    """Positions [B,G,P] of what each layer keeps."""
    return kept_part(session, "pos", -1)


def kept_part(session: Session, part: str, fill: float = 0) -> dict[int, np.ndarray]:
    """What each layer keeps [B,G,P,…], also where heads hold it one after another."""
    values, found = state(session), {}
    for name, array in values.items():
        if name.startswith("kept.") and name.endswith(f".{part}"):
            counts = values.get(name.removesuffix(part) + "counts")
            found[int(name.split(".")[1])] = (
                array if counts is None else spread(array, counts, fill)
            )
    return found


def spread(flat: np.ndarray, counts: np.ndarray, fill: float = 0) -> np.ndarray:
    """What heads hold one after another [B,1,M,…], as many as `counts` [B,G] says -> [B,G,P,…]."""
    padded = np.full((*counts.shape, int(counts.max()), *flat.shape[3:]), fill, flat.dtype)
    for b, row in enumerate(counts):
        for g, (start, count) in enumerate(zip(row.cumsum() - row, row, strict=True)):
            padded[b, g, :count] = flat[b, 0, start : start + count]
    return padded


def held(session: Session) -> int:
    """Tokens that a row holds at most."""
    slots = [int((p >= 0).sum(2).max()) for p in kept(session).values()]
    return max(slots, default=0) + int((session.lengths - session.held_from).max())


@cache
def evicted(stateful: Any, name: str) -> Case:
    """One of RECIPES on a small Llama of two layers and two KV heads; made once."""
    return evicting(stateful("llama"), RECIPES[name])


def conversation(session, tokens, lengths, longest=40, rounds=2):
    """Prompts of the rows' lengths, each followed by four single tokens: all logits that are real.

    No row gets a token twice: keys of one length would tie.
    """
    out = []
    for turn in range(rounds):
        given = tokens[:, turn * (longest + 4) :]
        logits = session.run(given[:, : max(lengths)], lengths)
        out += [row[:n] for row, n in zip(logits, lengths, strict=True)]
        session.end_prompt()
        out += list(singles(session, given[:, longest : longest + 4]))
    return out


def encoded(case: Case, session):
    encoder = case.program.facts.encoder
    if encoder is not None:
        session.encode(np.random.default_rng(1).integers(3, encoder.vocab_size, (session.batch, 7)))


def ragged_is_alone(case: Case, lengths=LENGTHS, tolerance=2e-4):
    """`tolerance`: more where sums in another order may take a value to the next code."""
    tokens = case.tokens(3, 88)
    together = case.session(3)
    encoded(case, together)
    all_rows = conversation(together, tokens, lengths)
    for row, n in enumerate(lengths):
        alone = case.session(1)
        if case.program.facts.encoder is not None:
            encoder = case.program.facts.encoder
            given = np.random.default_rng(1).integers(3, encoder.vocab_size, (3, 7))
            alone.encode(given[[row]])
        cut = conversation(alone, tokens[[row]], [n])
        for i, want in enumerate(cut):
            close(all_rows[3 * i + row], want, tolerance)
        for layer, where in kept(alone).items():
            got = kept(together)[layer][row]
            width = where.shape[2]
            if not width:
                continue  # beside a longer row it was looked at, and all of it stayed
            assert np.array_equal(got[:, :width], where[0]) and (got[:, width:] == -1).all()
