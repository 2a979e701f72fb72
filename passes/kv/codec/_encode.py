"""The pass of kv.codec: what a step reads of its cache is decoded, what it writes there encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.kv import gather_blocks, kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import DTYPES, Editor, Program, State
from accel.ir.region import Entry
from accel.ir.state import CacheRegion, Part, name_of, output_of
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.kv.codec._blocks import hold
from accel.passes.kv.codec._layer import Layer, before_rope, layers, positions_of
from accel.passes.kv.codec._method import Codec
from accel.passes.kv.codec._readers import Decoded, note_decoding
from accel.passes.state.cache import Cache

_KEPT = 31  # example size while shapes are worked out
STORED = (
    CacheRegion.RECENT,
    CacheRegion.KEPT,
    CacheRegion.POOL,
)  # where keys and values are encoded


@dataclass(frozen=True)
class Encode(Pass):
    """`kv.<layer>.k/v` [B,G,C,D], and the tokens that eviction kept, are replaced by the parts of a codec, per slot, or
    per block of R tokens.

    Per slot: a call also reads its own keys and values as they are stored, so a call of T tokens gives the logits of
    T single-token calls, and an overwritten slot leaves no trace.
    Where a recipe evicts, blocks are of what is kept alone: encoded of what was gathered, and again of what is read of
    them each time that more is; tokens since then stay exact.

    Per block: at least the newest R tokens stay exact, and the first `sinks`; the others go into `kept.<layer>`
    (_blocks.py).
    """

    codec: Codec

    after = (Cache,)
    flat = True

    @property
    def method(self) -> Codec:
        return self.codec

    @property
    def error(self) -> float:  # type: ignore[override]
        return self.codec.error

    @property
    def grade(self) -> str:  # type: ignore[override]
        return self.codec.grade

    def run(self, program: Program) -> Report:
        stored: tuple[CacheRegion, ...] = STORED
        if block := self.codec.storage.block:
            if not any(s.region is CacheRegion.KEPT for s in program.state):
                return hold(self.codec, program)
            stored = (CacheRegion.KEPT,)
        report, layout = Report(), {s.name: [s] for s in program.state}
        seen, editor = layers(self.codec, program), Editor(program, program.step.graph)
        symbols: dict[int | str, Any] = {}  # of blocks of a layer's slots
        encodable = [s for s in program.state if s.stored and s.region in stored]
        for state in program.state:
            if state in encodable:
                layout[state.name] = _layout(state, seen[_buffer(state)], block)
                report.changed += 1
                letter = layout[state.name][0].shape[2]
                if block and letter not in symbols:
                    example = -(-(_KEPT + (state.layer or 0)) // block) + 1
                    symbols[letter] = editor.symbol(str(letter), example)
            elif state.stored and state.cross:
                report.refused.append(
                    f"{state.name}: the encode entry writes it once, uncompressed"
                )
        if not report.changed:
            raise PassError(
                f"{self.name}: {program.facts.name} has no cache of keys and "
                "values to quantise; leave kv.codec out"
            )
        decoded: Decoded = []  # of the step
        for entry in program.entries.values():
            outputs = entry.output_nodes()
            for state in encodable:
                if state.name in entry.inputs:
                    layer, parts = seen[_buffer(state)], layout[state.name]
                    blocks = symbols.get(parts[0].shape[2])
                    store = _Store(program, entry, state, layer, parts, outputs, blocks)
                    store.change()
                    if entry is program.step:
                        decoded += store.read
            entry.set_outputs(outputs)
        note_decoding(program, decoded)
        program.state[:] = [part for parts in layout.values() for part in parts]
        return report


def _buffer(state: State) -> str:
    """The buffer that a step appends to, of the same keys or values."""
    return name_of(state.part, state.layer)


def _layout(state: State, layer: Layer, block: int) -> list[State]:
    """The state values that take the place of one."""
    slots = f"{state.shape[2]}/{block}" if block else state.shape[2]
    groups = (
        layer.groups if layer.storage.together else state.shape[1]
    )  # 1: one head's after another's
    lead = (state.shape[0], groups, slots)
    return [
        replace(state, detail=part, dtype=dtype, shape=(*lead, *sizes))
        for part, (dtype, sizes) in layer.parts().items()
    ]


@dataclass
class _Store:
    """What an entry reads of a buffer is decoded, what it writes there encoded."""

    program: Program
    entry: Entry
    state: State
    layer: Layer
    layout: list[State]
    outputs: dict[str, fx.Node]
    blocks: Any = None  # how many there are, where slots are encoded in blocks
    read: Decoded = field(default_factory=list)  # what is decoded

    def __post_init__(self) -> None:
        self.graph, self.editor = self.entry.graph, Editor(self.program, self.entry.graph)
        self.first = self.graph.find_nodes(op="placeholder")[-1].next
        with self.graph.inserting_before(self.first):
            self.constants = self.layer.operands(self.editor)
            self.tables = self.layer.tables(self.editor)

    def change(self) -> None:
        """Put the parts of the codec in the place of the buffer."""
        state, graph, editor = self.state, self.graph, self.editor
        holder, written = self.entry.input(state.name), self.outputs.pop(state.output, None)
        rows, _, slots = holder.meta["val"].shape[:3]
        groups = self.layout[0].shape[1]
        lead = (rows, groups, slots if self.blocks is None else self.blocks)
        held = [
            editor.placeholder(part.name, (*lead, *part.shape[3:]), DTYPES[part.dtype])
            for part in self.layout
        ]
        read, place = holder, self.first
        new: list[fx.Node] = []
        if written is not None and written.target is kv_append.default:
            read = place = written
            with graph.inserting_before(place):
                new = held = [
                    editor.call(
                        kv_append.default, old, part, operand_of(written, "slots"), like=written
                    )
                    for old, part in zip(held, self._appended(written), strict=True)
                ]
        elif written is not None:
            with graph.inserting_before(graph.find_nodes(op="output")[0]):
                new = self._written(written)
        self.outputs |= {
            part.output: node for part, node in zip(self.layout, new, strict=bool(new))
        }
        for gather in [u for u in holder.users if u.target is gather_blocks.default]:
            with graph.inserting_before(gather):  # what a row's blocks hold, not the whole pool
                blocks = [
                    editor.call(gather_blocks.default, x, operand_of(gather, "table"), like=gather)
                    for x in held
                ]
                decoded = self._decoded(blocks, gather)
            gather.replace_all_uses_with(decoded)
            graph.erase_node(gather)
        if read.users:
            with graph.inserting_before(place):
                read.replace_all_uses_with(self._decoded(held, read))
        for node in dict.fromkeys((read, holder)):
            graph.erase_node(node)

    def _appended(self, written: fx.Node) -> list[fx.Node]:
        """The parts of what an entry appends."""
        x = operand_of(written, "new")
        if self.layer.turned:
            x = before_rope(x)
        assert isinstance(x, fx.Node)
        return self._encoded(self.layer.encode, x, like=written)

    def _written(self, x: fx.Node) -> list[fx.Node]:
        """The parts of a buffer that an entry writes whole."""
        layer, slots = self.layer, self.blocks is None
        if not layer.turned:
            return self._encoded(layer.encode if slots else layer.encode_slots, x)
        where = self.outputs[output_of(self._where)]
        encode = layer.encode_turned if slots else layer.encode_turned_slots
        return self._encoded(encode, x, where, *self.tables)

    def _encoded(
        self, function: Callable[..., dict[str, Tensor]], *x: fx.Node, like: fx.Node | None = None
    ) -> list[fx.Node]:
        """In the order that the parts are declared in."""
        key = function.__name__, self.layer
        operands = (*x, *self.constants)
        found = trace(self.editor, self.state.name, function, *operands, like=like, key=key)
        return [found[part] for part in self.layer.parts()]

    def _decoded(self, parts: list[fx.Node], read: fx.Node) -> fx.Node:
        """What stands in the place of `read`."""
        if self.blocks is not None:
            where = self.entry.input(self._where)
            return self._traced(self.layer.decode_slots, where, *parts, *self.tables, like=read)
        turned: list[fx.Node] = []
        if self.layer.turned:
            seen = self.entry is self.program.step or self.state.region is CacheRegion.POOL
            where = positions_of(read) if seen else self.entry.input(self._where)
            turned = [where, *self.tables]
        return self._traced(self.layer.decode, *parts, *turned, like=read)

    def _traced(self, decode: Callable[..., Tensor], *operands: fx.Node, like: fx.Node) -> fx.Node:
        """With the constants."""
        key = decode.__name__, self.layer
        operands = (*operands, *self.constants)
        found = trace(self.editor, self.state.name, decode, *operands, like=like, key=key)
        assert isinstance(found, fx.Node)
        self.read.append((self.layer, found))
        return found

    @property
    def _where(self) -> str:
        """The state value that says the positions of these slots."""
        return next(
            s.name
            for s in self.program.state
            if s.part is Part.POSITIONS
            and s.region is self.state.region
            and s.shape[-1] == self.state.shape[2]
            and s.layer in (None, self.state.layer)
        )
