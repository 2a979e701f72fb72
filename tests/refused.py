"""Options that methods refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe

Options = dict[str, Any]


def refuses(method: str, *cases: Options | tuple[Options, str]) -> Callable[..., None]:
    """A test: a recipe's method, as kv.select.quest, refuses options in these words, or one option with its value."""
    axis, use = method.rsplit(".", 1)
    rows = []
    for case in cases:
        if isinstance(case, dict):
            ((name, value),) = case.items()
            rows.append((case, f"{method}: {name} is {value}; give"))
        else:
            rows.append(case)

    @pytest.mark.parametrize(("options", "why"), rows, ids=str)
    def test(options: Options, why: str) -> None:
        with pytest.raises(RecipeError, match=why):
            assemble(Recipe(tables={axis: {"use": use, **options}}))

    return test
