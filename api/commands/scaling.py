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
TITLES = {
    "tokens": "tokens per check",
    "cost": "plain steps per check",
    "gain": "the first less the second",
    "speed": "tokens/s",
}
LEAST = 3  # different values of a quantity that is fitted
FAR = 10.0  # times beyond what was measured: a crossing there is not told
SURE = 2.0  # standard errors that a slope or a mean must be from 0 to be told of
Point = Mapping[str, float]


@dataclass(frozen=True)
class Law:
    """y = base + the sum of slopes[name] · ln(name), by least squares. errors: the standard error of each slope, NaN
    where there are no more points than coefficients. mean: of y, and `spread` its standard error. r2: the share of the
    variance that it explains.
    """

    base: float
    slopes: Mapping[str, float]
    errors: Mapping[str, float]
    r2: float
    mean: float
    spread: float

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
    noise = math.sqrt(left / free) if free > 0 else math.nan
    errors = noise * np.sqrt(np.diag(np.linalg.pinv(x.T @ x)))
    return Law(
        float(found[0]),
        dict(zip(varied, found[1:].tolist(), strict=True)),
        dict(zip(varied, errors[1:].tolist(), strict=True)),
        1 - left / whole if whole else 1.0,
        float(y.mean()),
        noise / math.sqrt(len(y)),
    )


def break_even(gain: Law, name: str, at: Point) -> float | None:
    """Where what a round gives beyond its cost comes to 0, as the quantity `name` varies and others stay as `at`; None
    where it does not, or where its slope may as well be 0.
    """
    slope = gain.slopes[name]
    if not abs(slope) > SURE * gain.errors[name]:  # NaN: unknown
        return None
    power = math.log(at[name]) - gain.at(at) / slope
    return math.exp(power) if abs(power) < 700 else None


def point_of(result: Mapping[str, Any], trained: int | None = None) -> dict[str, float]:
    """A measurement (`speculation.measure`) as a point: means over the kinds of prompt. cost: of a round, in plain
    steps, by the measured speed-up; gain: tokens of a round beyond it.
    """
    rows = result["rows"]
    tokens = fmean(r["tokens_per_check"] for r in rows)
    cost = fmean(r["tokens_per_check"] / r["speedup"] for r in rows)
    found = {
        "batch": float(result["batch"]),
        "tokens": tokens,
        "cost": cost,
        "gain": tokens - cost,
        "speed": fmean(r["tokens_per_second"] for r in rows),
    }
    if result["draft_parameters"]:
        found["parameters"] = float(result["draft_parameters"])
    return found if trained is None else {**found, "trained": float(trained)}


def study(points: Sequence[Point]) -> dict[str, Any]:
    """What the points say, as JSON: `laws` of the tokens of a round, its cost, the gain and tokens/s; `break_even` by
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
    laws = {name: fit(points, name, varied) for name in TITLES}
    gain = laws["gain"]
    if math.isnan(gain.spread):
        notes.append(
            "there are no more measurements than coefficients; measure more to see where it pays"
        )
    crossings, warnings = dict[str, float | None](), list[str]()
    middle = {n: math.exp(fmean(math.log(p[n]) for p in points)) for n in varied}
    for name in varied:
        low, high = (f(p[name] for p in points) for f in (min, max))
        found = break_even(gain, name, middle)
        near = found is not None and low / FAR <= found <= high * FAR
        crossings[name] = found = found if near else None
        if found is not None:
            side = "below" if gain.slopes[name] > 0 else "above"
            where = (
                "" if low <= found <= high else f", beyond the {low:,.4g} to {high:,.4g} measured"
            )
            warnings.append(
                f"drafting does not pay {side} {found:,.4g} {VARIED[name]} (fitted{where})"
            )
    if not warnings and gain.mean < -SURE * gain.spread:
        warnings.append("drafting does not pay anywhere near what was measured")
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


def show(fits: Mapping[str, Any]) -> None:
    """On a screen."""
    rows = [
        [TITLES[name], f"{law['base']:.3g}", f"{law['r2']:.2f}"]
        + [f"{law['slopes'][n]:+.3g} ± {law['errors'][n]:.2g}" for n in law["slopes"]]
        for name, law in fits["laws"].items()
    ]
    if rows:
        varied = list(next(iter(fits["laws"].values()))["slopes"])
        table(["fitted", ">base", ">R²", *(f">ln({name})" for name in varied)], rows)
    for line in (*fits["warnings"], *fits["notes"]):
        print(line)
