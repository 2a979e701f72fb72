"""Lengths that go by a trained head: its file, the two models that it is for, and what heads read."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from accel.ir.errors import InputError
from accel.ir.invariants import Invariant
from accel.ir.parts import bundled, how, part
from accel.ir.trained import Likeness, Tensors, opened
from accel.runtime.call import Logits
from accel.runtime.length import Base

LEAST = -20.0  # the logarithm of a chance, at least
PROBE = 16  # tokens by whose logits a model is known again
NUMBERS = 64  # of those logits
Array = npt.NDArray[np.float32]


class Head(Base):
    """`trained`, a field: the head's file, from `accel-compile train KEY`; empty: the one that a build finds for
    the two models, which the artifact then holds. A subclass says how the head learns.
    """

    trained: str
    key: ClassVar[str]  # the method's name
    files = ("trained",)
    relies = frozenset({Invariant.DRAFT_MODEL})

    @classmethod
    @abstractmethod
    def sizes(cls, inner: int) -> dict[str, tuple[int, ...]]:
        """Name -> size of a head's tensors; "first" is [F, inner], of what it reads."""

    @classmethod
    @abstractmethod
    def odds(cls, head: Mapping[str, Any], x: Any) -> Any:
        """The logarithm of the odds [N] of what it foretells, by what it reads [N,F]: of arrays, or of torch's tensors
        to learn by.
        """

    def fit(self, model: Any) -> None:
        """Raises InputError where the head was trained for another model, or another draft of it."""
        checked, mine = _FITS.setdefault(model, set()), (self.key, self.trained)
        if mine in checked:
            return
        told = self._file()[1]
        for name, one in (("model", model), ("draft", model.draft_model)):
            if one is None or not alike(told[name], sample(one.session)):
                whose = self.trained or "the bundled file"
                what = "model" if name == "model" else "draft model"
                raise InputError(
                    f"length.{self.key}: {whose} was trained for another {what}; {_another(self.key)}"
                )
        checked.add(mine)

    @property
    def head(self) -> Tensors:
        """Its tensors, by name. Raises InputError where the file holds none."""
        return self._file()[0]

    def _file(self) -> tuple[Tensors, dict[str, list[float]]]:
        return _read(type(self), self.trained)


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


def sample(session: Any) -> list[float]:
    """Some of a model's logits after a row of tokens: by them it is known again, however its weights are stored.
    `session`: opens one.
    """
    with session() as opened:
        logits = opened.run(3 + np.arange(PROBE)[None] % (opened.vocab_size - 3))[0, -1]
    return [round(float(x), 3) for x in logits[:: max(1, logits.size // NUMBERS)][:NUMBERS]]


def alike(saved: list[float], current: list[float]) -> bool:
    """Whether two samples are of one model."""
    a, b = (np.array(x, np.float64) - np.mean(x) for x in (saved, current))
    return a.shape == b.shape and bool(np.linalg.norm(a - b) < 0.5 * np.linalg.norm(a))


_FITS: WeakKeyDictionary[Any, set[tuple[str, str]]] = (
    WeakKeyDictionary()
)  # model -> the methods and files that are known to fit it


def like_logits(saved: str, current: str) -> Likeness:
    """Whether two pairs of samples, as JSON by name, are of the same models; of what one of them lacks, any."""
    try:
        a, b = json.loads(saved), json.loads(current)
        same = all(alike(a[name], b[name]) for name in a.keys() & b.keys())
    except (AttributeError, TypeError, ValueError):
        return Likeness.OTHER
    return Likeness.SAME if same else Likeness.OTHER


def _another(key: str) -> str:
    return f"{how(part(key, False))}, and build again"


@lru_cache(maxsize=16)
def _read(method: type[Head], trained: str) -> tuple[Tensors, dict[str, list[float]]]:
    """A file's tensors, and the samples of the models that it is for."""
    key, another = method.key, _another(method.key)
    file = Path(trained) if trained else bundled(key)
    tensors, told = opened(part(key, False), file, InputError)
    tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    first = np.shape(tensors.get("first", []))
    want = method.sizes(first[-1] if first else 0)
    for name, size in want.items():
        if (has := np.shape(tensors.get(name, []))) != size:
            raise InputError(
                f"{key}: {file} has {name} of size {list(has)}, but {list(size)} is needed; {another}"
            )
    try:
        both = json.loads(told["model"])
        return tensors, {name: [float(x) for x in both[name]] for name in ("model", "draft")}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{key}: {file} does not tell which two models it is for; {another}"
        ) from error
