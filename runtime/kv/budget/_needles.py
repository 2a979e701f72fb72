"""Examples that need an inference: the answer follows from two facts together."""

from __future__ import annotations

import random
from collections.abc import Iterator

from accel.ir.tables import Example

_PEOPLE = (
    "Anton", "Bella", "Carl", "Diana", "Emil", "Flora", "Gustav", "Hanna", "Ivan", "Julia", "Karl", "Laura", "Martin",
    "Nora", "Oscar", "Paula", "Robert", "Sofia", "Thomas", "Vera",
)  # fmt: skip
_COLOURS = (
    "red", "blue", "green", "black", "white", "yellow", "brown", "grey", "orange", "purple", "silver", "golden",
)  # fmt: skip
_THINGS = ("box", "bag", "door", "locker", "suitcase", "drawer")


def needles(seed: int) -> Iterator[Example]:
    """For ever: whose is which thing, and which code it has; and the same of another one."""
    rng = random.Random(seed)
    while True:
        (one, other), thing = rng.sample(_PEOPLE, 2), rng.choice(_THINGS)
        mine, theirs = rng.sample(_COLOURS, 2)
        code, wrong = (str(n) for n in rng.sample(range(1000, 10000), 2))
        yield Example(
            (f"{one} has the {mine} {thing}.", f"The code of the {mine} {thing} is {code}."),
            (f"{other} has the {theirs} {thing}.", f"The code of the {theirs} {thing} is {wrong}."),
            f"Question: What is the code of the {thing} that {one} has?\nAnswer: The code is",
            f" {code}",
        )
