"""What a method of kv.codec is made of: pure functions of tensors, told where they are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from accel.ir.program import DTYPES
from accel.passes import Rewriting
from accel.passes.trained import Parts

Layout = dict[str, tuple[str, tuple[int, ...]]]  # part -> dtype, sizes after [B,G,C] or [B,G,P]


@dataclass(frozen=True)
class At:
    """Where a function is asked: the keys or values of one layer.

    role: "k" or "v". width: D, numbers of a token; of all heads where they are `together`. place: where the layer
    stands, of `AcrossLayers`. constants: of the layer, by name, of a method that is also a `Tables`, or `Trained`.
    context: what the method asked for of elsewhere (`Storage.queries`, `AcrossLayers.near`), by name.
    """

    role: str
    width: int
    place: str = ""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    context: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Storage:
    """In which pieces a method takes numbers, and how they are read.

    block: R, tokens that are encoded together; 0: each by itself. sinks: the first tokens, which stay exact where
    others are encoded in blocks. together: all heads of a layer are one, x [B,1,T,G D]. unrotated: keys come before
    RoPE, which then stands behind `decode`, with the stored positions.

    saturates: each number has a range that no other changes: what is beyond it (an infinity, too) is read as its
    nearest end, and NaN as some number of it. Without, what is no number is not read back as one.

    Of blocks only: queries: `encode` of keys gets the context "queries" [B,G,D,D], the sum of the outer products of
    all queries so far that read them, after RoPE. coarse: the parts that a call reads that asks for less
    (`session.run(coarse=True)`): `decode` then gets these alone. None: every call reads all.
    """

    block: int = 0
    sinks: int = 0
    together: bool = False
    unrotated: bool = False
    saturates: bool = False
    queries: bool = False
    coarse: tuple[str, ...] = ()


@dataclass(frozen=True)
class Codec(Rewriting, ABC):
    """How keys and values are stored, each in `parts`."""

    @property
    def storage(self) -> Storage:
        """In which pieces it takes them."""
        return Storage()

    def constants(self, parts: Parts) -> Parts:
        """What its functions get of each layer, made of the tensors of its file, of all layers."""
        return parts

    def unread(self, at: At) -> Tensor | None:
        """Of blocks only: bool [G], the heads that read sinks and the newest tokens alone; None: all read blocks."""
        return None

    @abstractmethod
    def parts(self, at: At) -> Layout:
        """What is kept of D numbers, or of a block; the first part is named ""."""

    @abstractmethod
    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        """x [B,G,T,D] -> its parts [B,G,T,…]; blocks [B,G,P,R,D] -> [B,G,P,n]. A row (one slot, or block, of one head)
        must not depend on others.
        """

    @abstractmethod
    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        """Parts [B,G,C,…] -> [B,G,C,D] float32; of blocks [B,G,P,n] -> [B,G,P R,D]."""

    @abstractmethod
    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """What the codec promises: whether `back`, which was read of x [B,G,T,D], or of blocks [B,G,P,R,D], is as near
        to it as its bits allow. bool, one for each number, row or block. x is finite. The laws of the axis hold it to
        this, and require it to be false of what is 0.9 times as large.
        """

    def bits_of(self, at: At) -> float:
        """Bits that a number takes, all told."""
        found = self.parts(at).values()
        bits: int = sum(8 * DTYPES[dtype].itemsize * prod(sizes) for dtype, sizes in found)
        return bits / (max(1, self.storage.block) * at.width)


class AcrossLayers(Codec):
    """A codec of blocks whose functions know of other layers. All get `At.place`; `encode` and `within`, and `decode`,
    get numbers of others.
    """

    @abstractmethod
    def place(self, layer: int, layers: int) -> str:
        """Where a layer stands among so many, as far as the codec makes a difference."""

    @abstractmethod
    def near(self, role: str, place: str, written: bool) -> tuple[str, ...]:
        """Names of the context, blocks [B,G,P,R,D] of the same tokens: `read`, what the same role of the layer beneath
        is read as; `keys`, of values what this layer's keys are read as; while blocks are `written` also `above` and
        `beneath`, what the layers above and beneath hold.
        """
