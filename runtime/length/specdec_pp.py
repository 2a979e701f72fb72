"""SpecDec++ (arXiv:2405.19715): a trained head predicts acceptance, and the draft ends when a rejection is likely."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from accel.ir.axis import count
from accel.ir.errors import InputError, RecipeError
from accel.ir.invariants import Invariant
from accel.ir.trained import Tensors, found, opened
from accel.runtime.backends.protocol import Logits
from accel.runtime.length import Base, Pace
from accel.runtime.speculation.round_cost import RoundCost
from accel.runtime.tree import Level

TOP, BLOCKS = 16, 3  # likeliest tokens that the head reads, and residual blocks that it has
LEAST = -20.0  # the logarithm of a chance, at least
PROBE = 16  # tokens by whose logits a model is known again
NUMBERS = 64  # of those logits
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SpecdecPp(Base):
    """Drafts of `least` to `most` tokens, ended when the probability of a rejection is above `threshold`; trees, when
    it is on every path (`least`: levels).
    `trained`: the head's
    file, from `tools/train/train.py specdec-pp`; empty: the bundled file, for the bundled model and its draft model.
    """

    threshold: float = 0.3
    least: int = 2
    most: int = count(20, most=256)
    trained: str = ""

    key: ClassVar[str] = "specdec-pp"
    relies = frozenset({Invariant.DRAFT_MODEL})

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise RecipeError(
                f"length.specdec-pp: threshold is {self.threshold}; give a probability from 0 to 1"
            )
        if not 1 <= self.least <= self.most:
            raise RecipeError(
                f"length.specdec-pp: least is {self.least} and most {self.most}; give least >= 1 and most >= least"
            )

    def fit(self, model: Any) -> None:
        """Raises InputError where the head was trained for another model, or another draft of it."""
        checked = _FITS.setdefault(model, set())
        if self.trained in checked:
            return
        told = json.loads(_head(self.trained)[1])
        for name, one in (("model", model), ("draft", model.draft_model)):
            if one is None or not alike(told[name], sample(one.session)):
                whose = self.trained or "the bundled file"
                what = "model" if name == "model" else "draft model"
                raise InputError(
                    f"length.specdec-pp: {whose} was trained for another {what}; {ANOTHER}"
                )
        checked.add(self.trained)

    def begin(self, cost: RoundCost) -> Pace:
        return _Pace(self, _head(self.trained)[0])


ANOTHER = (
    "train it: python tools/train/train.py specdec-pp MODEL --draft DRAFT --text TEXT --out FILE, and set `trained` "
    "to the FILE in the recipe"
)
_FITS: WeakKeyDictionary[Any, set[str]] = (
    WeakKeyDictionary()
)  # model -> the files that are known to fit it


class _Pace(Pace):
    def __init__(self, of: SpecdecPp, head: Tensors):
        self._of, self._head = of, head
        self._begin()

    def limit(self) -> int:
        return self._of.most

    def more(self, level: Level, logits: Sequence[Logits]) -> bool:
        self._levels += 1
        stand = chances(self._head, features(np.stack(logits), level.tokens))
        new = [
            self._stand[parent] * float(a) for parent, a in zip(level.parents, stand, strict=True)
        ]
        self._stand += new
        return self._levels < self._of.least or 1 - max(new) <= self._of.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        self._begin()

    def _begin(self) -> None:
        """A draft: the chance that each node that it went on from stands with those before it; the root does."""
        self._stand, self._levels = [1.0], 0


def features(logits: Array, tokens: npt.NDArray[np.int64]) -> Array:
    """What the head reads [N,F] of tokens [N] and the draft's logits [N,V] that they were chosen by: the logarithms of
    the token's chance and of the likeliest ones', and the entropy.
    """
    shifted = np.maximum(
        logits - logits.max(-1, keepdims=True), -100
    )  # what is ruled out has no chance, not -inf
    weights = np.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    entropy = np.log(total) - (weights * shifted).sum(-1, keepdims=True) / total
    few = min(TOP, logits.shape[-1])
    top = np.full((len(logits), TOP), LEAST, np.float32)
    top[:, :few] = -np.sort(-np.partition(shifted, -few)[:, -few:]) - np.log(total)
    own = np.take_along_axis(shifted, tokens[:, None], -1) - np.log(total)
    return np.concatenate([np.maximum(own, LEAST), np.maximum(top, LEAST), entropy], -1).astype(
        np.float32
    )


def chances(head: Tensors, x: Array) -> Array:
    """That tokens stand [N], by what the head reads of them [N,F]."""
    x = x @ head["first"] + head["first.bias"]
    for block in range(BLOCKS):
        inner = x @ head[f"block{block}"] + head[f"block{block}.bias"]
        x = x + inner / (1 + np.exp(np.minimum(-inner, 80)))  # no overflow
    out = x @ head["last"] + head["last.bias"]
    found: Array = np.asarray(1 / (1 + np.exp(np.minimum(out[:, 0] - out[:, 1], 80))), np.float32)
    return found


def sizes(inner: int) -> dict[str, tuple[int, ...]]:
    """Name -> size of a head's tensors."""
    blocks = {f"block{i}": (inner, inner) for i in range(BLOCKS)}
    found = {"first": (TOP + 2, inner), **blocks, "last": (inner, 2)}
    return {**found, **{f"{name}.bias": size[1:] for name, size in found.items()}}


@lru_cache(maxsize=8)
def _head(trained: str) -> tuple[Tensors, str]:
    """A file's tensors, and the samples of the models that it is for, as JSON."""
    key, file = SpecdecPp.key, found(SpecdecPp.key, trained)
    tensors, told = opened(key, file, ANOTHER, InputError)
    tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    want = sizes(tensors["first"].shape[-1] if "first" in tensors else 0)
    for name, size in want.items():
        if (has := np.shape(tensors.get(name, []))) != size:
            raise InputError(
                f"{key}: {file} has {name} of size {list(has)}, but {list(size)} is needed; {ANOTHER}"
            )
    return tensors, told["model"]


def sample(session: Any) -> list[float]:
    """Some of a model's logits after a row of tokens: by them it is known again, however its weights are stored.
    `session`: opens one.
    """
    with session() as opened:
        logits = opened.run(3 + np.arange(PROBE)[None] % (opened.vocab_size - 3))[0, -1]
    return [round(float(x), 3) for x in logits[:: max(1, logits.size // NUMBERS)][:NUMBERS]]


def alike(told: list[float], found: list[float]) -> bool:
    """Whether two samples are of one model."""
    a, b = (np.array(x, np.float64) - np.mean(x) for x in (told, found))
    return a.shape == b.shape and bool(np.linalg.norm(a - b) < 0.5 * np.linalg.norm(a))
