"""What a codec's functions see of one layer: its heads apart or together, keys before or after rope, its constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.ir.tables import Tables
from accel.passes.kv._shared.cached import appends, cache_of
from accel.passes.kv._shared.rotation import Rotation, rotated, rotation_of
from accel.passes.kv._shared.tables import appended
from accel.passes.trained import Parts, Trained, constants

Sizes = tuple[int, ...]
_SPARE = (
    1024  # slots of a buffer beyond the model's positions, at most: a call's, and up to a whole 256
)
INSTEAD = "use kv.codec = 'kv-int8' for this model"


class Codec(Protocol):
    """`accel.passes.kv.codec.Base`, which says what each member means."""

    @property
    def together(self) -> bool: ...
    @property
    def unrotated(self) -> bool: ...
    @property
    def queries(self) -> bool: ...
    @property
    def coarse(self) -> tuple[str, ...]: ...
    @property
    def block(self) -> int: ...
    @property
    def sinks(self) -> int: ...
    def constants(self, parts: Parts) -> Parts: ...
    def parts(self, *args: Any, **constants: Any) -> dict[str, tuple[str, Sizes]]: ...
    def encode(self, *args: Any, **constants: Any) -> dict[str, Tensor]: ...
    def decode(self, *args: Any, **constants: Any) -> Tensor: ...


@dataclass(frozen=True)
class Layer:
    """The keys or values of one buffer. heads, width: G and D. `turned`: the codec gets its keys before rope, which
    stands behind `decode`. Layers that compare equal have the same functions.
    """

    codec: Codec
    role: str
    heads: int
    width: int
    names: tuple[str, ...] = ()  # of constants
    turned: bool = False
    interleaved: bool = False
    factor: float = 1.0  # on both tables (YaRN)
    tensors: tuple[Tensor, ...] = field(default=(), compare=False)
    rotation: Rotation | None = field(default=None, compare=False)
    number: int = field(default=0, compare=False)  # of the layer that owns the buffer

    @property
    def groups(self) -> int:
        """What stands in the place of G."""
        return 1 if self.codec.together else self.heads

    def parts(self) -> dict[str, tuple[str, Sizes]]:
        """See Base."""
        wide = self.heads * self.width if self.codec.together else self.width
        return self.codec.parts(self.role, wide, **dict(zip(self.names, self.tensors, strict=True)))

    def operands(self, editor: Editor) -> list[fx.Node]:
        """The constants, in the editor's graph."""
        return [
            editor.param(f"codec.{self.number}.{name}", tensor)
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]

    def tables(self, editor: Editor) -> list[fx.Node]:
        """cos and sin, where keys are turned, with rows for as many slots as a buffer may have: ONNX Runtime rotates
        no more in a row than there are rows, though no position is behind the model's own.
        """
        if self.rotation is None:
            return []
        found = []
        for node, table in zip(
            self.rotation.nodes, (self.rotation.cos, self.rotation.sin), strict=True
        ):
            name = str(node.target) if node.op == "get_attr" else node.name
            longer = torch.cat((table, table[-1:].expand(_SPARE, -1)))
            found.append(editor.param(f"{name}.spare", longer))
        return found

    @property
    def asks(self) -> bool:
        """Whether `encode` gets the queries' products."""
        return self.codec.queries and self.role == "k"

    def encode(self, x: Tensor, *operands: Tensor) -> dict[str, Tensor]:
        """x [B,G,T,D], or blocks [B,G,P,R,D], as the codec gets it -> its parts. operands: the queries' products
        [B,G,D,D], where it asks, and constants.
        """
        if self.codec.together:
            x = x.movedim(1, -2).flatten(-2)[:, None]
        names = (*(("queries",) if self.asks else ()), *self.names)
        return self.codec.encode(self.role, x, **dict(zip(names, operands, strict=True)))

    def encode_turned(
        self, x: Tensor, where: Tensor, cos: Tensor, sin: Tensor, *operands: Tensor
    ) -> dict[str, Tensor]:
        """Of keys after rope at the positions `where`, in the shape of x without D; axis 1 may be 1."""
        at, square = where.clamp(min=0), self.factor**2
        return self.encode(
            rotated(x, cos[at] / square, -sin[at] / square, self.interleaved), *operands
        )

    def encode_slots(self, x: Tensor, *constants: Tensor) -> dict[str, Tensor]:
        """x [B,G,N,D] -> the parts of its blocks [B,G,ceil(N/R),n]; the last is filled up with the last slot."""
        return self.encode(
            x.index_select(2, self._whole(x)).unflatten(2, [-1, self.codec.block]), *constants
        )

    def encode_turned_slots(
        self, x: Tensor, where: Tensor, cos: Tensor, sin: Tensor, *constants: Tensor
    ) -> dict[str, Tensor]:
        """The same of keys after rope at the positions `where` [B,G,N]."""
        rows, size = self._whole(x), [-1, self.codec.block]
        x, where = (part.index_select(2, rows).unflatten(2, size) for part in (x, where))
        return self.encode_turned(x, where, cos, sin, *constants)

    def _whole(self, x: Tensor) -> Tensor:
        """The slots of x [B,G,N,D], as many as whole blocks have."""
        size, count = self.codec.block, x.shape[2]
        slots = torch.arange((count + size - 1) // size * size, device=x.device)
        return slots.clamp(max=count - 1)

    def decode_slots(self, where: Tensor, *operands: Tensor) -> Tensor:
        """Of blocks of slots at the positions `where` [B,G,P]: [B,G,P,D]. The operands of `decode`, but for these."""
        names, count = list(self.parts()), where.shape[2]
        parts, rest = operands[: len(names)], operands[len(names) :]
        blocks = parts[0].shape[2] * self.codec.block
        places = torch.nn.functional.pad(where, (0, blocks - count), value=-1)
        turned = (places,) if self.turned else ()
        return self.decode(*parts, *turned, *rest).narrow(2, 0, count)

    def decode_coarse(self, *operands: Tensor) -> Tensor:
        """The same of the parts that a coarse reading takes."""
        return self.decode(*operands, read=self.codec.coarse)

    def decode(self, *operands: Tensor, read: tuple[str, ...] = ()) -> Tensor:
        """Of the parts, the positions [B,C] or [B,G,C] with cos and sin (where turned), the constants: [B,G,C,D].
        `read`: of the parts those that count; none: all.
        """
        names = list(self.parts())
        parts, rest = dict(zip(names, operands, strict=False)), operands[len(names) :]
        parts = {name: part for name, part in parts.items() if not read or name in read}
        where, cos, sin = rest[:3] if self.turned else (None, None, None)
        constants = dict(zip(self.names, rest[3 if self.turned else 0 :], strict=True))
        wide = self.heads * self.width if self.codec.together else self.width
        x: Tensor = self.codec.decode(self.role, parts, wide, **constants)
        if self.codec.together:
            x = x[:, 0].unflatten(-1, [self.heads, self.width]).transpose(1, 2)
        if where is None or cos is None or sin is None:
            return x
        if where.dim() == 2:
            whole: Tensor = rope(x, where, cos, sin, self.interleaved)
            return whole
        heads = x.shape[1]
        at = where.expand(-1, heads, -1).flatten(0, 1)
        apart: Tensor = rope(x.flatten(0, 1)[:, None], at, cos, sin, self.interleaved)
        split: Tensor = apart[:, 0].unflatten(0, [-1, heads])
        return split


def layers(codec: Codec, program: Program) -> dict[str, Layer]:
    """What the codec sees of each buffer that a step appends keys or values to, by its name. Raises PassError."""
    sites: dict[str, tuple[fx.Node, Part]] = {}
    for node in program.nodes(attention.default, entry=program.step):
        if not appends(node):
            continue
        for part in (Part.KEYS, Part.VALUES):
            buffer = cache_of(node, part)
            if part is Part.VALUES and buffer is cache_of(node, Part.KEYS):
                _check_latent(codec, node)
                continue
            sites.setdefault(str(buffer.target), (node, part))
    owners = {s.name: s.layer for s in program.state}
    known = _constants(codec, program, sites, owners)
    found: dict[str, Layer] = {}
    for name, (node, part) in sites.items():
        _, heads, _, width = sizes(cache_of(node, part))
        number = owners[name]
        assert number is not None
        rotation = None
        if codec.unrotated and part is Part.KEYS:
            rotation = rotation_of(program, appended(node), "keys", INSTEAD)
        tensors = known.get(number, {})
        found[name] = Layer(
            codec,
            str(part),
            int(heads),
            int(width),
            tuple(tensors),
            rotation is not None,
            rotation is not None and rotation.interleaved,
            rotation.factor if rotation is not None else 1.0,
            tuple(tensors.values()),
            rotation,
            number,
        )
    return found


def _check_latent(codec: Codec, node: fx.Node) -> None:
    if codec.unrotated or codec.together or isinstance(codec, Tables | Trained):
        raise PassError(
            f"layer {node.meta.get('layer')}: its values are also its keys (a latent, MLA), which have no heads and "
            f"are rotated in part; {INSTEAD}"
        )


def _constants(
    codec: Codec,
    program: Program,
    sites: dict[str, tuple[fx.Node, Part]],
    owners: dict[str, int | None],
) -> Parts:
    """Of each layer that owns a buffer; empty where the codec has none."""
    if not isinstance(codec, Tables | Trained):
        return {}
    keys = {
        layer: appended(node)
        for name, (node, part) in sites.items()
        if part is Part.KEYS and (layer := owners[name]) is not None
    }
    known = (
        codec.tensors(program, keys)
        if isinstance(codec, Trained)
        else constants(codec, program, keys)
    )
    return codec.constants(known)


def positions_of(read: fx.Node) -> fx.Node:
    """The positions [B,C] or [B,G,C] of slots that attention reads, out of `read` or what gathers it."""
    for user in read.users:
        if user.target is not attention.default:
            continue
        x = operands_of(user)
        found = x.kept_pos if read in (x.kept_k, x.kept_v) else x.k_pos
        assert isinstance(found, fx.Node)
        return found
    raise PassError(
        f"{read.name}: no attention reads it, so its positions are not known; {INSTEAD}"
    )


def before_rope(keys: Any) -> fx.Node | None:
    """What `rope` rotates to make keys; None: something else made them."""
    if isinstance(keys, fx.Node) and keys.target is rope.default:
        found = operand_of(keys, "x")
        assert isinstance(found, fx.Node)
        return found
    return None
