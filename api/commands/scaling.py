"""How drafting goes with what was varied (Scaling Laws for Speculative Decoding): fits over several measurements of
`bench --speculation`, and where they say that it stops to pay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from accel.commands.console import table

VARIED = {
    "parameters": "parameters of the draft model",
    "trained": "tokens that the draft model was trained on",
    "batch": "rows of a call",
}
LEAST = 3  # different values of a quantity that is fitted
FAR = 10.0  # times beyond what was measured: a crossing there is not told
Point = Mapping[str, float]


@dataclass(frozen=True)
class Law:
    """y = base + the sum of slopes[name] · ln(name), by least squares. errors: the standard error of each slope, NaN
    where there are no more points than coefficients. r2: the share of the variance that it explains.
    """

    base: float
    slopes: Mapping[str, float]
    errors: Mapping[str, float]
    r2: float

    def at(self, point: Point) -> float:
        """Its value where each quantity is as in `point`."""
        return self.base + sum(s * math.log(point[n]) for n, s in self.slopes.items())


def fit(points: Sequence[Point], name: str, varied: Sequence[str]) -> Law:
    """The law of the quantity `name` of points in those that were `varied`, all of them above 0."""
    x = np.array([[1.0, *(math.log(p[n]) for n in varied)] for p in points])
    y = np.array([p[name] for p in points])
    found, *_ = np.linalg.lstsq(x, y, rcond=None)
    left, whole = float(((y - x @ found) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    free = len(y) - x.shape[1]
    spread = np.full(x.shape[1], np.nan)
    if free > 0:
        spread = np.sqrt(np.diag(np.linalg.pinv(x.T @ x)) * left / free)
    return Law(
        float(found[0]),
        dict(zip(varied, found[1:].tolist(), strict=True)),
        dict(zip(varied, spread[1:].tolist(), strict=True)),
        1 - left / whole if whole else 1.0,
    )


def break_even(tokens: Law, cost: Law, name: str, at: Point) -> float | None:
    """Where a round's tokens come to what it costs, in plain steps, as the quantity `name` varies and others stay as
    `at`; None where the two laws never meet.
    """
    slope = tokens.slopes[name] - cost.slopes[name]
    if slope == 0:
        return None
    power = math.log(at[name]) - (tokens.at(at) - cost.at(at)) / slope
    return math.exp(power) if abs(power) < 700 else None


def point_of(result: Mapping[str, Any], trained: int | None = None) -> dict[str, float]:
    """A measurement (`speculation.measure`) as a point: means over the kinds of prompt. cost: of a round, in plain
    steps.
    """
    rows = result["rows"]
    found = {
        "batch": float(result["batch"]),
        "tokens": fmean(r["tokens_per_check"] for r in rows),
        "cost": fmean(r["tokens_per_check"] / r["speedup"] for r in rows),
        "speed": fmean(r["tokens_per_second"] for r in rows),
    }
    if result["draft_parameters"]:
        found["parameters"] = float(result["draft_parameters"])
    return found if trained is None else {**found, "trained": float(trained)}


def study(points: Sequence[Point]) -> dict[str, Any]:
    """What the points say, as JSON: `laws` of the tokens of a round, of its cost and of tokens/s; `break_even` by
    quantity; `warnings` and `notes` in words.
    """
    notes, varied = list[str](), list[str]()
    for name, what in VARIED.items():
        values = {p[name] for p in points if name in p}
        if len(values) >= LEAST and all(name in p for p in points):
            varied.append(name)
        elif len(values) > 1:
            notes.append(f"{what}: {len(values)} different values; give at least {LEAST}")
    x = np.array([[1.0, *(math.log(p[n]) for n in varied)] for p in points])
    if np.linalg.matrix_rank(x) < x.shape[1]:
        told = " and ".join(VARIED[n] for n in varied)
        notes.append(f"{told} vary together, so nothing is said of each; vary one by itself")
        varied = []
    if not varied:
        return {
            "points": list(points),
            "laws": {},
            "break_even": {},
            "warnings": [],
            "notes": notes,
        }
    laws = {name: fit(points, name, varied) for name in ("tokens", "cost", "speed")}
    crossings, warnings = dict[str, float | None](), list[str]()
    middle = {n: math.exp(fmean(math.log(p[n]) for p in points)) for n in varied}
    for name in varied:
        low, high = (f(p[name] for p in points) for f in (min, max))
        found = break_even(laws["tokens"], laws["cost"], name, middle)
        crossings[name] = found = (
            found if found is not None and low / FAR <= found <= high * FAR else None
        )
        if found is not None:
            rises = laws["tokens"].slopes[name] > laws["cost"].slopes[name]
            where = (
                "" if low <= found <= high else f", beyond the {low:,.4g} to {high:,.4g} measured"
            )
            warnings.append(
                f"drafting does not pay {'below' if rises else 'above'} {found:,.4g} {VARIED[name]} (fitted{where})"
            )
    if not crossings or all(c is None for c in crossings.values()):
        if laws["tokens"].at(middle) < laws["cost"].at(middle):
            warnings.append("drafting does not pay anywhere near what was measured (fitted)")
    return {
        "points": list(points),
        "laws": {
            name: {"base": law.base, "slopes": dict(law.slopes), "errors": dict(law.errors), "r2": law.r2}
            for name, law in laws.items()
        },
        "break_even": crossings,
        "warnings": warnings,
        "notes": notes,
    }  # fmt: skip


def show(found: Mapping[str, Any]) -> None:
    """On a screen."""
    titles = {"tokens": "tokens per check", "cost": "plain steps per check", "speed": "tokens/s"}
    rows = [
        [titles[name], f"{law['base']:.3g}", f"{law['r2']:.2f}"]
        + [f"{law['slopes'][n]:+.3g} ± {law['errors'][n]:.2g}" for n in law["slopes"]]
        for name, law in found["laws"].items()
    ]
    if rows:
        varied = list(next(iter(found["laws"].values()))["slopes"])
        table(["fitted", ">base", ">R²", *(f">ln({name})" for name in varied)], rows)
    for line in (*found["warnings"], *found["notes"]):
        print(line)
