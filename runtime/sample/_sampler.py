"""What rows draw tokens with: distributions, and the interface of what gives them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from accel.ir.errors import AccelError
from accel.runtime.inputs.distant import Distant
from accel.runtime.inputs.ints import Ints

_PART = 512  # weights that are added up before the one that is drawn is looked for among them
_FEW = 64  # numbers of which the largest is taken first


@dataclass(frozen=True, eq=False)
class Distribution:
    """What a token is drawn from: tokens [n] in rising order and weights [n], none negative and not
    all zero, in proportion to their probability; any other token has none.

    `random` is False where nothing is drawn (greedy): one token, and no random number is taken.
    """

    tokens: Ints
    weights: npt.NDArray[np.floating]
    random: bool = True

    @cached_property
    def total(self) -> float:
        """The sum of the weights."""
        return float(self.weights.sum(dtype=np.float64))

    @cached_property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """Of each of `tokens`, [n]."""
        return self.weights.astype(np.float64) / self.total

    def of(self, token: int) -> float:
        """The probability of one token."""
        place = int(self.tokens.searchsorted(token))
        there = place < len(self.tokens) and self.tokens[place] == token
        return float(self.weights[place]) / self.total if there else 0.0

    def dense(self, size: int) -> npt.NDArray[np.float64]:
        """The probability of every token of a vocabulary, [V]."""
        out = np.zeros(size)
        out[self.tokens] = self.probabilities
        return out

    def draw(self, rng: np.random.Generator) -> int:
        """A token, by one random number."""
        if not self.random:
            return int(self.tokens[0])
        starts = np.arange(0, len(self.weights), _PART)
        each = np.add.reduceat(self.weights, starts, dtype=np.float64)
        until = each.cumsum()
        left = rng.random() * until[-1]
        part = int(until.searchsorted(left, side="right"))
        if part < len(starts):
            mass = self.weights[starts[part] :][:_PART].astype(np.float64).cumsum()
            place = int(mass.searchsorted(left - (until[part] - each[part]), side="right"))
            if place < len(mass):
                return int(self.tokens[starts[part] + place])
        end = (
            None if part >= len(starts) - 1 else starts[part + 1]
        )  # sums differ in their last place
        place = int(np.flatnonzero(self.weights[:end])[-1])
        return int(self.tokens[place])


@lru_cache(maxsize=4)
def ids_of(size: int) -> Ints:
    """All tokens of a vocabulary [V], not to be changed."""
    ids = np.arange(size)
    ids.flags.writeable = False
    return ids


def nth_largest(numbers: npt.NDArray[np.floating], count: int) -> np.floating:
    """The `count`-th largest of numbers [n]; no less than that of the largest of parts, so few are sorted."""
    parts = numbers.size // _FEW
    if parts > 2 * count:
        largest = numbers[: parts * _FEW].reshape(parts, _FEW).max(1)
        numbers = numbers[numbers >= np.partition(largest, -count)[-count]]
    found: np.floating = np.partition(numbers, -count)[-count]
    return found


def largest(logits: npt.NDArray[np.float32], count: int) -> tuple[Ints, npt.NDArray[np.float32]]:
    """The tokens, rising, that are no less likely than the `count`-th by logits [V], and their logits."""
    if isinstance(logits, Distant) and (found := logits.largest(count)) is not None:
        return found
    logits = np.asarray(logits)
    tokens = np.flatnonzero(logits >= nth_largest(logits, count))
    return tokens, logits[tokens]


def numbers(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The logits [V]. Raises AccelError where they are not numbers."""
    if not math.isfinite(logits.max()):  # NaN counts as the largest
        raise AccelError(
            "the model's logits are not numbers (NaN or infinite); build in float32, or "
            "check the model's weights"
        )
    return logits


def surprise(p: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """-p ln p of probabilities [n], in nats; 0 where p is."""
    some = p.astype(np.float64)
    out: npt.NDArray[np.float64] = -some * np.log(np.where(some > 0, some, 1.0))
    return out


def entropy(p: npt.NDArray[np.floating]) -> float:
    """Of probabilities [n], in nats."""
    return float(surprise(p).sum())


def at_least(law: Distribution, least: float) -> Distribution:
    """Of a distribution, the tokens with at least this probability, and the likeliest ones."""
    bound = min(least * law.total, float(law.weights.max()))
    keep = np.flatnonzero(law.weights >= bound)
    return Distribution(law.tokens[keep], law.weights[keep])


def likeliest(weights: npt.NDArray[np.floating], count: int) -> Ints:
    """The places of the `count` largest of weights [n], falling; among equals the lower ones."""
    some = np.arange(weights.size)
    if count < weights.size:
        some = np.flatnonzero(weights >= nth_largest(weights, count))
    return some[np.argsort(-weights[some], kind="stable")][:count]


class Sampler(ABC):
    """What a row draws its tokens with."""

    @property
    def greedy(self) -> bool:
        """Whether nothing is ever drawn."""
        return False

    def choices(self, logits: npt.NDArray[np.float32]) -> Ints | None:
        """The token after each row of logits [N,V] by `distribution`, where nothing is drawn, the tokens before do not
        matter and all are numbers; None elsewhere.
        """
        return None

    def complete(self, seen: Ints) -> bool:
        """Whether a row that has accepted `seen` [n] ends there, because nothing may follow."""
        return False

    def branch(self) -> Sampler:
        """The sampler of a branch of a row; one without a state of its own serves all of them."""
        return self

    @abstractmethod
    def scores(
        self, logits: npt.NDArray[np.float32], seen: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """The logits [V] with what penalties make of them; given and raising as `distribution`."""

    @abstractmethod
    def distribution(
        self, logits: npt.NDArray[np.float32], seen: npt.NDArray[np.int64]
    ) -> Distribution:
        """What the next token is drawn from. logits [V], not to be changed; seen [n], not to be kept:
        prompt and new tokens so far.

        Raises AccelError where the logits are not numbers.
        """

    def __call__(
        self, logits: npt.NDArray[np.float32], seen: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> int:
        """The next token: a draw from its distribution."""
        return self.distribution(logits, seen).draw(rng)
