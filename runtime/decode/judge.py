"""What a request says of drafted text: a function that tells whether two texts mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from accel.ir.errors import InputError, shown

JudgeFunction = Callable[[str, str], Any]  # (drafted text, the model's own text) -> bool


class Judge:
    """A request's function. Raises InputError where it is none, and from a call that raises or gives no bool."""

    def __init__(self, function: JudgeFunction):
        if not callable(function):
            raise InputError(
                f"judge = {shown(function)}: give a function (drafted text, the model's own text) -> bool"
            )
        self._function = function
        self._name = f"judge ({getattr(function, '__name__', type(function).__name__)})"

    def __call__(self, drafted: str, target_text: str) -> bool:
        """Whether the drafted text may stand for the model's own."""
        try:
            found: Any = self._function(drafted, target_text)
        except Exception as error:
            raise InputError(
                f"{self._name} raised {type(error).__name__}: {error}; it is called with two texts, a drafted one and "
                "the model's own, and returns whether they mean the same"
            ) from error
        if not isinstance(found, bool | np.bool_):
            raise InputError(
                f"{self._name} returned {shown(found)}; return True where the drafted text may stand, else False"
            )
        return bool(found)
