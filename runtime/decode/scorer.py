"""What a request says of texts that a search has found: a function or a model that gives each a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from accel.ir.errors import InputError, shown

ScorerFunction = Callable[[str, list[str]], Any]  # (prompt, texts behind it) -> a number for each


class Scorer:
    """A request's function, or a model whose `score` it is. Raises InputError where it is neither, and from a call that
    raises or does not give a finite number for each text.
    """

    def __init__(self, scorer: Any):
        function = getattr(scorer, "score", scorer)
        if not callable(function):
            raise InputError(
                f"scorer = {shown(scorer)}: give a function (prompt, texts) -> a number for each text, or a model that "
                "compares two texts"
            )
        self._function: ScorerFunction = function
        named = scorer if hasattr(scorer, "__name__") else type(scorer)
        self._name = f"scorer ({named.__name__})"

    def __call__(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """A number for each text [n], the higher the better."""
        try:
            found: Any = self._function(prompt, list(texts))
        except Exception as error:
            raise InputError(
                f"{self._name} raised {type(error).__name__}: {error}; it is called with a prompt and a list of texts "
                "behind it, and returns a number for each"
            ) from error
        try:
            numbers = np.asarray(found, np.float64)
        except (TypeError, ValueError):
            raise InputError(
                f"{self._name} returned {shown(found)}; return a number for each text"
            ) from None
        if numbers.shape != (len(texts),):
            raise InputError(
                f"{self._name} returned {shown(found)} for {len(texts)} texts; return a number for each"
            )
        if not np.isfinite(numbers).all():
            raise InputError(
                f"{self._name} returned {shown(found)}; return finite numbers, the higher the better"
            )
        return [float(number) for number in numbers]
