"""Which methods are tried on several models: by default those that stand for a kind, with -m long all of them."""

from itertools import product
from typing import Any

import kinds
import pytest


def spread(axis: str, names: list[str], *others: Any) -> list[Any]:
    """Parameters (name, other): each other thing once, and each name that stands for a kind (`tools/matrix/kinds.py`)
    once; the rest of all pairs are long.
    """
    few = [use for _, use in kinds.members((axis, name) for name in names)]
    count = max(len(few), len(others)) if few else 0
    chosen = {(few[i % len(few)], others[i % len(others)]) for i in range(count)}
    return [
        pytest.param(*pair, marks=() if pair in chosen else pytest.mark.long)
        for pair in product(names, others)
    ]
