"""Which blocks of an engine's memory are free, reserved for an iteration, or owned by a request."""

from __future__ import annotations

from collections.abc import Mapping

from accel.ir.errors import AccelError


class Ledger:
    """Counts of blocks: free + reserved + owned = all, at each step. An iteration reserves what its plan asks for
    before it runs; what ran is committed, what failed is given back.
    """

    def __init__(self, blocks: int):
        self.blocks = self.free = blocks
        self._reserved = dict[int, int]()
        self._owned = dict[int, int]()

    def reserve(self, blocks: Mapping[int, int]) -> None:
        """Set blocks aside for requests, by id. Raises AccelError where there are not so many; nothing is reserved
        then.
        """
        if (both := sum(blocks.values())) > self.free or min(blocks.values(), default=0) < 0:
            raise AccelError(
                f"the schedule plans {both} more blocks, but {self.free} are free; it is broken"
            )
        self.free -= both
        for request, count in blocks.items():
            self._reserved[request] = self._reserved.get(request, 0) + count

    def commit(self) -> None:
        """What was reserved is owned."""
        for request, count in self._reserved.items():
            self._owned[request] = self._owned.get(request, 0) + count
        self._reserved.clear()

    def drop(self, request: int) -> None:
        """A request gives back all that it has."""
        self.free += self._reserved.pop(request, 0) + self._owned.pop(request, 0)

    def owned(self, request: int) -> int:
        """The blocks of a request."""
        return self._owned.get(request, 0)

    def check(self) -> None:
        """Raise AccelError where a block was lost or is in two places."""
        counts = (self.free, sum(self._reserved.values()), sum(self._owned.values()))
        if sum(counts) != self.blocks or min(counts) < 0:
            raise AccelError(
                f"{counts[0]} free + {counts[1]} reserved + {counts[2]} owned blocks are not {self.blocks}"
            )
