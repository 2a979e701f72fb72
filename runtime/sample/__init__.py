"""Axis: what the next token is drawn from, of what a request's own options leave."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accel.ir.axis import WHOLE, Axis
from accel.ir.errors import InputError, RecipeError, shown
from accel.ir.invariants import Method
from accel.runtime.inputs.ints import Ints
from accel.runtime.sample._sampler import (
    Distribution,
    Sampler,
    at_least,
    entropy,
    ids_of,
    largest,
    likeliest,
    numbers,
    surprise,
)

__all__ = [
    "Base",
    "Distribution",
    "Sampler",
    "at_least",
    "entropy",
    "likeliest",
    "named",
    "numbers",
    "surprise",
]


def named(table: Any) -> Base:
    """The sampler of a request: `{"use": name, option: value, …}`. Raises InputError."""
    if not isinstance(table, Mapping) or not isinstance(table.get("use"), str):
        raise InputError(f'sampler = {shown(table)}: give {{"use": name, option: value, …}}')
    options = {
        str(key): value.item() if isinstance(value, np.generic) else value
        for key, value in table.items()
        if key != "use"
    }
    try:
        found: Base = Axis("sample", __name__).build(table["use"], **options)
        found.check_table(options)
    except RecipeError as error:
        raise InputError(f"sampler: {error}") from None
    return found


@dataclass(frozen=True)
class Base(Sampler, Method):
    """A frozen dataclass. These fields are options of each request, with the meaning and order of transformers, and
    presence and frequency penalty of OpenAI, where vLLM has them: behind the repetition penalty. The fields that a
    method adds are its own options, which a recipe or a request's `sampler` sets.

    temperature 0 is greedy (the lowest id among equals), with the penalties applied. `start`: of how many tokens the
    prompt is, which presence and frequency penalty do not count. Raises InputError for invalid values on creation.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    start: int = 0

    by_request: ClassVar[frozenset[str]] = frozenset(__annotations__)

    def __post_init__(self) -> None:
        self._validate()
        try:
            super().__post_init__()
        except RecipeError as error:  # its options come with a request
            raise InputError(str(error)) from None

    @abstractmethod
    def reshape(self, law: Distribution, seen: Ints) -> Distribution:
        """What the next token is drawn from. law: what temperature, penalties, top_k, top_p and min_p leave of the
        model's distribution, not to be changed; seen [n], not to be kept: prompt and new tokens so far. It depends on
        these alone: with drafts it is called for tokens that then fall. Greedy requests do not come here.
        """

    def _validate(self) -> None:
        """Raises InputError that names the parameter, its value and the range."""
        _check(
            "start", self.start, _whole(self.start) and 0 <= self.start <= WHOLE, f"0 to {WHOLE}"
        )
        _check(
            "temperature", self.temperature, 0 <= _number(self.temperature) < math.inf, "0 or more"
        )
        _check(
            "top_k",
            self.top_k,
            self.top_k is None or (_whole(self.top_k) and self.top_k >= 1),
            "an integer of 1 or more, or None for no limit",
        )
        for name, low in (("top_p", "above 0 and at most 1"), ("min_p", "from 0 to 1")):
            value = getattr(self, name)
            inside = value is None or 0 <= _number(value) <= 1
            _check(name, value, inside and not (name == "top_p" and value == 0), f"{low}, or None")
        penalty = self.repetition_penalty
        _check(
            "repetition_penalty",
            penalty,
            1e-9 <= _number(penalty) <= 1e9,  # beyond, float32 overflows
            "from 1e-9 to 1e9 (1 has no effect)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2 <= _number(value) <= 2, "from -2 to 2 (0 has no effect)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def choices(self, logits: npt.NDArray[np.float32]) -> Ints | None:
        own = type(self).distribution is Base.distribution  # a subclass may choose otherwise
        if not (own and self.greedy) or self._repeats or self._counts:
            return None
        found: Ints = logits.argmax(-1)  # NaN counts as the largest
        return found if np.isfinite(logits.max(-1)).all() else None

    def scores(
        self, logits: npt.NDArray[np.float32], seen: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        if self._repeats or self._counts:
            logits = logits.copy()
        if self._repeats:
            ids = seen[seen < logits.size]  # a draft model may have fewer tokens
            found = logits[ids]
            penalty = np.float32(self.repetition_penalty)
            logits[ids] = np.where(found < 0, found * penalty, found / penalty)
        if self._counts:
            new = seen[self.start :]
            tokens, counts = np.unique(new[new < logits.size], return_counts=True)
            logits[tokens] -= self.presence_penalty + self.frequency_penalty * counts
        return numbers(logits)

    @property
    def _repeats(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def _counts(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def distribution(
        self, logits: npt.NDArray[np.float32], seen: npt.NDArray[np.int64]
    ) -> Distribution:
        logits = self.scores(logits, seen)
        if self.greedy:
            return Distribution(np.array([logits.argmax()]), np.ones(1), random=False)
        return self.reshape(Distribution(*self.filtered(logits)), seen)

    def filtered(
        self, logits: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """What may be drawn: token ids [n] in rising order, and weights [n] in proportion to their
        probability.

        logits [V] after the penalties; the temperature must not be 0.
        """
        tokens, scores = ids_of(logits.size), logits
        if self.top_k is not None and self.top_k < logits.size:
            tokens, scores = largest(logits, self.top_k)  # equals of the last one stay, as there
        temperature = np.float32(min(max(self.temperature, 1e-30), 1e30))
        weights = scores - scores.max()
        with np.errstate(over="ignore"):  # a tiny temperature leaves the best alone
            weights /= temperature
            np.exp(weights, out=weights)
        if self.top_p is not None and self.top_p < 1:
            keep = _nucleus(weights, self.top_p)
            tokens, weights = tokens[keep], weights[keep]
        if self.min_p:
            keep = np.flatnonzero(weights >= self.min_p * weights.max())
            tokens, weights = tokens[keep], weights[keep]
        return tokens, weights


def _nucleus(weights: npt.NDArray[np.float32], top_p: float) -> npt.NDArray[np.int64]:
    """Indices, rising, of the fewest largest weights that reach `top_p` of the mass; at least one.

    Weights that could not weigh more than `1 - top_p` even if all n were alike are left out before
    the sort; among equals at the border the lower ids stay.
    """
    total = float(weights.sum(dtype=np.float64))
    tokens = np.flatnonzero(weights > (1 - top_p) * total / weights.size)
    tokens = tokens if tokens.size else np.arange(weights.size)
    falling = np.sort(weights[tokens])[::-1].astype(np.float64)
    before = falling.cumsum() - falling
    count = max(1, int((before < top_p * total).sum()))
    border = falling[count - 1]
    equal = np.flatnonzero(weights == border)
    above = np.flatnonzero(weights > border)
    return np.sort(np.concatenate([above, equal[: count - above.size]]))


def _number(value: object) -> float:
    """A number as float; anything else as NaN, which is in no range."""
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # an integer beyond all floats
            return math.inf
    return math.nan


def _whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise InputError(f"{name} = {shown(value)} is out of range; give a value {allowed}")
