"""Lengths that go by a trained head, and what heads read."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.invariants import Invariant
from accel.ir.trained import Tensors
from accel.runtime.call import Logits
from accel.runtime.decode.trained_part import Sizes, TrainedPart, sizes_of
from accel.runtime.length import Base

LEAST = -20.0  # the logarithm of a chance, at least
Array = npt.NDArray[np.float32]


class Head(TrainedPart, Base):
    """`trained`, a field: the head's file, from `accel-compile train KEY`; empty: the one that a build finds for
    the two models, which the artifact then holds. A subclass says how the head learns.
    """

    models = ("model", "draft")
    relies = frozenset({Invariant.DRAFT_MODEL})

    @classmethod
    @abstractmethod
    def sizes(cls, inner: int) -> Sizes:
        """Name -> size of a head's tensors; "first" is [F, inner], of what it reads."""

    @classmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """See TrainedPart."""
        return cls.sizes((sizes_of(tensors, "first") or (0,))[-1])

    @classmethod
    @abstractmethod
    def odds(cls, head: Mapping[str, Any], x: Any) -> Any:
        """The logarithm of the odds [N] of what it foretells, by what it reads [N,F]: of arrays, or of torch's tensors
        to learn by.
        """


class OfTokens(Head):
    """Its head foretells whether one token stands, by what it was chosen by: it learns at each place of a text."""

    @classmethod
    @abstractmethod
    def features(cls, logits: Logits, tokens: npt.NDArray[np.int64]) -> Array:
        """What it reads [N,F] of tokens [N] and the draft's logits [N,V] that they were chosen by."""


def spread(logits: Logits, top: int) -> tuple[Array, Array, Array]:
    """Of logits [N,V]: the logarithms of all chances [N,V], those of the `top` likeliest [N,top] and the entropies
    [N,1]; of what is hardly possible, and where there are fewer tokens, `LEAST`.
    """
    shifted = np.maximum(
        logits - logits.max(-1, keepdims=True), -100
    )  # what is ruled out has no chance, not -inf
    weights = np.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    entropy = np.log(total) - (weights * shifted).sum(-1, keepdims=True) / total
    few = min(top, logits.shape[-1])
    best = np.full((len(logits), top), LEAST, np.float32)
    best[:, :few] = -np.sort(-np.partition(shifted, -few)[:, -few:]) - np.log(total)
    return np.maximum(shifted - np.log(total), LEAST), np.maximum(best, LEAST), entropy


def silu(x: Any) -> Any:
    """Of an array or a tensor."""
    return x / (1 + math.e ** (-x).clip(max=80))  # no overflow


def chance(odds: Any) -> Array:
    """By the logarithm of the odds."""
    return np.asarray(1 / (1 + np.exp(np.minimum(-odds, 80))), np.float32)
