"""A mask is recognised by what it computes: evaluate it, then name the matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import Mask
from accel.ir.program import Program, ancestors
from accel.passes.recognise.region import try_out

HIDDEN = (
    -9000.0
)  # additive masks at or below this hide, -10000 plus a bias too; biases stay above it
DENSE_LIMIT = 4096  # positions: past this an unnamed mask would need too large a table


@dataclass
class Class:
    """A named mask, and what is added to the scores that it leaves visible.

    bias: none, [H,M] by distance q - k ([H,2M-1] where all is visible), or [H,M,M] by both positions
    (a mask that fits no name).
    """

    mask: Mask
    bias: Tensor | None = None


def evaluate_mask(program: Program, nodes: list[fx.Node], positions: Tensor) -> list[Tensor]:
    """Values of mask nodes for one sequence of these positions [1,T]."""
    return [try_out(program, n, {}, positions) for n in nodes]


def telling_length(program: Program, nodes: list[fx.Node], stop: set[fx.Node]) -> int:
    """A length at which every threshold in the mask's own graph shows: past its largest constant."""
    longest = program.facts.max_context
    sizes: list[int] = []
    for node in ancestors(nodes, stop) - stop:
        found: list[float] = [
            a for a in (*node.args, *node.kwargs.values()) if isinstance(a, (int, float))
        ]
        if node.op == "get_attr":  # a table made for some length, or a size kept in a buffer
            tensor = program.params[str(node.target)]
            sizes += tensor.shape
            found = tensor.flatten().tolist() if tensor.numel() == 1 else []
        sizes += [int(abs(a)) for a in found if HIDDEN < a and abs(a) < longest]
    return min(longest, max([257, *(2 * size + 17 for size in sizes)]))


def classify(
    visible: Tensor, added: Tensor | None, longest: int, name: str, sink: bool = False
) -> Class | str:
    """Name a mask out of its values, or say why it has no form.

    Args:
        visible: bool [h,T,T], h = 1 or H. added: float [h,T,T] or none, read where visible.
        longest: positions that the program must serve; a bias table covers them all.
        sink: a score stands beside those of the keys, so nothing may be added to a query's whole row.
    """
    same = bool((visible == visible[:1]).all())
    mask = _named(visible[0]) if same else None
    if added is not None:
        own = added.diagonal(dim1=-2, dim2=-1)[..., None]  # of each query's own key
        same_in_row = bool((torch.where(visible, added - own, 0.0) == 0).all())
        added = torch.where(visible, added, 0.0)
        if not bool(added.any()) or (same_in_row and not sink):
            added = None
    if mask is not None and added is None:
        return Class(mask)
    length = visible.shape[-1]
    if mask is not None and added is not None:
        if mask.kind == "full":
            bias = _by_signed_distance(added, longest)
        else:
            bias = _by_distance(added, visible[0])
            if bias is None and not sink:  # ALiBi may go by the key's position alone
                bias = _by_distance(torch.where(visible, added - own, 0.0), visible[0])
            bias = None if bias is None else _extend(bias, longest)
        if bias is not None:
            return Class(mask, bias.contiguous())
    if longest > DENSE_LIMIT:
        return (
            f"its mask {name} fits no class and would need a table of {longest} x {longest}; "
            f"give max_context={DENSE_LIMIT} or less"
        )
    if length < longest:
        return f"its mask {name} fits no class, and was evaluated only up to {length} positions"
    table = torch.zeros(visible.shape) if added is None else added
    return Class(Mask("full"), table.masked_fill(~visible, torch.finfo(torch.float32).min))


def _named(visible: Tensor) -> Mask | None:
    """The class of a [T,T] matrix of what is visible."""
    length = visible.shape[0]
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    last = int(visible[-1].sum())
    candidates = [Mask("causal"), Mask("full"), Mask("window", last)]
    first = visible[:, 0].long().argmin()  # the first query that no longer sees key 0
    if first > 0:
        candidates.append(Mask("chunk", int(first)))
    for mask in candidates:
        if torch.equal(mask.visible(q, k), visible):
            return mask
    return None


def _by_distance(added: Tensor, visible: Tensor) -> Tensor | None:
    """[h,M] where the bias depends on the distance q - k alone."""
    length = added.shape[-1]
    bias = added[:, -1].flip(-1)  # the last query sees distance 0 at its own key
    distance = (torch.arange(length)[:, None] - torch.arange(length)[None]).clamp(min=0)
    same = torch.where(visible, bias[:, distance], 0.0)
    scale = max(1.0, float(added.abs().max()))
    return bias if float((same - added).abs().max()) <= 1e-5 * scale else None


def _by_signed_distance(added: Tensor, longest: int) -> Tensor | None:
    """[h,2M-1], M = longest, where the bias depends on q - k = 1-M .. M-1 alone."""
    length = added.shape[-1]
    ahead, behind = added[:, 0], added[:, -1].flip(-1)  # by k - q and by q - k
    table = torch.cat([ahead.flip(-1), behind[:, 1:]], dim=1)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    scale = max(1.0, float(added.abs().max()))
    if float((table[:, distance + length - 1] - added).abs().max()) > 1e-5 * scale:
        return None
    left, right = _extend(ahead, longest), _extend(behind, longest)
    if left is None or right is None:
        return None
    return torch.cat([left.flip(-1), right[:, 1:]], dim=1)


def _extend(bias: Tensor, longest: int) -> Tensor | None:
    """[h,T] -> [h,longest], where the values go on in a straight line (ALiBi) or stay constant."""
    length = bias.shape[1]
    if length >= longest:
        return bias[:, :longest]
    slope = bias[:, -1] - bias[:, -2]
    tail = bias[:, length // 2 :]
    line = tail[:, :1] + slope[:, None] * torch.arange(tail.shape[1])
    if float((line - tail).abs().max()) > 1e-4 * max(1.0, float(bias.abs().max())):
        return None
    more = torch.arange(1, longest - length + 1)
    return torch.cat([bias, bias[:, -1:] + slope[:, None] * more], dim=1)
