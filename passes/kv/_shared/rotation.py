"""How the queries or keys of a layer are rotated by position: what they are before it, and with which tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Editor, Program, ancestors, evaluate

_CLOSE = 1e-2  # how exactly two rotations must make one


@dataclass(frozen=True)
class Rotation:
    """`rope(source, positions, cos, sin, interleaved)`: cos and sin [M,R/2], `factor` on both (YaRN)."""

    source: fx.Node
    cos: Tensor
    sin: Tensor
    interleaved: bool
    factor: float
    nodes: tuple[fx.Node, fx.Node]  # of the step

    @property
    def named(self) -> dict[str, Tensor]:
        """cos and sin by the names of parameters, the model's own where it has them."""
        names = (str(n.target) if n.op == "get_attr" else f"table.{n.name}" for n in self.nodes)
        return dict(zip(names, (self.cos, self.sin), strict=True))

    def tables(self, editor: Editor) -> tuple[fx.Node, fx.Node]:
        """cos and sin as parameters, in the editor's graph."""
        cos, sin = (editor.param(name, value) for name, value in self.named.items())
        return cos, sin

    def mean(self, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin [1,R/2] of the mean of the rotations by 1 .. `count` positions, without the factor.

        Raises PassError: a rotation by a and one by b are not one by a + b.
        """
        c, s = self.cos.double() / self.factor, self.sin.double() / self.factor
        rows = c.shape[0]
        a = torch.arange(0, max(1, rows // 2), max(1, rows // 64))[:, None]
        b = torch.arange(0, max(1, min(rows // 2, count)), max(1, min(rows // 2, count) // 16))[
            None
        ]
        off = (c[a] * c[b] - s[a] * s[b] - c[a + b]).abs().max()
        if rows < 2 or not float(off) < _CLOSE:
            raise PassError(
                "two of the model's rotations by position do not make one (rope that depends on the length), so a "
                "mean over the positions to come is not known; use kv.score = 'snapkv' for this model"
            )
        if count < rows:
            return c[1 : count + 1].mean(0)[None].float(), s[1 : count + 1].mean(0)[None].float()
        angle = torch.atan2(s[1], c[1]) * torch.arange(1, count + 1)[:, None]
        return angle.cos().mean(0)[None].float(), angle.sin().mean(0)[None].float()

    def to_come(self, editor: Editor, layer: int, count: int) -> list[fx.Node]:
        """What `to_come` takes, as parameters: cos and sin by position, and those of the mean of `count` rotations."""
        names = (f"future.{layer}.{count}.{n}" for n in ("cos", "sin"))
        mean = (editor.param(n, t) for n, t in zip(names, self.mean(count), strict=True))
        return [*self.tables(editor), *mean]


def rotation_of(
    program: Program,
    node: fx.Node,
    what: str,
    instead: str = "use kv.score = 'snapkv' for this model",
) -> Rotation | None:
    """How a layer's queries or keys came to be, as attention or the cache takes them; None: without rotation.

    Raises PassError: they are rotated, but otherwise than by the position of the token alone, or changed after it;
    it says what to do `instead`.
    """
    if node.target is not rope.default:
        layer = node.meta.get("layer")
        others = {n for n in node.graph.nodes if n.meta.get("layer") != layer}
        if any(n.target is rope.default for n in ancestors([node], stop=others) - others):
            raise PassError(
                f"layer {_layer(node)}: its {what} are changed after their rotation (a latent, a norm), so they are "
                f"not known without it; {instead}"
            )
        return None
    nodes = operand_of(node, "cos"), operand_of(node, "sin")
    try:
        if operand_of(node, "positions") is not program.step.input("positions"):
            raise KeyError
        cos, sin = evaluate(nodes, program.params, {})
    except KeyError:
        raise PassError(
            f"layer {_layer(node)}: the rotation of its {what} depends on the call, not on positions alone; "
            f"{instead}"
        ) from None
    factor = float((cos.double() ** 2 + sin.double() ** 2).mean().sqrt())
    return Rotation(operand_of(node, "x"), cos, sin, operand_of(node, "interleaved"), factor, nodes)


def _layer(node: fx.Node) -> int | None:
    """The layer of a node: its own, or that of the attention which it comes to."""
    seen, queue = {node}, [node]
    for one in queue:
        if (layer := one.meta.get("layer")) is not None:
            return int(layer)
        queue += (new := [user for user in one.users if user not in seen])
        seen.update(new)
    return None


def to_come(x: Tensor, seen: Tensor, tables: Sequence[Tensor], interleaved: bool) -> Tensor:
    """x [B,H,N,D] under the mean rotation after `seen` [B] tokens. tables: cos and sin [M,R/2] by position; those
    [1,R/2] of the mean of rotations further. None: no rotation.
    """
    if not tables:
        return x
    last = (seen - 1).clamp(min=0)
    cos, sin = (table[last][:, None, None] for table in tables[:2])  # [B,1,1,R/2]
    c, s = tables[2:]
    return rotated(x, cos * c - sin * s, sin * c + cos * s, interleaved)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [...,D] with the first channels rotated by cos and sin [...,R/2], as `rope` does, each vector by its own."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((pairs, rest), dim=-1)
    a, b = turned[..., :half], turned[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
