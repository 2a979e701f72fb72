"""Examples that ask for one of several numbers that a text hides."""

from __future__ import annotations

import random
from collections.abc import Iterator

from accel.ir.tables import Example

_OF = (
    "Amber", "Birch", "Cedar", "Delta", "Ember", "Falcon", "Granite", "Harbour", "Indigo", "Jasper", "Kestrel", "Lotus",
    "Maple", "Nimbus", "Onyx", "Pine", "Quartz", "Raven", "Sable", "Tulip",
)  # fmt: skip
_WHAT = (
    "account number", "room", "order number", "year of building", "weight in grams", "badge", "postal code",
)  # fmt: skip
_FORMS = (
    ("The {what} of {of} is {number}.", "What is the {what} of {of}?\nThe {what} of {of} is"),
    ("{of}, {what}: {number}", "The {what} of {of}? It is"),
    ('"{of}": {{"{what}": {number}}},', 'Of {of}, the {what} is'),
)  # fmt: skip
_MOST = 6


def asked(seed: int) -> Iterator[Example]:
    """For ever: a few things of one kind, each with its number, and the number of one of them."""
    rng = random.Random(seed)
    while True:
        what, (form, question) = rng.choice(_WHAT), rng.choice(_FORMS)
        digits = rng.randrange(2, 6)
        told = {
            of: str(rng.randrange(10 ** (digits - 1), 10**digits))
            for of in rng.sample(_OF, rng.randrange(1, _MOST))
        }
        of, number = next(iter(told.items()))
        lines = [form.format(what=what, of=o, number=n) for o, n in told.items()]
        yield Example(
            (lines[0],),
            tuple(lines[1:]),
            question.format(what=what, of=of, number=number),
            f" {number}",
        )
