"""Small trained parts that a method of the loop reads as it runs: their file, and the models that it is for. No torch:
`accel-compile train METHOD MODEL` makes the file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from accel.ir.errors import InputError
from accel.ir.invariants import Method
from accel.ir.parts import bundled, how, part
from accel.ir.trained import Likeness, Tensors, opened

PROBE = 16  # tokens by whose logits a model is known again
NUMBERS = 64  # of those logits
Sizes = dict[str, tuple[int, ...]]  # name of a tensor -> size


class TrainedPart(Method, ABC):
    """A method with a trained part. `trained`, a field: the part's file; empty: the one that a build finds for the
    model, which the artifact then holds. `models`: the models that a part is for. `optional`: without a part it goes
    by a default that its options tell.
    """

    trained: str
    key: ClassVar[str]  # the method's name
    models: ClassVar[tuple[str, ...]] = ("model",)
    optional: ClassVar[bool] = False
    files = ("trained",)

    @classmethod
    @abstractmethod
    def expected(cls, tensors: Tensors) -> Sizes:
        """The tensors that a part must have. `tensors`: those that a file has, whose own sizes may count."""

    @property
    def wants_part(self) -> bool:
        """Whether these options leave anything to the part."""
        return True

    @property
    def part(self) -> Tensors:
        """Its tensors, by name; none where it is `optional` and not there. Raises InputError where the file holds
        none.
        """
        return {} if self.optional and not self.trained else self._file()[0]

    def fit(self, model: Any) -> None:
        """Raises InputError where the part was trained for another model (`loop.Model`), or another draft of it."""
        checked, mine = _FITS.setdefault(model, set()), (self.key, self.trained)
        if mine in checked or not self.wants_part or not self.part:
            return
        told = self._file()[1]
        for name in self.models:
            one = model if name == "model" else model.draft_model
            if one is None or not alike(told[name], sample(one.session)):
                whose = self.trained or "the bundled file"
                what = "model" if name == "model" else f"{name} model"
                raise InputError(
                    f"{self.full_name}: {whose} was trained for another {what}; {_another(self.key)}"
                )
        checked.add(mine)

    def _file(self) -> tuple[Tensors, dict[str, list[float]]]:
        return _read(type(self), self.trained)


def sample(session: Callable[[], Any]) -> list[float]:
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
    """Whether two groups of samples, as JSON by name, are of the same models; of what one of them lacks, any."""
    try:
        a, b = json.loads(saved), json.loads(current)
        same = all(alike(a[name], b[name]) for name in a.keys() & b.keys())
    except (AttributeError, TypeError, ValueError):
        return Likeness.OTHER
    return Likeness.SAME if same else Likeness.OTHER


def _another(key: str) -> str:
    return f"{how(part(key, False))}, and build again"


@lru_cache(maxsize=16)
def _read(method: type[TrainedPart], trained: str) -> tuple[Tensors, dict[str, list[float]]]:
    """A file's tensors, and the samples of the models that it is for."""
    key, another = method.key, _another(method.key)
    file = Path(trained) if trained else bundled(key)
    tensors, told = opened(part(key, False), file, InputError)
    tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    for name, size in method.expected(tensors).items():
        if (has := np.shape(tensors.get(name, []))) != size:
            raise InputError(
                f"{key}: {file} has {name} of size {list(has)}, but {list(size)} is needed; {another}"
            )
        if not np.isfinite(tensors[name]).all():
            raise InputError(f"{key}: {file} has numbers in {name} that are not finite; {another}")
    try:
        each = json.loads(told["model"])
        return tensors, {name: [float(x) for x in each[name]] for name in method.models}
    except (KeyError, TypeError, ValueError) as error:
        which = "which two models" if len(method.models) > 1 else "which model"
        raise InputError(f"{key}: {file} does not tell {which} it is for; {another}") from error


def sizes_of(tensors: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The size of a tensor that a file has, of no tensor ()."""
    return np.shape(tensors[name]) if name in tensors else ()
