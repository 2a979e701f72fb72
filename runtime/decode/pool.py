"""Which requests of a pool run together: those of equal length, so that calls have no padding (EXSPEC,
arXiv:2510.22876).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

__all__ = ["groups"]


def groups(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """All requests of a fixed pool, which hold so many tokens each, as groups of at most `most` places, each in the
    order in which they came. First those of one length, the length first that first has `most`; the others by their
    length, so that little of their calls is padding.
    """
    places = defaultdict[int, list[int]](list)
    for i, length in enumerate(lengths):
        places[length].append(i)
        if len(places[length]) == most:
            yield places.pop(length)
    rest = [i for length in sorted(places) for i in places[length]]
    for start in range(0, len(rest), most):
        yield sorted(rest[start : start + most])
