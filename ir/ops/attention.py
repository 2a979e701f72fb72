"""Attention over explicit positions: what a query sees is computed from positions, never from slots."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from accel.ir.ops import ragged
from accel.ir.ops.op import Op
from accel.ir.ops.pages import read_pages

MASKS = ("causal", "window", "chunk", "full")


@dataclass(frozen=True)
class Mask:
    """What a query at position q may see of a key at position k (k >= 0 always holds).

    causal: k <= q. window: q - size < k <= q. chunk: k <= q in the same block of `size`. full: all. `ahead`: also of
    those with k > q.
    """

    kind: str
    size: int = 0

    def visible(self, q: Tensor, k: Tensor, ahead: bool = False) -> Tensor:
        """q [..., T, 1] and k [..., 1, S] -> bool [..., T, S]."""
        seen = (k >= 0).expand(torch.broadcast_shapes(q.shape, k.shape))
        if self.kind != "full" and not ahead:
            seen = seen & (k <= q)
        if self.kind == "window":
            seen = seen & (k > q - self.size)
        if self.kind == "chunk":
            same = q.clamp(min=0).div(self.size, rounding_mode="floor") == k.clamp(min=0).div(
                self.size, rounding_mode="floor"
            )
            seen = seen & same
        return seen


def position_bias(bias: Tensor, q: Tensor, k: Tensor, mask: str = "causal") -> Tensor:
    """What is added to the scores [B,H,T,S]; q [B,1,T,1], k [B,1 or H,1,S].

    bias [H,M] goes by distance q - k (outside 0..M-1: the nearest end), under the mask "full"
    [H,2M-1] by q - k + M - 1; [H,M,M] goes by both positions.
    """
    heads = torch.arange(bias.shape[0], device=bias.device)[:, None, None]
    if bias.dim() == 3:
        return bias[heads, q.clamp(min=0), k.clamp(min=0)]
    zero = bias.shape[1] // 2 if mask == "full" else 0
    distance = (q - k + zero).clamp(0, bias.shape[1] - 1)  # [B,1 or H,T,S]
    return bias[heads, distance]


@dataclass(frozen=True)
class Form(Mask):
    """What makes attention of products of queries and keys: the constants of an attention, and its `sink` [H] and
    `bias` (see `position_bias`), if any. Whoever computes attention outside of it, to rank tokens or to measure,
    takes the attention's own, so nothing of it is left out.

    R heads of each of G groups read a KV head: queries [B,H,W,D], H = G R, keys [B,G,S,D].
    """

    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    sink: Tensor | None = field(default=None, compare=False)
    bias: Tensor | None = field(default=None, compare=False)

    def logits(self, products: Tensor) -> Tensor:
        """Of products of queries and keys, of any shape: scaled and capped; bias and mask are not in them."""
        logits = products * self.scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def visible_slots(self, query_positions: Tensor, positions: Tensor) -> Tensor:
        """What queries at [B,W] see of slots at [B,G,S]: bool [B,G,1,W,S]; a query that is not there (-1), nothing."""
        q, k = query_positions[:, None, None, :, None], positions[:, :, None, None, :]
        seen: Tensor = self.visible(q, k) & (q >= 0)
        return seen

    def scores(
        self, queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor
    ) -> Tensor:
        """What the softmax is taken of [B,G,R,W,S], float32; the lowest number where a query sees nothing.

        Positions: of the queries [B,W], of the slots [B,G,S]; -1: nothing there.
        """
        grouped = queries.unflatten(1, (keys.shape[1], -1)).float()
        scores = self.logits(grouped @ keys.float()[:, :, None].transpose(-1, -2))
        if self.bias is not None:
            q, k = query_positions[:, None, :, None], positions[:, :, None]
            repeat = grouped.shape[2]
            added = position_bias(self.bias, q, k.repeat_interleave(repeat, 1), self.kind)
            scores = scores + added.unflatten(1, (-1, repeat))
        hidden = ~self.visible_slots(query_positions, positions)
        found: Tensor = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        return found

    def shares(self, scores: Tensor) -> Tensor:
        """The softmax of scores [B,G,R,...,S] over the slots, beside the sink, which takes its part."""
        if self.sink is None:
            return scores.softmax(-1)
        return self._with_sink(scores, self.sink).softmax(-1)[..., :-1]

    def total(self, scores: Tensor) -> Tensor:
        """The logarithm of the sum of exp(score) of scores [B,G,R,...,S], the sink among them: [B,G,R,...]."""
        scores = scores if self.sink is None else self._with_sink(scores, self.sink)
        return scores.logsumexp(-1)

    def weights(
        self, queries: Tensor, query_positions: Tensor, keys: Tensor, positions: Tensor
    ) -> Tensor:
        """Attention [B,G,R,W,S] of the operands of `scores`; 0 where a query does not see a slot."""
        shares = self.shares(self.scores(queries, query_positions, keys, positions))
        return shares.masked_fill(~self.visible_slots(query_positions, positions), 0)

    def _with_sink(self, scores: Tensor, sink: Tensor) -> Tensor:
        by_head = sink.float().unflatten(0, (scores.shape[1], -1))  # [G,R]
        column = by_head[None, ..., *[None] * (scores.dim() - 3)].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], dim=-1)


def own_visible(tree: Tensor, first: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Which slots are the W from `first` [B] on, where the call's own keys lie, bool [B,1,S]; and which of them a tree
    [B,T,W], or [1,1,W], lets each query see, bool [B,T,S] ([B,1,S]).
    """
    place = torch.arange(slots, device=tree.device) - first.unsqueeze(1)  # [B,S]
    width, tree = tree.shape[2], tree.expand(first.shape[0], -1, -1)
    own = ((place >= 0) & (place < width)).unsqueeze(1)
    index = place.clamp(0, width - 1).unsqueeze(1).expand(-1, tree.shape[1], -1)
    return own, tree.gather(2, index) & own


T = TypeVar("T")  # a tensor, a node, a value's name: what operands are where they are looked at


@dataclass(frozen=True)
class Operands(Generic[T]):
    """What attention is given, in the order of its schema; `attention` below says what each is."""

    q: T
    k: T
    v: T
    q_pos: T
    k_pos: T
    bias: T | None
    scale: float
    softcap: float
    mask: str
    window: int
    sink: T | None = None
    kept_k: T | None = None
    kept_v: T | None = None
    kept_pos: T | None = None
    tree: T | None = None
    first: T | None = None
    pages: T | None = None
    page: int = 0
    beside: T | None = None
    beside_lse: T | None = None
    kept_counts: T | None = None


def form_of(x: Operands[Any]) -> Form:
    """The constants of an attention. Its sink and bias are operands of a graph: see `form_with`."""
    return Form(x.mask, x.window, float(x.scale), float(x.softcap))


def form_with(x: Operands[Tensor]) -> Form:
    """All of it, where its operands are tensors."""
    return replace(form_of(x), sink=x.sink, bias=x.bias)


def operands_of(node: fx.Node) -> Operands[Any]:
    """Of a node of `attention`."""
    args: Any = node.args
    more: Any = node.kwargs
    return Operands(*args, **more)


def weights(x: Operands[Tensor], added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + mask) [B,H,T,S], and the values [B,H,S,Dv] that it mixes.

    `added` [B,H,T,S] or none: what training adds to the scores.
    """
    scores, values = _scores(x, added)
    return scores.softmax(-1)[..., : values.shape[2]], values


def padded(x: Operands[Tensor]) -> Operands[Tensor]:
    """The same with as many kept slots of each head: [B,G,P,…]."""
    if x.kept_counts is None or x.kept_k is None or x.kept_v is None or x.kept_pos is None:
        return x
    width = min(max(1, int(x.kept_counts.max())), x.kept_pos.shape[2])
    ranks = torch.arange(width, device=x.kept_pos.device)
    where, real = ragged.places(x.kept_counts, ranks)
    k, v = (ragged.spread(part, where) for part in (x.kept_k, x.kept_v))
    pos = ragged.spread(x.kept_pos, where).masked_fill(~real, -1)
    return replace(x, kept_k=k, kept_v=v, kept_pos=pos, kept_counts=None)


def logits(x: Operands[Tensor]) -> Tensor:
    """scale q k^T + mask [B,H,T,S], before the softmax; the lowest finite number where it is hidden."""
    scores, values = _scores(x)
    return scores[..., : values.shape[2]]


def _scores(x: Operands[Tensor], added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """scale q k^T + mask [B,H,T,S+E], and the values [B,H,S,Dv]; E: first a sink, then what is beside."""
    x = padded(x)
    k, v = x.k, x.v
    repeat = x.q.shape[1] // k.shape[1]
    where = x.k_pos[:, None]  # [B,1,S]
    if x.kept_k is not None and x.kept_v is not None and x.kept_pos is not None:
        k, v = torch.cat((x.kept_k, k), dim=2), torch.cat((x.kept_v, v), dim=2)
        where = torch.cat((x.kept_pos, where.expand(-1, k.shape[1], -1)), dim=2)
        where = where.repeat_interleave(repeat, dim=1)  # [B,H,P+S]
    keys = k.repeat_interleave(repeat, dim=1)
    values = v.repeat_interleave(repeat, dim=1)
    form = form_of(x)
    scores = form.logits(x.q @ keys.transpose(-1, -2))  # [B,H,T,S]
    qp, kp = x.q_pos[:, None, :, None], where[:, :, None, :]
    if x.bias is not None:
        scores = scores + position_bias(x.bias, qp, kp, x.mask)
    seen = form.visible(qp, kp)
    if x.tree is not None:
        assert x.first is not None  # ir/spec.py
        before = k.shape[2] - x.k_pos.shape[1]  # kept
        own, theirs = (
            part.unsqueeze(1) for part in own_visible(x.tree, x.first + before, k.shape[2])
        )
        seen = torch.where(own, theirs & form.visible(qp, kp, ahead=True), seen)
    if added is not None:
        scores = scores + added
    if x.pages is not None and x.pages.shape[2]:
        read = read_pages(x.pages, x.page, x.k_pos.shape[1]).repeat_interleave(repeat, dim=1)
        seen = seen & F.pad(read, (k.shape[2] - x.k_pos.shape[1], 0), value=True)
    # finite, so that a row of padding, which sees nothing, stays finite too
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if x.sink is not None:  # one more key of that score, whose value is nothing
        column = x.sink[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    if x.beside_lse is not None:  # one more key of that score, whose value is `beside`
        scores = torch.cat([scores, _finite(x.beside_lse)[..., None]], dim=-1)
    return scores, values


def _finite(lse: Tensor) -> Tensor:
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def _mixed(x: Operands[Tensor]) -> tuple[Tensor, Tensor]:
    """Values by their probabilities [B,H,T,Dv], and the scores that these are the softmax of."""
    scores, values = _scores(x)
    probs = scores.softmax(-1)
    out = probs[..., : values.shape[2]] @ values
    if x.beside is not None:
        out = out + probs[..., -1:] * x.beside
    return out, scores


def _partial_attention(*operands: Any, **more: Any) -> tuple[Tensor, Tensor]:
    out, scores = _mixed(Operands[Tensor](*operands, **more))
    return out, scores.logsumexp(-1)


def _attention(*operands: Any, **more: Any) -> Tensor:
    return _mixed(Operands[Tensor](*operands, **more))[0]


def merged(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two results of attention over different keys [B,H,T,Dv], by their log-sum-exp [B,H,T] -> the result over all of
    these keys and its log-sum-exp. Float32; results are finite also where nothing was read.
    """
    a_lse, b_lse = _finite(a_lse), _finite(b_lse)
    top = torch.maximum(a_lse, b_lse)
    a_share, b_share = (a_lse - top).exp(), (b_lse - top).exp()
    total = a_share + b_share
    out = a * (a_share / total)[..., None] + b * (b_share / total)[..., None]
    return out, top + total.log()


# q [B,H,T,D], k [B,G,S,D], v [B,G,S,Dv], q_pos [B,T], k_pos [B,S] (-1: nothing there),
# bias [H,M], [H,2M-1] or [H,M,M] (see position_bias) or none; softcap 0: none; sink [H] or none.
# kept_k, kept_v [B,G,P,D], kept_pos [B,G,P]: slots before those of k and v, each head's its own; or none.
# kept_counts [B,G] or none: heads have unequal numbers of such slots, which lie in kept_k, kept_v [B,1,M,D] and
# kept_pos [B,1,M] one head's after another's (`ir.ops.ragged`).
# tree [B,T,W] (or [1,1,W]: the same for all) bool or none: which keys of the slots first[b] .. first[b]+W-1,
# where the call's own lie, each query sees, those at later positions too, as far as a window or chunk lets it (of a
# tree of guesses, W = T: a token's ancestors and itself). W = 1 hides nothing where it is true: a row of tokens.
# pages [B,G,T,K] or none: what of k and v the queries of a group read, as numbers of stretches of `page`
# slots (-1: none); [B,G,0,K]: all of it. Kept slots are always read.
# beside [B,H,T,Dv], beside_lse [B,H,T] or none: a partial result over other keys, which is merged in.
# -> [B,H,T,Dv]
attention = Op(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor q_pos, Tensor k_pos, Tensor? bias, float scale, "
    "float softcap, str mask, int window, Tensor? sink=None, Tensor? kept_k=None, Tensor? kept_v=None, "
    "Tensor? kept_pos=None, Tensor? tree=None, Tensor? first=None, Tensor? pages=None, int page=0, "
    "Tensor? beside=None, Tensor? beside_lse=None, Tensor? kept_counts=None) -> Tensor",
    reference=_attention,
    shape=lambda q, k, v, *rest, **more: q.new_empty((*q.shape[:3], v.shape[3])),
)

# The operands of `attention`. -> [B,H,T,Dv], and the log of the sum of exp(score) of all that was read, a sink and
# what is beside included [B,H,T]. A query that sees nothing has the lowest finite number there, and any finite result.
partial_attention = Op(
    "partial_attention",
    attention.schema.removesuffix("Tensor") + "(Tensor, Tensor)",
    reference=_partial_attention,
    shape=lambda q, k, v, *rest, **more: (
        q.new_empty((*q.shape[:3], v.shape[3])),
        q.new_empty(q.shape[:3]),
    ),
)

# a, b [B,H,T,Dv], a_lse, b_lse [B,H,T]: what `partial_attention` gives over two sets of keys. -> the same over both.
merge_attention = Op(
    "merge_attention",
    "(Tensor a, Tensor a_lse, Tensor b, Tensor b_lse) -> (Tensor, Tensor)",
    reference=merged,
    shape=lambda a, a_lse, b, b_lse: (torch.empty_like(a), torch.empty_like(a_lse)),
)
