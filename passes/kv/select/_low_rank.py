"""Selection of pages whose keys are rebuilt: those of a prompt are kept in fewer directions, and those that a token
chooses made of them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.entries.factor import FACTOR, directions_of
from accel.ir.entries.squares import SQUARES, squares_of
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.low_rank import LowRank as Plan
from accel.ir.ops.attention import Form, form_of, operands_of
from accel.ir.ops.pages import fetch_pages
from accel.ir.ops.rows import take_rows
from accel.ir.program import Editor, Program
from accel.ir.region import Entry, sizes
from accel.ir.state import POSITIONS, Part, name_of, output_of
from accel.ir.trace import trace
from accel.passes.kv._shared.cached import cache_of
from accel.passes.kv._shared.more_keys import take_in
from accel.passes.kv._shared.rotation import rotated, rotation_of
from accel.passes.kv._shared.slots import written
from accel.passes.kv._shared.tables import appended, attentions
from accel.passes.kv.inputs import EntryInputs
from accel.passes.kv.select import MAPPED
from accel.passes.kv.select._build import Build, Named, no_list
from accel.passes.kv.select._pages import Pages, chosen
from accel.passes.kv.select._sites import as_cached

CODED = name_of(Part.LOW_RANK, detail="coded")  # [B]: the keys of so many first tokens are kept
_TOKENS = 53  # example size while shapes are worked out


@dataclass(frozen=True)
class LowRank(Pages):
    """Sparse attention over pages, the keys of which are made anew of fewer numbers.

    low_rank: R, so many numbers of a token stand for its keys, before RoPE and all heads of a layer together, in the
    directions in which the keys of its prompt are largest; no more than there are numbers, G D. The first `exact`
    entries of a token's list, and pages with a token behind the prompt, are read as they are.

    Keys as they are, and values, lie in mapped files. In memory are what pages are chosen by, and

    | state | |
    |---|---|
    | `low_rank.<layer>.keys` [B,1,C,R] | of each slot's keys the products with the directions |
    | `low_rank.<layer>.basis` [B,G,R,D] | of each row the directions |
    | `low_rank.coded` [B] | how many of a row's first tokens the former is of |

    which the step only reads. When a prompt is whole, the session's observer (`runtime/session/state/low_rank.py`)
    runs the entry `squares`, decomposes what it gives on the host, and runs `factor`.
    """

    low_rank: int = option(160, least=1, most=16384)
    layout = MAPPED
    relies = Pages.relies | {
        Invariant.FIXED_LAYERS,
        Invariant.TOKENS_CONTIGUOUS,
        Invariant.UNIFORM_SLOTS,
    }

    @property
    @abstractmethod
    def exact(self) -> int:
        """Entries of a list, the first, that are read as they are."""

    def finish(self, program: Program) -> None:
        sites = sorted(attentions(program).items())
        layers = [layer for layer, node in sites if operands_of(node).beside is not None]
        heads, ranks, widths = zip(*(self._shape(program, i) for i in layers), strict=True)
        program.facts.low_rank = Plan(tuple(layers), heads, widths, ranks)
        program.entries[SQUARES.name] = self._entry(program, layers, SQUARES.name)
        program.entries[FACTOR.name] = self._entry(program, layers, FACTOR.name)

    def _shape(self, program: Program, layer: int) -> tuple[int, int, int]:
        """The sizes of a layer's directions [G,R,D]."""
        _, groups, _, width = sizes(operands_of(attentions(program)[layer]).k)
        return int(groups), min(self.low_rank, int(groups) * int(width)), int(width)

    def refusal(self, program: Program, node: fx.Node, plain: bool) -> str:
        """Why the keys of its layer cannot be rebuilt; nothing where they can."""
        if why := as_cached(node, plain):
            return why
        try:
            rotation_of(program, appended(node), "keys", _INSTEAD)
        except PassError as error:
            return str(error)
        return ""

    def listed(self, build: Build, node: fx.Node) -> fx.Node:
        """List the pages that an attention reads as they are, and let it merge what those give that are rebuilt."""
        program, x = build.program, operands_of(node)
        layer, form, editor = node.meta["layer"], form_of(x), build.editor
        groups, rank, width = self._shape(program, layer)
        parts = self.stored(build, node)
        if CODED not in program.step.inputs:
            build.letters["C"] = x.k.meta["val"].shape[2]
            build.declare(Part.LOW_RANK, None, {"coded": ("int64", ("B",))})
        held = build.declare(
            Part.LOW_RANK, layer,
            {"keys": ("float32", ("B", 1, "C", rank)), "basis": ("float32", ("B", groups, rank, width))},
        )  # fmt: skip
        rotation = rotation_of(program, appended(node), "keys", _INSTEAD)
        interleaved = rotation is not None and rotation.interleaved
        tables = rotation.named if rotation is not None else {}
        asked = build.asked(node)
        pages, rebuilt = build.either(
            node, "choose", partial(self._split, form, groups, list(parts)), partial(_no_lists, groups),
            {**asked, "coded": program.step.input(CODED), **parts}, (self, form),
        )  # fmt: skip
        with editor.graph.inserting_before(node):
            rebuilt = editor.call(fetch_pages.default, rebuilt, x.v, self.page, like=node)
        del asked["slots"]
        value_width = int(sizes(x.v)[3])
        out, lse = build.either(
            node, "rebuild", partial(self._rebuilt, form, interleaved),
            partial(_no_part, value_width),
            {**asked, "pages": rebuilt, "low": held["keys"], "basis": held["basis"], "values": x.v},
            (self, form, interleaved, value_width),
            constants=dict(zip(("cos", "sin"), tables.items(), strict=False)),
        )  # fmt: skip
        take_in(editor, node, out, lse)
        build.becomes(Part.PAGES, layer, parts)
        return pages

    def _split(self, form: Form, groups: int, parts: list[str], x: Named) -> tuple[Tensor, Tensor]:
        """What tokens choose: pages that they read as they are, and pages whose keys are rebuilt."""
        pages = chosen(self, form, groups, parts, x)
        ahead = torch.arange(self.exact, device=pages.device)
        behind = torch.arange(
            self.exact, self.count, device=pages.device
        )  # whoever chooses has them
        first, rest = pages.index_select(3, ahead), pages.index_select(3, behind)
        whole = x["coded"].div(self.page, rounding_mode="floor")[:, None, None, None]
        low = rest < whole
        return torch.cat((first, rest.masked_fill(low, -1)), dim=3), rest.masked_fill(~low, -1)

    def _rebuilt(self, form: Form, interleaved: bool, x: Named) -> tuple[Tensor, Tensor]:
        """Attention of queries [B,T,H,D] over pages [B,G,T,K] of values [B,G,C,Dv], with keys made of low [B,1,C,R] and
        basis [B,G,R,D]: [B,H,T,Dv], and its log-sum-exp [B,H,T]; the lowest number where a token has no such page.
        """
        pages, values = x["pages"], x["values"]
        batch, groups, tokens = pages.shape[:3]
        ahead = torch.arange(self.page, device=pages.device)
        listed = (pages >= 0)[..., None].expand(-1, -1, -1, -1, self.page).flatten(3)  # [B,G,T,N]
        slots = (pages.clamp(min=0)[..., None] * self.page + ahead).flatten(2)  # [B,G,T N]
        where = x["k_pos"][:, None].expand(-1, groups, -1).gather(2, slots)
        features = take_rows(x["low"][:, 0], slots.flatten(1)).unflatten(1, (groups, -1))
        keys = features @ x["basis"]
        if "cos" in x:
            cos, sin = (x[n][where.clamp(min=0)] for n in ("cos", "sin"))
            keys = rotated(keys, cos, sin, interleaved)
        taken = take_rows(values.flatten(0, 1), slots.flatten(0, 1)).unflatten(0, (batch, groups))
        seen = listed & form.visible(
            x["positions"][:, None, :, None], where.unflatten(2, (tokens, -1))
        )  # [B,G,T,N]
        by_group = x["queries"].unflatten(2, (groups, -1)).transpose(1, 2)  # [B,G,T,heads,D]
        scores = form.logits(by_group.float() @ keys.unflatten(2, (tokens, -1)).mT)
        scores = scores.masked_fill(~seen[:, :, :, None], torch.finfo(scores.dtype).min)
        top = scores.amax(-1, keepdim=True)
        shares = (scores - top).exp()
        total = shares.sum(-1, keepdim=True)
        held = taken.unflatten(2, (tokens, -1)).masked_fill(~seen[..., None], 0.0)
        out = shares @ held / total  # [B,G,T,heads,Dv]
        lse = (top + total.log()).squeeze(-1)
        return out.transpose(2, 3).flatten(1, 2), lse.transpose(2, 3).flatten(1, 2)

    def _entry(self, program: Program, layers: list[int], name: str) -> Entry:
        """`squares` or `factor`, over the caches of the layers. Inputs, beside the state: the slots `start` to `stop`
        [B] whose keys are taken; `ranks` 0..N-1, as many as any row has. `factor` also gets `coded` [B], which the
        state then says, and of each layer `directions.<layer>` [B,G,R,D], which become the basis of rows with a `stop`.
        """
        graph, sites = fx.Graph(), attentions(program)
        inputs = EntryInputs(program, graph)
        stretch = [inputs.new(n, inputs.batch) for n in ("start", "stop")]
        stretch.append(inputs.new("ranks", inputs.source.symbol("N", _TOKENS)))
        stretch.append(inputs.shared(POSITIONS))
        editor = Editor(program, graph)
        outputs: dict[str, fx.Node] = {}
        given: dict[int, list[fx.Node]] = {}
        if name == FACTOR.name:
            told, held = inputs.new("coded", inputs.batch), inputs.shared(CODED)
            outputs[output_of(CODED)] = trace(editor, CODED, _moved, held, told, key="coded")
        for layer in layers:
            given[layer] = [inputs.shared(str(cache_of(sites[layer], Part.KEYS).target))]
            if name == FACTOR.name:
                shape = inputs.batch, *self._shape(program, layer)
                given[layer].append(inputs.new(directions_of(layer), *shape, dtype=torch.float32))
                given[layer] += [inputs.shared(n) for n in _held(layer)]
        for layer in layers:
            rotation = rotation_of(program, appended(sites[layer]), "keys", _INSTEAD)
            tables = rotation.tables(editor) if rotation is not None else ()
            form = (rotation.interleaved, rotation.factor) if rotation is not None else None
            joined = trace(
                editor, f"{name}.{layer}", partial(_joined, form), *stretch, given[layer][0],
                *tables, key=("joined", form),
            )  # fmt: skip
            if name == SQUARES.name:
                outputs[squares_of(layer)] = trace(
                    editor, f"{name}.{layer}", _squared, joined, key="squared"
                )
                continue
            new = trace(
                editor, f"{name}.{layer}", _factored, *stretch[:2], joined, *given[layer][1:],
                key="factored",
            )  # fmt: skip
            outputs |= {output_of(n): node for n, node in zip(_held(layer), new, strict=True)}
        graph.output(tuple(outputs.values()))
        return Entry(graph, list(outputs))


_INSTEAD = "use kv.select = 'quest' for this model"


def _held(layer: int) -> tuple[str, str]:
    """The state of a layer."""
    keys, basis = (name_of(Part.LOW_RANK, layer, detail=n) for n in ("keys", "basis"))
    return keys, basis


def _joined(
    form: tuple[bool, float] | None,
    start: Tensor,
    stop: Tensor,
    ranks: Tensor,
    positions: Tensor,
    keys: Tensor,
    *tables: Tensor,
) -> Tensor:
    """Of keys [B,G,C,D] those in slots start..stop-1 [B], before RoPE, all heads together [B,N,G D]; 0 behind these."""
    count, width = keys.shape[2], keys.shape[3]
    slots = (start[:, None] + ranks).clamp(min=0, max=count - 1)  # [B,N]
    taken = keys.gather(2, slots[:, None, :, None].expand(-1, keys.shape[1], -1, width)).float()
    if form is not None:
        at = positions.gather(1, slots).clamp(min=0)[:, None]  # [B,1,N]
        cos, sin = (table[at] / form[1] ** 2 for table in tables)
        taken = rotated(taken, cos, -sin, form[0])
    real = ranks < (stop - start)[:, None]
    return taken.transpose(1, 2).flatten(2).masked_fill(~real[..., None], 0.0)


def _squared(joined: Tensor) -> Tensor:
    """Of keys [B,N,G D] the sum of their outer products [B,G D,G D]; what is no number is left out."""
    some = torch.nan_to_num(joined, posinf=0.0, neginf=0.0)
    return some.mT @ some


def _factored(
    start: Tensor, stop: Tensor, joined: Tensor, directions: Tensor, low: Tensor, basis: Tensor
) -> tuple[Tensor, Tensor]:
    """State after keys [B,N,G D] in slots start..stop-1 [B] were multiplied by directions [B,G,R,D]."""
    at, end = start[:, None], stop[:, None]
    new = torch.where((stop > start)[:, None, None, None], directions, basis)
    return written(low, (joined @ directions.mT.flatten(1, 2))[:, None], at, end), new


def _moved(old: Tensor, new: Tensor) -> Tensor:
    """The new value of each row; -1: the old one."""
    return torch.where(new >= 0, new, old)


def _no_lists(groups: int, x: Named) -> tuple[Tensor, Tensor]:
    """No lists of pages [B,G,0,1], since everything is read."""
    none = no_list(groups, x)
    return none, none.clone()


def _no_part(width: int, x: Named) -> tuple[Tensor, Tensor]:
    """A partial result over no keys."""
    heads = x["queries"][..., 0].transpose(1, 2).float()  # [B,H,T]
    none = torch.full_like(heads, torch.finfo(torch.float32).min)
    return torch.zeros_like(heads)[..., None].expand(-1, -1, -1, width).clone(), none
