"""Codecs whose layers know of each other: what the functions of one layer get of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from accel.ir.program import Editor
from accel.ir.trace import trace
from accel.passes.kv.codec._layer import Layer

Place = tuple[int, str]  # of a buffer: the layer and the role


@dataclass
class Spanning:
    """`blocks` [B,G,P,R,D] of each buffer, as the codec gets them, and what they are `read` as.
    Layers come from the first on, keys before values.
    """

    blocks: dict[Place, fx.Node] = field(default_factory=dict)
    read: dict[Place, fx.Node] = field(default_factory=dict)

    def near(self, layer: Layer, written: bool) -> list[fx.Node]:
        """What a layer's functions get of others."""
        number, role = layer.number, layer.role
        places: dict[str, tuple[dict[Place, fx.Node], Place]] = {
            "read": (self.read, (number - 1, role)),
            "keys": (self.read, (number, "k")),
            "above": (self.blocks, (number + 1, role)),
            "beneath": (self.blocks, (number - 1, role)),
        }
        return [of[place] for of, place in (places[name] for name in layer.near(written))]

    def hold(
        self,
        editor: Editor,
        layer: Layer,
        name: str,
        fresh: fx.Node,
        recent: fx.Node,
        positions: fx.Node,
    ) -> None:
        """Blocks at the slots fresh [F,R] of a buffer."""
        turned = [positions, *layer.tables(editor)] if layer.turned else []

        def gathered(fresh: Tensor, recent: Tensor, *turned: Tensor) -> Tensor:
            at = [blocks_of(where[:, None, :, None], fresh)[..., 0] for where in turned[:1]]
            return layer.joined(blocks_of(recent, fresh), *at, *turned[1:])

        self.blocks[layer.number, layer.role] = trace(
            editor, f"compress.{name}", gathered, fresh, recent, *turned, key=("held", layer)
        )

    def encode(self, editor: Editor, layer: Layer, name: str) -> list[fx.Node]:
        """The parts of a buffer's blocks, in their order; what they are read as is known then."""
        place, constants = (layer.number, layer.role), layer.operands(editor)
        operands = (self.blocks[place], *self.near(layer, written=True), *constants)
        made: dict[str, Any] = trace(
            editor, f"compress.{name}", layer.encode_joined, *operands, key=("encode", layer)
        )
        parts = [made[part] for part in layer.parts()]
        operands = (*parts, *self.near(layer, written=False), *constants)
        self.read[place] = trace(
            editor, f"compress.{name}", layer.decode_joined, *operands, key=("read", layer)
        )
        return parts


def blocks_of(recent: Tensor, fresh: Tensor) -> Tensor:
    """recent [B,G,C,D] -> its slots fresh [F,R], [B,G,F,R,D]."""
    found: Tensor = recent.index_select(2, fresh.flatten()).unflatten(2, fresh.shape)
    return found
