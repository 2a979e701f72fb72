"""What a codec's functions see of one layer: its heads apart or together, keys before or after rope, its constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.ir.state import Part, name_of
from accel.ir.tables import Tables
from accel.passes.kv._shared.cached import appends, cache_of
from accel.passes.kv._shared.rotation import Rotation, rotated, rotation_of
from accel.passes.kv._shared.tables import appended
from accel.passes.kv.codec._method import AcrossLayers, At, Codec, Layout, Storage
from accel.passes.trained import Parts, Trained, constants

_SPARE = (
    1024  # slots of a buffer beyond the model's positions, at most: a call's, and up to a whole 256
)
_PARTS = (Part.KEYS, Part.VALUES)
INSTEAD = "use kv.codec = 'kv-int8' for this model"


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
    place: str = ""  # where the codec spans layers
    tensors: tuple[Tensor, ...] = field(default=(), compare=False)
    rotation: Rotation | None = field(default=None, compare=False)
    number: int = field(default=0, compare=False)  # of the layer that owns the buffer

    @property
    def storage(self) -> Storage:
        return self.codec.storage

    def near(self, written: bool) -> tuple[str, ...]:
        """What `encode` (written) or `decode` gets of other layers."""
        codec = self.codec
        if not isinstance(codec, AcrossLayers):
            return ()
        return codec.near(self.role, self.place, written)

    def at(self, operands: Sequence[Tensor], context: Sequence[str] = ()) -> At:
        """What its functions are told. operands: those of this context, then the constants."""
        wide = self.heads * self.width if self.storage.together else self.width
        count = len(context)
        told = dict(zip(context, operands[:count], strict=True))
        constants = dict(zip(self.names, operands[count:], strict=True))
        return At(self.role, wide, self.place, constants, told)

    @property
    def groups(self) -> int:
        """What stands in the place of G."""
        return 1 if self.storage.together else self.heads

    def parts(self) -> Layout:
        """See Codec."""
        return self.codec.parts(self.at(self.tensors))

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
        return self.storage.queries and self.role == "k"

    def encode(self, x: Tensor, *operands: Tensor) -> dict[str, Tensor]:
        """x [B,G,T,D], or blocks [B,G,P,R,D], as the codec gets it -> its parts. operands: the queries' products
        [B,G,D,D], where it asks, and constants.
        """
        return self.encode_joined(self._joined(x), *operands)

    def encode_joined(self, x: Tensor, *operands: Tensor) -> dict[str, Tensor]:
        """The same of what `joined` gives; the operands also are what it gets of other layers, before constants."""
        context = (*(("queries",) if self.asks else ()), *self.near(True))
        return self.codec.encode(self.at(operands, context), x)

    def encode_turned(
        self, x: Tensor, where: Tensor, cos: Tensor, sin: Tensor, *operands: Tensor
    ) -> dict[str, Tensor]:
        """Of keys after rope at the positions `where`, in the shape of x without D; axis 1 may be 1."""
        return self.encode(self._back(x, where, cos, sin), *operands)

    def joined(self, x: Tensor, *turned: Tensor) -> Tensor:
        """Blocks as the codec gets them. turned: their positions with cos and sin, where it gets keys before rope."""
        return self._joined(self._back(x, *turned) if turned else x)

    def _joined(self, x: Tensor) -> Tensor:
        return x.movedim(1, -2).flatten(-2)[:, None] if self.storage.together else x

    def _back(self, x: Tensor, where: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys before rope."""
        at, square = where.clamp(min=0), self.factor**2
        return rotated(x, cos[at] / square, -sin[at] / square, self.interleaved)

    def encode_slots(self, x: Tensor, *constants: Tensor) -> dict[str, Tensor]:
        """x [B,G,N,D] -> the parts of its blocks [B,G,ceil(N/R),n]; the last is filled up with the last slot."""
        return self.encode(
            x.index_select(2, self._whole(x)).unflatten(2, [-1, self.storage.block]), *constants
        )

    def encode_turned_slots(
        self, x: Tensor, where: Tensor, cos: Tensor, sin: Tensor, *constants: Tensor
    ) -> dict[str, Tensor]:
        """The same of keys after rope at the positions `where` [B,G,N]."""
        rows, size = self._whole(x), [-1, self.storage.block]
        x, where = (part.index_select(2, rows).unflatten(2, size) for part in (x, where))
        return self.encode_turned(x, where, cos, sin, *constants)

    def _whole(self, x: Tensor) -> Tensor:
        """The slots of x [B,G,N,D], as many as whole blocks have."""
        size, count = self.storage.block, x.shape[2]
        slots = torch.arange((count + size - 1) // size * size, device=x.device)
        return slots.clamp(max=count - 1)

    def decode_slots(self, where: Tensor, *operands: Tensor) -> Tensor:
        """Of blocks of slots at the positions `where` [B,G,P]: [B,G,P,D]. The operands of `decode`, but for these."""
        names, count = list(self.parts()), where.shape[2]
        parts, rest = operands[: len(names)], operands[len(names) :]
        blocks = parts[0].shape[2] * self.storage.block
        places = torch.nn.functional.pad(where, (0, blocks - count), value=-1)
        turned = (places,) if self.turned else ()
        return self.decode(*parts, *turned, *rest).narrow(2, 0, count)

    def decode_coarse(self, *operands: Tensor) -> Tensor:
        """The same of the parts that a coarse reading takes."""
        return self.decode(*operands, read=self.storage.coarse)

    def decode(self, *operands: Tensor, read: tuple[str, ...] = ()) -> Tensor:
        """Of the parts, the positions [B,C] or [B,G,C] with cos and sin (where turned), the constants: [B,G,C,D].
        `read`: of the parts those that count; none: all.
        """
        names = list(self.parts())
        parts, rest = dict(zip(names, operands, strict=False)), operands[len(names) :]
        parts = {name: part for name, part in parts.items() if not read or name in read}
        turned = rest[:3] if self.turned else ()
        return self._apart(self._decoded(parts, *rest[len(turned) :]), *turned)

    def decode_both(self, *operands: Tensor) -> tuple[Tensor, Tensor]:
        """The same, with what the codec gets of other layers before the constants; and as it gives them to others."""
        names = list(self.parts())
        parts, rest = dict(zip(names, operands, strict=False)), operands[len(names) :]
        turned = rest[:3] if self.turned else ()
        x = self._decoded(parts, *rest[len(turned) :])
        return self._apart(x, *turned), x.unflatten(2, [-1, self.storage.block])

    def decode_joined(self, *operands: Tensor) -> Tensor:
        """The latter alone, of the parts, what it gets of other layers, and constants: blocks [B,G,P,R,D]."""
        names = list(self.parts())
        parts = dict(zip(names, operands, strict=False))
        x = self._decoded(parts, *operands[len(names) :])
        found: Tensor = x.unflatten(2, [-1, self.storage.block])
        return found

    def _decoded(self, parts: dict[str, Tensor], *operands: Tensor) -> Tensor:
        """As the codec gives them."""
        found: Tensor = self.codec.decode(self.at(operands, self.near(False)), parts)
        return found

    def _apart(
        self,
        x: Tensor,
        where: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor:
        """As attention reads them: heads apart, keys after rope."""
        if self.storage.together:
            x = x.unflatten(-1, [self.heads, self.width]).flatten(0, 1).transpose(1, 2)
        if where is None or cos is None or sin is None:
            return x
        if where.dim() == 2:
            whole: Tensor = rope(x, where, cos, sin, self.interleaved)
            return whole
        heads = x.shape[1]
        at = where.expand(-1, heads, -1).flatten(0, 1)
        apart: Tensor = rope(x.flatten(0, 1)[:, None], at, cos, sin, self.interleaved)
        split: Tensor = apart.flatten(0, 1).unflatten(0, [-1, heads])
        return split


def layers(codec: Codec, program: Program) -> dict[str, Layer]:
    """What the codec sees of each buffer that a step appends keys or values to, by its name. Raises PassError."""
    sites: dict[str, tuple[fx.Node, Part]] = {}
    for node in program.nodes(attention.default, entry=program.step):
        if not appends(node):
            continue
        for part in _PARTS:
            buffer = cache_of(node, part)
            if part is Part.VALUES and buffer is cache_of(node, Part.KEYS):
                _check_latent(codec, node)
                continue
            sites.setdefault(str(buffer.target), (node, part))
    owners = {s.name: s.layer for s in program.state}
    if isinstance(codec, AcrossLayers):
        _check_alike(program, sites)
    known = _constants(codec, program, sites, owners)
    found: dict[str, Layer] = {}
    count = len(program.facts.layers)
    for name, (node, part) in sites.items():
        _, heads, _, width = sizes(cache_of(node, part))
        number = owners[name]
        assert number is not None
        rotation = None
        if codec.storage.unrotated and part is Part.KEYS:
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
            codec.place(number, count) if isinstance(codec, AcrossLayers) else "",
            tuple(tensors.values()),
            rotation,
            number,
        )
    return found


def _check_alike(program: Program, sites: dict[str, tuple[fx.Node, Part]]) -> None:
    """Raise PassError where a layer has no keys and values of its own, or others than the next."""
    held = {name_of(part, i) for i in range(len(program.facts.layers)) for part in _PARTS}
    shared = [i for i, one in enumerate(program.facts.layers) if one.shares is not None]
    for layer in shared:
        raise PassError(
            f"layer {layer} reads the cache of layer {program.facts.layers[layer].shares}, but a kv.codec that spans "
            f"layers needs one of each; {INSTEAD}"
        )
    if lacking := sorted(held - sites.keys()):
        raise PassError(
            f"there is no {lacking[0]} (a recurrent state, or a latent), but a kv.codec that spans layers needs "
            f"keys and values of every layer; {INSTEAD}"
        )
    forms = {tuple(sizes(cache_of(node, part))[1::2]) for node, part in sites.values()}
    if len(forms) > 1:
        raise PassError(
            f"layers have caches of other heads or widths ({', '.join(map(str, sorted(forms)))}), but a kv.codec that "
            f"spans layers needs one form; {INSTEAD}"
        )


def _check_latent(codec: Codec, node: fx.Node) -> None:
    asks = codec.storage.unrotated or codec.storage.together
    if asks or isinstance(codec, AcrossLayers | Tables | Trained):
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
