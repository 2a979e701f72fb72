"""kv.codec: how keys and values are stored. A method is a few pure functions of tensors; this pass inserts them between
attention and the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.invariants import Invariant, Method
from accel.ir.ops.kv import gather_blocks, kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import DTYPES, Editor, Program, State
from accel.ir.region import Entry
from accel.ir.state import CacheRegion
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.kv.codec._blocks import hold
from accel.passes.state.cache import Cache

Sizes = tuple[int, ...]
STORED = (
    CacheRegion.RECENT,
    CacheRegion.KEPT,
    CacheRegion.POOL,
)  # where keys and values are encoded

BLOCKS_RELY = frozenset(
    {
        Invariant.APPEND_ONLY,
        Invariant.FIXED_LAYERS,
        Invariant.ROW_PRIVATE,
        Invariant.TOKENS_CONTIGUOUS,
        Invariant.UNIFORM_SLOTS,
    }
)
BLOCKS_BREAK = frozenset(
    {Invariant.CALL_INDEPENDENT, Invariant.DECODE_WIDTH, Invariant.BATCH_INVARIANCE}
)


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """How keys and values are stored: `kv.<layer>.k/v` [B,G,C,D], and the tokens that eviction kept, are
    replaced by the parts of the codec, per slot, or per block of R = `block` tokens. `role` is "k" or "v".

    Per slot: a call also reads its own keys and values as they are stored, so a call of T tokens gives the logits of
    T single-token calls, and an overwritten slot leaves no trace.
    Per block: at least the newest R tokens stay exact; older tokens go into `kept.<layer>` (_blocks.py).
    """

    after = (Cache,)
    flat = True
    grade = "approximate"

    others: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that the laws try beside the defaults."""

    @property
    def block(self) -> int:
        """Tokens that are encoded together; 0: each by itself."""
        return 0

    @property
    def relies(self) -> frozenset[Invariant]:
        return BLOCKS_RELY if self.block else frozenset()

    @property
    def breaks(self) -> frozenset[Invariant]:
        return frozenset({Invariant.PLAIN_KEYS}) | (BLOCKS_BREAK if self.block else frozenset())

    @abstractmethod
    def parts(self, role: str, width: int) -> dict[str, tuple[str, Sizes]]:
        """What is kept of D = `width` numbers, or of a block: name -> (dtype, sizes after [B,G,C] or, of
        blocks, [B,G,P]). The first is named "".
        """

    @abstractmethod
    def encode(self, role: str, x: Tensor) -> dict[str, Tensor]:
        """x [B,G,T,D] -> its parts [B,G,T,…]; blocks [B,G,P,R,D] -> [B,G,P,n]. A row (one slot, or block,
        of one head) must not depend on others.
        """

    @abstractmethod
    def decode(self, role: str, parts: dict[str, Tensor], width: int) -> Tensor:
        """Parts [B,G,C,…] -> [B,G,C,D] float32, D = `width`; of blocks [B,G,P,n] -> [B,G,P R,D]."""

    @abstractmethod
    def bits_of(self, role: str, width: int) -> float:
        """Bits that a number takes, all told, where D = `width`."""

    @abstractmethod
    def within(self, role: str, x: Tensor, back: Tensor) -> Tensor:
        """What the codec promises: whether `back`, which was read of x [B,G,T,D], or of blocks [B,G,P,R,D], is as
        near to it as its bits allow. bool, one for each number, row or block. x is finite. The laws of the axis hold
        it to this, and require it to be false of what is 0.9 times as large.
        """

    def run(self, program: Program) -> Report:
        if self.block:
            return hold(self, program)
        report, layout = Report(), {s.name: [s] for s in program.state}
        for state in program.state:
            if _encodable(state):
                layout[state.name] = self._layout(state)
                report.changed += 1
            elif state.stored and state.cross:
                report.refused.append(
                    f"{state.name}: the encode entry writes it once, uncompressed"
                )
        if not report.changed:
            raise PassError(
                f"{type(self).__name__}: {program.facts.name} has no cache of keys and "
                "values to quantise; leave kv.codec out"
            )
        for entry in program.entries.values():
            outputs = entry.output_nodes()
            for state in program.state:
                if _encodable(state):
                    self._store(program, entry, state, layout[state.name], outputs)
            entry.set_outputs(outputs)
        program.state[:] = [part for parts in layout.values() for part in parts]
        return report

    def _layout(self, state: State) -> list[State]:
        """The state values that take the place of one."""
        found = []
        for part, (dtype, sizes) in self.parts(state.part, int(state.shape[3])).items():
            shape = (*state.shape[:3], *sizes)
            found.append(replace(state, detail=part, dtype=dtype, shape=shape))
        return found

    def _store(
        self,
        program: Program,
        entry: Entry,
        state: State,
        layout: list[State],
        outputs: dict[str, fx.Node],
    ) -> None:
        """What an entry reads of a buffer is decoded, what it writes there encoded."""
        if state.name not in entry.inputs:
            return
        graph, editor, role = entry.graph, Editor(program, entry.graph), state.part
        holder, written = entry.input(state.name), outputs.pop(state.output, None)
        lead = holder.meta["val"].shape[:3]
        held = [
            editor.placeholder(part.name, (*lead, *part.shape[3:]), DTYPES[part.dtype])
            for part in layout
        ]
        read, place = holder, graph.find_nodes(op="placeholder")[-1].next
        new: list[fx.Node] = []
        if written is not None and written.target is kv_append.default:
            read = place = written
            slots = operand_of(written, "slots")
            with graph.inserting_before(place):
                parts = self._encoded(editor, state, operand_of(written, "new"), written)
                new = held = [
                    editor.call(kv_append.default, old, part, slots, like=written)
                    for old, part in zip(held, parts, strict=True)
                ]
        elif written is not None:
            with graph.inserting_before(graph.find_nodes(op="output")[0]):
                new = self._encoded(editor, state, written)
        outputs |= {part.output: node for part, node in zip(layout, new, strict=bool(new))}

        def decode(*parts: Tensor) -> Tensor:
            width = int(state.shape[3])
            return self.decode(role, dict(zip(self.parts(role, width), parts, strict=True)), width)

        key = "decode", self, role, int(state.shape[3])
        for gather in [u for u in holder.users if u.target is gather_blocks.default]:
            with graph.inserting_before(gather):  # what a row's blocks hold, not the whole pool
                blocks = [
                    editor.call(gather_blocks.default, x, operand_of(gather, "table"), like=gather)
                    for x in held
                ]
                decoded = trace(editor, state.name, decode, *blocks, like=gather, key=key)
            gather.replace_all_uses_with(decoded)
            graph.erase_node(gather)
        if read.users:
            with graph.inserting_before(place):
                read.replace_all_uses_with(
                    trace(editor, state.name, decode, *held, like=read, key=key)
                )
        for node in dict.fromkeys((read, holder)):
            graph.erase_node(node)

    def _encoded(
        self, editor: Editor, state: State, x: Any, like: fx.Node | None = None
    ) -> list[fx.Node]:
        """The parts of a value, in the order that they are declared in."""
        role = state.part
        found = trace(
            editor, state.name, partial(self.encode, role), x, like=like, key=("encode", self, role)
        )
        return [found[part] for part in self.parts(role, int(state.shape[3]))]


def _encodable(state: State) -> bool:
    """Whether it is keys or values that a codec stores otherwise."""
    return state.stored and state.region in STORED
