"""DFlash (arXiv:2602.06036): a head drafts a block in one call, whose masks see each other and what the target computed
for the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft import Drafters, More
from accel.runtime.draft._block_head import BlockHead
from accel.runtime.draft._head import built
from accel.runtime.inputs.ints import Ints
from accel.runtime.speculation.blocks import BlockFollower
from accel.runtime.tree import Tree


@dataclass(frozen=True)
class DFlash(BlockHead):
    """`path`: the folder of a head, in its authors' layout or that of speculators, or an artifact of one; it is copied
    into the artifact. Its embedding is the target's, and its output head where it has none. `weights`: as of `eagle3`.

    Each token of a block is the likeliest, whatever the others become.
    """

    lacks = "heads of models that scale embeddings"

    def open(self, session: Any, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        model, head = built(self, context)
        follower = BlockFollower(model, session, len(rows), head)
        return _Blocks(follower, rows, session, self.cost(model, head, len(rows), context))


class _Blocks(Drafters):
    def __init__(self, follower: BlockFollower, rows: Sequence[Row], session: Any, cost: float):
        self.draft_cost = cost
        self._follower, self._rows, self._vocab = follower, rows, session.vocab_size

    @property
    def kv_bytes(self) -> int:
        return self._follower.kv_bytes

    @property
    def joins(self) -> bool:
        return self._follower.joins

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        seen = {i: self._rows[i].seen for i in limits}
        sizes = {i: min(most, self._follower.room(seen[i].size)) for i, most in limits.items()}
        sizes = {i: size for i, size in sizes.items() if size > 0}
        if not sizes:
            return {}
        logits = self._follower.draft({i: seen[i] for i in sizes}, max(sizes.values()))
        best = logits[:, :, : self._vocab].argmax(2)
        return {i: Tree.chain(best[i, :size]) for i, size in sizes.items()}

    def join(self, other: Self) -> None:
        self._follower.join(other._follower)

    def leave(self, order: Ints) -> None:
        self._follower.leave(order)

    def close(self) -> None:
        self._follower.close()
