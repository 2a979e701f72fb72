"""Attention over blocks that sessions share: a row's first tokens lie in a pool, the others in its own slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention
from accel.ir.ops.kv import block_positions, gather_blocks
from accel.ir.program import Editor, Program, State
from accel.ir.region import sizes
from accel.ir.state import CacheRegion, Part
from accel.passes import Pass, Report
from accel.passes.kv._shared.by_token import check_by_token
from accel.passes.kv._shared.cached import appends, cache_of
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.state.recurrent import buffer

_BLOCKS, _POOL = 37, 43  # example sizes while shapes are worked out


@dataclass(frozen=True)
class Paged(Pass):
    """attention over `kv.<layer>` -> attention over blocks of `pool.<layer>.k/v [Z,G,E,D]` and `kv.<layer>`.

    `table [B,M]` says which blocks are a row's: the m-th holds the tokens m·E to m·E + E-1; -1: none. The
    session fills pool and table between calls (`runtime.kv.reuse`), and the step only reads them. Recurrent state is
    left as it is: the session puts snapshots of it in its place.
    """

    block: int = 16

    after = (Cache, Head)
    must_change = True
    flat = True
    grade = "distribution-exact"  # keys come out of another call, and calls differ by rounding

    def run(self, program: Program) -> Report:
        nodes = [n for n in program.nodes(attention.default, entry=program.step) if appends(n)]
        if program.facts.encoder is not None:
            raise PassError(
                "this decoder's keys and values also depend on the encoder input, which kv.reuse "
                "does not compare; leave it out for this model"
            )
        recurrences = sum(s.part is Part.RECURRENT for s in program.state)
        why = "so another session cannot continue from the middle of it"
        check_by_token(program, nodes, why, recurrent=True)
        if not nodes:
            return Report(changed=recurrences)
        editor = Editor(program, program.step.graph)
        batch = program.step.input("tokens").meta["val"].shape[0]
        letters = {"B": batch, "M": editor.symbol("M", _BLOCKS), "Z": editor.symbol("Z", _POOL)}
        blocks = State(Part.TABLE, None, "int64", ("B", "M"), -1, CacheRegion.POOL)
        table = buffer(program, editor, blocks, letters)
        pools: dict[fx.Node, fx.Node] = {}
        where: dict[int, fx.Node] = {}
        for node in nodes:
            held = [cache_of(node, part) for part in (Part.KEYS, Part.VALUES)]
            for old in held:
                if old not in pools:
                    pools[old] = self._pool(program, editor, old, letters)
            groups = int(sizes(held[0])[1])
            with editor.graph.inserting_before(nodes[0]):
                if groups not in where:
                    where[groups] = editor.call(block_positions.default, table, groups, self.block)
            with editor.graph.inserting_before(node):
                read = {
                    old: editor.call(gather_blocks.default, pools[old], table, like=node)
                    for old in dict.fromkeys(held)
                }
            kept = {"kept_k": read[held[0]], "kept_v": read[held[1]], "kept_pos": where[groups]}
            node.kwargs = {**node.kwargs, **kept}
        return Report(changed=len(nodes) + recurrences)

    def _pool(
        self, program: Program, editor: Editor, old: fx.Node, letters: dict[str, object]
    ) -> fx.Node:
        """The state value that holds in blocks what `old` [B,G,C,D] holds in slots."""
        state = next(s for s in program.state if s.name == old.target)
        _, groups, _, width = state.shape
        shape = ("Z", groups, self.block, width)
        return buffer(
            program, editor, replace(state, shape=shape, region=CacheRegion.POOL), letters
        )
