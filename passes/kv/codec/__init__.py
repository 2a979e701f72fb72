"""kv.codec: how keys and values are stored. A method is a few pure functions of tensors; this pass inserts them between
attention and the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.invariants import Invariant, Method
from accel.ir.ops.kv import gather_blocks, kv_append
from accel.ir.ops.op import operand_of
from accel.ir.program import DTYPES, Editor, Program, State
from accel.ir.region import Entry
from accel.ir.state import CacheRegion, Part, name_of, output_of
from accel.ir.tables import Tables
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.kv.codec._blocks import hold
from accel.passes.kv.codec._layer import Layer, before_rope, layers, positions_of
from accel.passes.kv.codec._readers import Decoded, note_decoding
from accel.passes.state.cache import Cache
from accel.passes.trained import Parts

Sizes = tuple[int, ...]
_KEPT = 31  # example size while shapes are worked out
STORED = (
    CacheRegion.RECENT,
    CacheRegion.KEPT,
    CacheRegion.POOL,
)  # where keys and values are encoded

BLOCKS_RELY = frozenset(
    {
        Invariant.APPEND_ONLY,
        Invariant.FIXED_LAYERS,
        Invariant.HEADS_LEVEL,
        Invariant.ROW_PRIVATE,
        Invariant.UNIFORM_SLOTS,
    }
)
QUERIES_RELY = frozenset({Invariant.ALL_LAYERS_RUN, Invariant.ALL_TOKENS_HELD})
BLOCKS_BREAK = frozenset({Invariant.CALL_INDEPENDENT, Invariant.BATCH_INVARIANCE})


@dataclass(frozen=True)
class Base(Pass, Method, ABC):
    """How keys and values are stored: `kv.<layer>.k/v` [B,G,C,D], and the tokens that eviction kept, are
    replaced by the parts of the codec, per slot, or per block of R = `block` tokens. `role` is "k" or "v".

    `together`: the functions get all heads of a layer as one, x [B,1,T,G D]. `unrotated`: they get keys before RoPE,
    which then stands behind `decode`, with the stored positions. A codec that is also a `Tables`, or `Trained`, has
    constants of each layer: further parameters of its functions, by their names.

    Per slot: a call also reads its own keys and values as they are stored, so a call of T tokens gives the logits of
    T single-token calls, and an overwritten slot leaves no trace.
    Where a recipe evicts, blocks are of what is kept alone: encoded of what was gathered, and again of what is read of
    them each time that more is; tokens since then stay exact.

    Per block: at least the newest R tokens stay exact, and the first `sinks`; the others go into `kept.<layer>`
    (_blocks.py).
    """

    after = (Cache,)
    flat = True
    grade = "approximate"

    others: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that the laws try beside the defaults."""

    together: ClassVar[bool] = False
    unrotated: ClassVar[bool] = False

    saturates: ClassVar[bool] = False
    """Each number has a range that no other changes: what is beyond it (an infinity, too) is read as its nearest end,
    and NaN as some number of it. Without, what is no number is not read back as one.
    """

    queries: ClassVar[bool] = False
    """Of a block codec: `encode` of keys also gets `queries` [B,G,D,D], the sum of the outer products of all queries
    so far that read them, after RoPE.
    """

    coarse: ClassVar[tuple[str, ...]] = ()
    """Of a block codec: the parts that a call reads that asks for less (`session.run(coarse=True)`): `decode` then gets
    these alone, and no other is read. None: every call reads all.
    """

    spans: ClassVar[bool] = False
    """Of a block codec: its functions know of other layers. All get `place`, which of the layers it is (`place`);
    `encode` and `within`, and with `written` false `decode`, get numbers of others (`near`).
    """

    def place(self, layer: int, layers: int) -> str:
        """Where a layer stands among so many, as far as the codec makes a difference."""
        return ""

    def near(self, role: str, place: str, written: bool) -> tuple[str, ...]:
        """Further parameters, blocks [B,G,P,R,D] of the same tokens: `read`, what the same role of the layer beneath is
        read as; `keys`, of values what this layer's keys are read as; while blocks are `written` also `above` and
        `beneath`, what the layers above and beneath hold.
        """
        return ()

    @property
    def block(self) -> int:
        """Tokens that are encoded together; 0: each by itself."""
        return 0

    @property
    def sinks(self) -> int:
        """The first tokens, which stay exact where others are encoded in blocks."""
        return 0

    @property
    def relies(self) -> frozenset[Invariant]:
        heads = frozenset({Invariant.HEADS_ALIKE} if self.together else ())
        if isinstance(self, Tables):  # constants of a head say nothing of one list of all
            heads |= {Invariant.HEADS_LEVEL}
        asks = QUERIES_RELY if self.queries else frozenset()
        if self.coarse or self.spans:  # what eviction keeps is read in one way, and by layer
            asks |= {Invariant.ALL_TOKENS_HELD}
        if self.spans:
            asks |= {Invariant.ALL_LAYERS_RUN}
        return heads | asks | (BLOCKS_RELY if self.block else frozenset())

    @property
    def breaks(self) -> frozenset[Invariant]:
        asks = frozenset({Invariant.REWIND} if self.queries else ())  # a draft's stay in the sum
        plain = frozenset({Invariant.PLAIN_KEYS})
        return plain | asks | (BLOCKS_BREAK if self.block else frozenset())

    @property
    def provides(self) -> frozenset[Invariant]:
        return frozenset({Invariant.COARSE_READS} if self.coarse else ())

    def constants(self, parts: Parts) -> Parts:
        """What its functions get of each layer, made of the tensors of its file, of all layers."""
        return parts

    @abstractmethod
    def parts(self, *args: Any, **constants: Any) -> dict[str, tuple[str, Sizes]]:
        """`parts(role, width, **constants)`: what is kept of D = `width` numbers, or of a block: name -> (dtype, sizes
        after [B,G,C] or, of blocks, [B,G,P]). The first is named "".
        """

    @abstractmethod
    def encode(self, *args: Any, **constants: Any) -> dict[str, Tensor]:
        """`encode(role, x, **constants)`: x [B,G,T,D] -> its parts [B,G,T,…]; blocks [B,G,P,R,D] -> [B,G,P,n]. A row
        (one slot, or block, of one head) must not depend on others.
        """

    @abstractmethod
    def decode(self, *args: Any, **constants: Any) -> Tensor:
        """`decode(role, parts, width, **constants)`: parts [B,G,C,…] -> [B,G,C,D] float32, D = `width`; of blocks
        [B,G,P,n] -> [B,G,P R,D].
        """

    @abstractmethod
    def within(self, *args: Any, **constants: Any) -> Tensor:
        """`within(role, x, back, **constants)`: what the codec promises: whether `back`, which was read of x
        [B,G,T,D], or of blocks [B,G,P,R,D], is as near to it as its bits allow. bool, one for each number, row or
        block. x is finite. The laws of the axis hold it to this, and require it to be false of what is 0.9 times as
        large.
        """

    @abstractmethod
    def bits_of(self, *args: Any, **constants: Any) -> float:
        """`bits_of(role, width, **constants)`: bits that a number takes, all told, where D = `width`."""

    def run(self, program: Program) -> Report:
        stored: tuple[CacheRegion, ...] = STORED
        if self.block:
            if not any(s.region is CacheRegion.KEPT for s in program.state):
                return hold(self, program)
            stored = (CacheRegion.KEPT,)
        report, layout = Report(), {s.name: [s] for s in program.state}
        seen, editor = layers(self, program), Editor(program, program.step.graph)
        symbols: dict[int | str, Any] = {}  # of blocks of a layer's slots
        encodable = [s for s in program.state if s.stored and s.region in stored]
        for state in program.state:
            if state in encodable:
                layout[state.name] = _layout(state, seen[_buffer(state)], self.block)
                report.changed += 1
                letter = layout[state.name][0].shape[2]
                if self.block and letter not in symbols:
                    example = -(-(_KEPT + (state.layer or 0)) // self.block) + 1
                    symbols[letter] = editor.symbol(str(letter), example)
            elif state.stored and state.cross:
                report.refused.append(
                    f"{state.name}: the encode entry writes it once, uncompressed"
                )
        if not report.changed:
            raise PassError(
                f"{type(self).__name__}: {program.facts.name} has no cache of keys and "
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
        layer.groups if layer.codec.together else state.shape[1]
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
