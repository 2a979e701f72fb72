"""Selection by what the last tokens attended to: an image of their attention foretells the next token's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import Form, form_of, operands_of
from accel.ir.ops.choice import best_pages
from accel.ir.ops.pages import kv_pages
from accel.ir.region import sizes
from accel.ir.selection import Selection
from accel.ir.sizes import FEW
from accel.ir.state import Part
from accel.passes.kv.select import LEAST, PAGES, SPARSE, Base, Layout
from accel.passes.kv.select._build import Build, Named, no_list, traced
from accel.passes.kv.select._tokens import PLACES
from accel.passes.trained import ALL, Fitted


@dataclass(frozen=True)
class Histories(Fitted, Base):
    """Sparse attention over blocks of tokens, chosen by the history of attention.

    tokens_read: tokens that a token reads, with the first `sinks` and the newest `window` (and up to `block` - 1 more,
    until a block is whole behind them). Blocks of `block` slots lie between. The history is of the last `history`
    tokens and of each query head: the most attention, after softmax, that a token gave to a token of a block; 0 for
    blocks that did not lie between then. A method foretells from it what the next token gives to each block
    (`foretell`). The query heads of a group share a list, by the most that one of them shall give.

    Tokens at positions that `every` divides look at all keys for the history's sake; what others note is the
    attention over what they read, 0 for other blocks. Calls of several tokens read everything and note all of it, so
    the last tokens of a prompt are a history. A token's choice needs what the one before it noted: only calls of
    one token choose.

    State: `choice.<layer>.attention [B,R,H,C/block]` and `choice.<layer>.pos [B,R]`, the position that an entry is of,
    for the last R = `history` + FEW + 1 tokens. So the last FEW can be rewound.
    """

    tokens_read: int = 1024
    page: int = field(default=1, init=False)  # lists are of tokens
    block: int = option(16, one_of=PAGES)
    sinks: int = option(64, least=0, multiple_of="block")  # blocks begin there
    window: int = option(64, least=1)
    history: int = option(64, least=1)
    every: int = option(5, least=1)

    breaks = SPARSE | {Invariant.DECODE_WIDTH}
    layout = Layout(width=1, selection=Selection(1, history=True))
    relies = Base.relies | {Invariant.TOKENS_CONTIGUOUS, Invariant.UNIFORM_SLOTS}

    @property
    def blocks(self) -> int:
        """Blocks that a token reads."""
        return max(LEAST, (self.tokens_read - self.sinks - self.window) // self.block)

    @property
    def count(self) -> int:
        return self.sinks + self.blocks * self.block + self.tail

    @property
    def tail(self) -> int:
        """The most tokens behind the last block."""
        return self.window + self.block - 1

    @property
    def ring(self) -> int:
        """Tokens whose attention is kept."""
        return self.history + FEW + 1

    @abstractmethod
    def foretell(self, image: Tensor, inside: Tensor, shared: Mapping[str, Tensor]) -> Tensor:
        """What a token will give to blocks [M,N], by the history [M,history,N], the newest last, of blocks that are
        `inside` (bool [M,N]); whatever elsewhere. shared: the tensors of `shared`.
        """

    def between(self, slots: Tensor, blocks: Tensor) -> Tensor:
        """Which of blocks [N] lie between the sinks and the window of tokens in slots [B,T]: bool [B,T,N]."""
        whole = (slots + 1 - self.window - self.sinks).div(self.block, rounding_mode="floor")
        first = self.sinks // self.block
        return (blocks >= first) & (blocks < first + whole.clamp(min=0)[..., None])

    def choose(
        self, x: Mapping[str, Tensor], mask: Form, before: Mapping[str, Tensor], known: Tensor
    ) -> Tensor:
        """The slots that a token reads [B,G,1,K], -1: none, each once. before: the history `attention` [B,history,H,N],
        the newest last, and the tensors of `shared`; `known` (bool [B,history]): which of the history there is.
        """
        keys, own = x["keys"], x["slots"][:, None]
        batch, groups = keys.shape[:2]
        image = before["attention"].masked_fill(~known[..., None, None], 0.0).transpose(1, 2)
        heads = image.shape[1]
        numbers = torch.arange(image.shape[3], device=own.device)
        inside = self.between(own, numbers)  # [B,1,N]
        image = image.masked_fill(~inside[:, :, None], 0.0)
        found = self.foretell(
            image.flatten(0, 1), inside.expand(-1, heads, -1).flatten(0, 1), before
        )
        worth = found.unflatten(0, (batch, groups, heads // groups)).amax(2)[:, :, None]
        worth = worth.masked_fill(~inside[:, None], -torch.inf)
        best = best_pages(
            worth, x["positions"][:, :1], x["k_pos"], x["slots"], self.blocks + 1, self.block,
            mask.kind, mask.size,
        )[..., 1:, None]  # fmt: skip
        ahead = torch.arange(self.block, device=own.device)
        chosen = torch.where(best >= 0, best * self.block + ahead, -1).flatten(3)
        whole = (own + 1 - self.window - self.sinks).div(self.block, rounding_mode="floor")
        end = self.sinks + whole.clamp(min=0) * self.block  # [B,1]
        first = torch.arange(self.sinks, device=own.device).expand(batch, -1)
        always = torch.cat((first, end + torch.arange(self.tail, device=own.device)), dim=1)
        always = torch.where(always <= own, always, -1)[:, None, None]
        return torch.cat((chosen, always.expand(-1, groups, -1, -1)), dim=3)

    def listed(self, build: Build, node: fx.Node) -> fx.Node:
        """The list that an attention chooses, and what it leaves for later tokens."""
        x, layer, form = operands_of(node), node.meta["layer"], form_of(operands_of(node))
        groups, heads = int(sizes(x.k)[1]), int(sizes(x.q)[1])
        shared = build.trained[ALL]
        image = ("float32", ("B", self.ring, heads, build.every(self.block)))
        held = build.declare(Part.CHOICE, layer, {"attention": image})
        held |= build.declare(Part.CHOICE, layer, {PLACES: ("int64", ("B", self.ring))}, -1)
        asked = {**build.asked(node), "keys": x.k, **({} if x.sink is None else {"sink": x.sink})}
        pages, noted = build.either(
            node, "choose", partial(self._chosen, list(shared), form), partial(_none, groups, heads),
            asked | held, (self, form),
            constants={n: (f"{self.key}.{n}", t) for n, t in shared.items()},
        )  # fmt: skip
        if "looks" not in build.shared:
            build.shared["looks"] = self._looks(build, node)
        given = {"chose": build.chooses, **asked, "noted": noted, **held}
        after = build.either(
            node, "note", partial(self._noted, form), self._kept, given, (self, form),
            build.shared["looks"],
        )  # fmt: skip
        build.becomes(Part.CHOICE, layer, dict(zip(held, after, strict=True)))
        return pages

    def _looks(self, build: Build, node: fx.Node) -> fx.Node:
        """Whether some token of the call looks at all keys, bool []."""

        def looks(x: Named) -> Tensor:
            due = (x["positions"] >= 0) & (x["positions"].remainder(self.every) == 0)
            return due.any() | ~x["chooses"]

        given = {"chooses": build.chooses, "positions": build.program.step.input("positions")}
        with build.editor.graph.inserting_before(node):
            found: fx.Node = traced(build.editor, "choice", looks, given, ("looks", self.every))
        return found

    def _chosen(self, names: list[str], form: Form, x: Named) -> tuple[Tensor, Tensor]:
        """The list of a token, and its attention to blocks over what it reads [B,1,H,N]."""
        wanted = x["positions"][:, :1] + torch.arange(
            -self.history, 0, device=x["slots"].device
        )  # [B,history]
        at = wanted.clamp(min=0).remainder(self.ring)
        known = (x[PLACES].gather(1, at) == wanted) & (wanted >= 0)
        index = at[..., None, None].expand(-1, -1, *x["attention"].shape[2:])
        image = x["attention"].gather(1, index)
        listed = self.choose(x, form, {"attention": image, **{n: x[n] for n in names}}, known)
        return listed, self.attended(x, listed, replace(form, sink=x.get("sink")))

    def attended(self, x: Mapping[str, Tensor], listed: Tensor, form: Form) -> Tensor:
        """What a token gives to the blocks of its list [B,G,1,K], whose first entries are blocks: [B,1,H,N]."""
        keys, slots = x["keys"], listed[:, :, 0]  # [B,G,K]
        width, blocks = keys.shape[3], x["attention"].shape[3]
        taken = keys.gather(2, slots.clamp(min=0)[..., None].expand(-1, -1, -1, width))
        where = x["k_pos"][:, None].expand(-1, keys.shape[1], -1).gather(2, slots.clamp(min=0))
        where = where.masked_fill(slots < 0, -1)
        asked = x["queries"][:, :1].transpose(1, 2), x["positions"][:, :1]
        share = form.weights(*asked, taken, where)[:, :, :, 0]  # [B,G,R,K]
        few = slots.shape[2] - self.sinks - self.tail  # tokens of blocks
        most = share[..., :few].unflatten(3, (-1, self.block)).amax(4)  # [B,G,R,b]
        number = slots[..., :few].unflatten(2, (-1, self.block))[..., 0]
        number = torch.where(number >= 0, number.div(self.block, rounding_mode="floor"), blocks)
        blank = share.new_zeros((*share.shape[:3], 1)).expand(-1, -1, -1, blocks + 1)
        index = number[:, :, None].expand(most.shape)
        placed: Tensor = blank.scatter(3, index, most)[..., :blocks]
        return placed.flatten(1, 2)[:, None]

    def _noted(self, form: Form, x: Named) -> tuple[Tensor, Tensor]:
        """State after a call of whose last tokens some look at all keys."""
        queries, positions, attention = x["queries"], x["positions"], x["attention"]
        last = positions.amax(1, keepdim=True)  # [B,1]
        count = torch.sym_min(positions.shape[1], self.ring)
        wanted = last - torch.arange(count, device=last.device)  # [B,E], the newest first
        index = (wanted - positions[:, :1]).clamp(min=0, max=positions.shape[1] - 1)
        rows = queries.gather(1, index[..., None, None].expand(-1, -1, *queries.shape[2:]))
        blocks = attention.shape[3]
        whole = replace(form, sink=x.get("sink"))
        true = self.looked(rows, wanted, x["k_pos"], x["keys"], blocks, whole)  # [B,E,H,N]
        numbers = torch.arange(blocks, device=last.device)
        inside = self.between(x["slots"][:, None] + index, numbers)
        true = true.masked_fill(~inside[:, :, None], 0.0)
        looks = (wanted.remainder(self.every) == 0) | ~x["chose"]
        new = torch.where(looks[..., None, None], true, x["noted"])
        return self._placed(new, x)

    def looked(
        self,
        queries: Tensor,
        positions: Tensor,
        k_pos: Tensor,
        keys: Tensor,
        blocks: int,
        form: Form,
    ) -> Tensor:
        """What tokens, queries [B,E,H,D] at positions [B,E], give to each of so many blocks of all keys: [B,E,H,N]."""
        asked = queries.transpose(1, 2), positions, keys, k_pos[:, None]
        share = form.weights(*asked).flatten(1, 2)  # [B,H,E,C]
        first = positions[:, 0] * 0
        found = kv_pages(share.permute(0, 1, 3, 2), first, blocks, self.block).amax(3)  # [B,H,N,E]
        most: Tensor = found.permute(0, 3, 1, 2)
        return most

    def _kept(self, x: Named) -> tuple[Tensor, Tensor]:
        """State after a call of one token that reads what it chose."""
        return self._placed(x["noted"], x)

    def _placed(self, new: Tensor, x: Named) -> tuple[Tensor, Tensor]:
        """State with entries [B,E,H,N] of the last E tokens of a call, the newest first."""
        positions = x["positions"]
        last = positions.amax(1, keepdim=True)
        numbers = torch.arange(self.ring, device=last.device)
        back = (last - numbers).remainder(self.ring)  # [B,ring]: how far behind the last
        place = last - back
        here = (back < new.shape[1]) & (place >= positions[:, :1]) & (place >= 0)
        index = back.clamp(max=new.shape[1] - 1)[..., None, None]
        taken = new.gather(1, index.expand(-1, -1, *new.shape[2:]))
        return (
            torch.where(here[..., None, None], taken, x["attention"]),
            torch.where(here, place, x[PLACES]),
        )


def _none(groups: int, heads: int, x: Named) -> tuple[Tensor, Tensor]:
    """No list of tokens, since everything is read; what is noted comes later."""
    image = x["attention"]
    return no_list(groups, x), image.new_zeros((image.shape[0], 1, heads, image.shape[3]))
