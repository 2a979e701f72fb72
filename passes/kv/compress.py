"""Eviction: attention over what was kept and what came since, and an entry that chooses what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from accel.ir.entries.compress import COMPRESS, held_of, keep_of, ranks_of, room_of
from accel.ir.errors import PassError
from accel.ir.facts import KvFacts
from accel.ir.ops import ragged
from accel.ir.ops.attention import Mask, attention, operands_of
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import Entry, sizes
from accel.ir.state import POSITIONS, CacheRegion, Part, name_of, output_of
from accel.ir.tables import Tables
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.kv import absorbed, moves
from accel.passes.kv._shared import low
from accel.passes.kv._shared.cached import appends, cache_of
from accel.passes.kv._shared.tables import appended
from accel.passes.kv.inputs import EntryInputs, Input, Site, call, inputs_of, parameters
from accel.passes.kv.keep import Base as Keep
from accel.passes.kv.refine import Base as Refine
from accel.passes.kv.score import Base as Score
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.state.recurrent import buffer
from accel.passes.trained import Parts, Trained, constants

_FAR = 1 << 40  # after every position
_TABLE = "table."  # of an operand that is a constant
_LARGE = 1e30  # of scores that a refine gets
_NOTHING = -torch.finfo(torch.float32).max  # the score of a slot that holds nothing
_CHOSEN, _STAYS = "choice.slots", "choice.positions"  # operands that are a layer's before
_KEPT, _RANKS, _HELD, _ROOM = 31, 23, 53, 89  # example sizes while shapes are worked out


class Budget(Protocol):
    """How many tokens each head keeps, where its layer keeps `keep` [B] per head: [B,G]."""

    observe: int
    level: bool

    @property
    def heads(self) -> Callable[..., Tensor]: ...
    def tokens(self, seen: int, layer: int, layers: int) -> int: ...
    @property
    def across(self) -> Callable[..., Tensor] | None: ...


@dataclass(frozen=True)
class Compress(Pass):
    """attention over `kv.<layer>` -> attention over `kept.<layer>` and `kv.<layer>`; an entry `compress`
    puts the best tokens of both into the former, each layer and head its own.

    The step only reads what was kept, so it costs a call nothing but the slots that are there, and
    the tokens since then can still be forgotten. Inputs of `compress`, beside the state: `seen [B]`;
    per layer `keep.<layer> [B]` (tokens that a head keeps), `ranks.<layer> [N]` (0..N-1, N: the most that
    any head keeps) and, where the score asks for them, `queries.<layer> [B,W,H,D]` with
    `query_positions [B,W]`, which the step gives as `queries.<layer> [B,T,H,D]`.

    Where heads of a layer keep unequal numbers, what is kept lies one head's after another's (`ir.ops.ragged`), with
    `kept.<layer>.counts [B,G]`; `compress` then takes `held.<layer> [P]` and `room.<layer> [M]`, too.
    """

    score: Score
    budget: Budget
    keep: Keep
    refine: Refine | None = None

    after = (Cache, Head)
    must_change = True
    flat = True

    @property
    def methods(self) -> tuple[Any, ...]:
        """All methods that this pass connects."""
        return (self.score, self.budget, self.keep, *self.refines)

    @property
    def refines(self) -> tuple[Refine, ...]:
        """The chain that changes scores."""
        return self.refine.chain if self.refine is not None else ()

    @property
    def shared(self) -> int:
        """How many neighbouring layers keep what the first of them does."""
        return self.refine.shared if self.refine is not None else 1

    @property
    def inputs(self) -> list[Input]:
        """What they name, beside keys, values and positions."""
        refining = self.refine.functions if self.refine is not None else []
        functions: list[Callable[..., Any]] = [self.score, *refining, self.budget.heads, self.keep]
        if self.keep.absorbs:
            functions.append(self.keep.absorb)
        if self.keep.demotes and len(self.keep.tiers) > 1:
            functions.append(self.keep.tier)
        return inputs_of(functions)

    @property
    def across(self) -> Callable[..., Tensor] | None:
        """The budget's choice over all layers, where it has one."""
        return self.budget.across

    def ragged(self, heads: int) -> bool:
        """Whether a layer of so many KV heads stores what each keeps, and no more. One that demotes keeps all tokens
        of every head, in one form or the other.
        """
        return heads > 1 and not self.budget.level and not self.keep.demotes

    def run(self, program: Program) -> Report:
        sites = _sites(program)
        if not sites:
            return Report(
                refused=["no layer of this model has a key cache; leave kv.score out for it"]
            )
        _check_values(self.keep, sites)
        turns = moves.turned(program, sites, self) if self.keep.moves else {}
        _check_readers(program, sites)
        leaders = _leaders(self, sites)
        _read_kept(program, sites, self)
        for one in self.inputs:
            one.prepare(program, sites, self.methods)
        moves.check_made(sites, self)
        tables = _tables(self, program, sites)
        left = _absorb(self.keep, program, sites, tables.get(id(self.keep), {}))
        counts = [tables.get(id(self.budget), {}).get(site.layer, {}) for site in sites]
        program.facts.kv = KvFacts(
            observe=max(self.score.observe, self.budget.observe, self.keep.observe)
            + self.score.lookahead,
            lookahead=self.score.lookahead,
            repeats=self.score.repeats,
            moves=self.keep.moves,
            marks=tuple(name for one in self.inputs for name in one.marks),
            tables=tuple({n: tuple(t.tolist()) for n, t in one.items()} for one in counts if one),
        )
        program.entries[COMPRESS.name] = _entry(self, program, sites, tables, turns, leaders)
        return Report(changed=len(sites), refused=left)


def _sites(program: Program) -> list[Site]:
    """The attention of each layer that has a cache of its own."""
    found: dict[int, Site] = {}
    states = {s.name for s in program.state}
    shared = [i for i, layer in enumerate(program.facts.layers) if layer.shares is not None]
    if shared:
        raise PassError(
            f"layer {shared[0]} reads the cache of layer {program.facts.layers[shared[0]].shares}, so one layer "
            "alone would select the tokens that both keep; leave kv.score out for this model"
        )
    for node in program.nodes(attention.default, entry=program.step):
        layer = node.meta.get("layer")
        if layer is None or name_of(Part.KEYS, layer) not in states or not appends(node):
            continue
        if operands_of(node).bias is not None:
            raise PassError(
                f"{node.name}: attention with a bias by position (ALiBi, T5) cannot read evicted slots "
                "yet; leave kv.score out for this model"
            )
        if layer in found:
            raise PassError(
                f"layer {layer} attends twice over one cache, which kv.score does not support"
            )
        found[layer] = Site(layer, node)
    return list(found.values())


def _leaders(step: Compress, sites: list[Site]) -> dict[int, int]:
    """The layer whose choice each layer keeps: its own, or that of a layer before. Raises PassError."""
    count, found = step.shared, {}
    for i, site in enumerate(sites):
        first = sites[i - i % count]
        found[site.layer] = first.layer
        if site is first:
            continue
        x, y = operands_of(site.node), operands_of(first.node)
        both = f"layer {site.layer} cannot keep what layer {first.layer} does (reuse = {count}): "
        if (x.mask, x.window) != (y.mask, y.window) or sizes(x.k)[1] != sizes(y.k)[1]:
            raise PassError(f"{both}it has other KV heads or sees other tokens; give reuse = 1")
        if step.across is not None or isinstance(step.budget, Tables) or _unequal(step, i, sites):
            raise PassError(
                f"{both}kv.budget gives them unequal numbers of tokens; give reuse = 1, or a budget that gives "
                "each layer as many ('uniform')"
            )
        if step.keep.demotes or "scores" in parameters(step.keep):
            raise PassError(f"{both}kv.keep reads the scores of each layer; give reuse = 1")
    return found


def _unequal(step: Compress, index: int, sites: list[Site]) -> bool:
    """Whether a layer keeps another number of tokens than the first of its group."""
    first = index - index % step.shared
    lengths = [*range(1, 300), *(3 * 2**n for n in range(7, 24))]
    return any(
        step.budget.tokens(n, index, len(sites)) != step.budget.tokens(n, first, len(sites))
        for n in lengths
    )


def _check_values(keep: Keep, sites: list[Site]) -> None:
    same = [s.layer for s in sites if cache_of(s.node, Part.KEYS) is cache_of(s.node, Part.VALUES)]
    if keep.merges and same:
        raise PassError(
            f"kv.keep changes values, but the values of layer {same[0]} are also its keys (a "
            "latent, MLA); leave kv.keep out for this model, or use 'drop'"
        )


def _check_readers(program: Program, sites: list[Site]) -> None:
    """What is said of each token is compressed, and read by the attention that will read it from there."""
    taken = {POSITIONS}
    for site in sites:
        for part in (Part.KEYS, Part.VALUES):
            stored = operand_of(site.node, part)
            assert isinstance(stored, fx.Node)
            taken.add(str(cache_of(site.node, part).target))
            for user in stored.users:
                if user is not site.node and user.op != "output":
                    raise PassError(
                        f"{user.name} reads the cache of layer {site.layer} outside its attention, "
                        "and would miss evicted tokens; leave kv.score out for this model"
                    )
    if other := [s.name for s in program.state if "C" in s.shape and s.name not in taken]:
        raise PassError(
            f"'{other[0]}' stores a value per token that kv.score does not evict; leave "
            "kv.score out for this model"
        )


def _read_kept(program: Program, sites: list[Site], step: Compress) -> None:
    """State for what is kept, and attention over it."""
    editor = Editor(program, program.step.graph)
    batch = program.step.input("tokens").meta["val"].shape[0]
    for site in sites:
        letter = f"P{site.layer}"
        letters = {"B": batch, letter: editor.symbol(letter, _KEPT + site.layer)}
        both = (Part.KEYS, Part.VALUES)
        groups = int(sizes(cache_of(site.node, Part.KEYS))[1])
        lists = 1 if step.ragged(groups) else groups
        old = {cache_of(site.node, part) for part in both}
        parts = both[: len(old)]
        for part in parts:
            node = cache_of(site.node, part)
            shape = ("B", lists, letter, int(sizes(node)[3]))
            state = State(part, site.layer, "float32", shape, region=CacheRegion.KEPT)
            site.kept[part] = buffer(program, editor, state, letters)
        where = ("B", lists, letter)
        state = State(Part.POSITIONS, site.layer, "int64", where, -1, CacheRegion.KEPT)
        site.kept["pos"] = buffer(program, editor, state, letters)
        added = {f"kept_{p}": site.kept.get(p, site.kept["k"]) for p in ("k", "v", "pos")}
        if lists < groups:
            state = State(Part.COUNTS, site.layer, "int64", ("B", groups), region=CacheRegion.KEPT)
            site.kept["counts"] = buffer(program, editor, state, letters)
            added["kept_counts"] = site.kept["counts"]
        if step.keep.demotes:
            added = low.read(program, editor, step.keep, site.node, added, site.kept)
        site.node.kwargs = {**site.node.kwargs, **added}


def _tables(step: Compress, program: Program, sites: list[Site]) -> dict[int, Parts]:
    """The constants of the methods that have some, by the method's id."""
    keys = {site.layer: appended(site.node) for site in sites}
    found = {id(m): constants(m, program, keys) for m in step.methods if isinstance(m, Tables)}
    if step.keep.absorbs and isinstance(step.keep, Trained):
        found[id(step.keep)] = step.keep.tensors(program, keys)
    return found


def _absorb(keep: Keep, program: Program, sites: list[Site], tensors: Parts) -> list[str]:
    """Let attention read what evicted tokens leave; and why some layers' leave nothing."""
    if not keep.absorbs:
        return []
    lasting = [site for site in sites if absorbed.lasts(site.node)]
    if not lasting:
        raise PassError(
            "every layer attends to a window, and what it evicts is out of sight soon; leave kv.keep out for this model"
        )
    editor = Editor(program, program.step.graph)
    for site in lasting:
        absorbed.read(program, editor, keep, site, tensors.get(site.layer, {}))
    return [
        f"layer {site.layer} attends to a window: its evicted tokens leave nothing"
        for site in sites
        if site not in lasting
    ]


def _entry(
    step: Compress,
    program: Program,
    sites: list[Site],
    tables: dict[int, Parts],
    turns: Mapping[int, moves.Turn],
    leaders: Mapping[int, int],
) -> Entry:
    """The graph that chooses."""
    graph = fx.Graph()
    source = Editor(program, program.step.graph)
    entry, inputs = EntryInputs(program, graph, source), step.inputs
    operands: dict[int, dict[str, fx.Node]] = {}
    seen = entry.placeholder("seen", entry.blank((entry.batch,), torch.int64))
    pos = entry.placeholder(POSITIONS, program.step.input(POSITIONS).meta["val"])
    for site in sites:
        here = operands[site.layer] = {"seen": seen, "recent_pos": pos}
        for part in (Part.KEYS, Part.VALUES):
            node = cache_of(site.node, part)
            if part in site.kept:
                here[f"recent_{part}"] = entry.placeholder(str(node.target), node.meta["val"])
        for name, node in site.kept.items():
            here[f"kept_{name}"] = entry.placeholder(str(node.target), node.meta["val"])
        keep = entry.blank((entry.batch,), torch.int64)
        here["keep"] = entry.placeholder(keep_of(site.layer), keep)
        count = source.symbol(f"N{site.layer}", _RANKS + site.layer)
        ranks = entry.blank((count,), torch.int64)
        here["ranks"] = entry.placeholder(ranks_of(site.layer), ranks)
        if "counts" in site.kept:
            for name, letter, size in (("held", "R", _HELD), ("room", "M", _ROOM)):
                count = source.symbol(f"{letter}{site.layer}", size + site.layer)
                given = held_of(site.layer) if name == "held" else room_of(site.layer)
                here[name] = entry.placeholder(given, entry.blank((count,), torch.int64))
        for one in inputs:
            here |= one.placeholders(entry, site, step.methods)
    outputs: dict[str, fx.Node] = {}
    editor = Editor(program, graph)
    for site in sites:
        for method, parts in tables.items():
            absorbs = step.keep.absorbs and method == id(step.keep)  # the step reads them too
            if absorbs and not absorbed.lasts(site.node):
                continue
            for name, tensor in parts[site.layer].items():
                own = absorbed.parameter(site.layer, name)
                number = (
                    editor.param(own)
                    if absorbs
                    else editor.param(f"compress.{site.layer}.{name}", tensor)
                )
                operands[site.layer][_TABLE + name] = number
    for layer, turn in turns.items():
        operands[layer] |= turn.operands(editor)
    if step.across is not None:
        _count_across(step, step.across, editor, sites, operands)
    choices: dict[int, dict[str, fx.Node]] = {}
    for site in sites:
        here = operands[site.layer]
        if (leader := leaders[site.layer]) != site.layer:
            here |= choices[leader]
        x = operands_of(site.node)
        paired = site.layer in turns and turns[site.layer].interleaved
        key = "compress", step, x.scale, x.mask, x.window, paired, *here
        cut = chooser(step, list(here), x.scale, Mask(x.mask, x.window), paired)
        found = dict(trace(editor, f"compress.{site.layer}", cut, *here.values(), key=key))
        choices[site.layer] = {name: found.pop(name) for name in (_CHOSEN, _STAYS)}
        outputs |= {output_of(str(site.kept[part].target)): node for part, node in found.items()}
    graph.output(tuple(outputs.values()))
    return Entry(graph, list(outputs))


def _count_across(
    step: Compress,
    across: Callable[..., Tensor],
    editor: Editor,
    sites: list[Site],
    operands: dict[int, dict[str, fx.Node]],
) -> None:
    """Give each layer an operand `counts` [B,G]: what its heads keep, by the scores of all layers."""
    scores, positions = [], []
    for site in sites:
        here, x = operands[site.layer], operands_of(site.node)
        key = "scores", step, x.scale, x.mask, x.window, *here
        rank = scorer(step, list(here), x.scale, Mask(x.mask, x.window))
        found = trace(editor, f"scores.{site.layer}", rank, *here.values(), key=key)
        scores.append(found["scores"])
        positions.append(found["positions"])

    def count(keep: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        layers, where = values[: len(sites)], values[len(sites) :]
        flat = [torch.cat([x.flatten(1) for x in some], dim=1) for some in (layers, where)]
        heads = sum(x.shape[1] for x in layers)
        stays, counts, start = across(flat[0], keep, flat[1], heads), [], 0
        for x in layers:
            size = x.shape[1] * x.shape[2]
            here = stays.narrow(1, start, size).unflatten(1, (x.shape[1], x.shape[2]))
            counts.append(here.sum(2))
            start = start + size
        return tuple(counts)

    keep = next(iter(operands.values()))["keep"]
    counts = trace(editor, "across", count, keep, *scores, *positions)
    for site, found in zip(sites, counts, strict=True):
        operands[site.layer]["counts"] = found


def scorer(
    step: Compress, names: list[str], scale: float, mask: Mask
) -> Callable[..., dict[str, Tensor]]:
    """A function of tensors, by these names: the `scores` [B,G,S] of a layer's slots, protected tokens first, and
    their `positions`.
    """

    def rank(*operands: Tensor) -> dict[str, Tensor]:
        named = _named(step, _spread(dict(zip(names, operands, strict=True))), scale, mask)
        scores = _scores(step.score, named)
        where = named["positions"]
        return {
            "scores": _protected(step.score, scores, where, named["seen"]),
            "positions": where,
        }

    return rank


def _scores(method: Score | Refine, named: Mapping[str, Any]) -> Tensor:
    """What it says of each slot. Raises PassError where these are not scores [B,G,S]."""
    scores: Tensor = call(method, named).float()
    if scores.dim() != 3:
        raise PassError(
            f"{type(method).__name__} gives scores of shape {list(scores.shape)}; give one for each KV head and slot, "
            "[B,G,S]"
        )
    return scores


def _carried(names: Iterable[str]) -> list[str]:
    """Values per token beside keys and values."""
    there = set(names)
    plain = (name.removeprefix("kept_") for name in names)
    return [name for name in plain if f"kept_{name}.recent" in there]


def _spread(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's operands, what was kept as [B,G,P,…] also where it is stored otherwise."""
    if "kept_counts" not in x:
        return x
    where, real = ragged.places(x["kept_counts"], x["held"])
    names = ["k", *(["v"] if "kept_v" in x else []), *_carried(x)]
    out = {f"kept_{name}": ragged.spread(x[f"kept_{name}"], where) for name in names}
    out["kept_pos"] = ragged.spread(x["kept_pos"], where).masked_fill(~real, -1)
    return x | out


def _named(step: Compress, x: dict[str, Tensor], scale: float, mask: Mask) -> dict[str, Any]:
    """What methods may name, of a layer's operands `x`."""
    groups = x["kept_k"].shape[1]
    recent = x["recent_pos"][:, None].expand(-1, groups, -1)
    where = torch.cat((x["kept_pos"], recent), dim=2)  # [B,G,S]
    after = x["seen"][:, None, None]
    where = where.masked_fill((where >= after) | ~mask.visible(after, where), -1)
    named: dict[str, Any] = {
        "keys": torch.cat((x["kept_k"], x["recent_k"]), dim=2),
        "positions": where,
        "seen": x["seen"],
        "keep": x["keep"],
        "scale": scale,
    }
    shared = "kept_v" not in x  # a latent, which keys and values share
    named["values"] = named["keys"] if shared else torch.cat((x["kept_v"], x["recent_v"]), dim=2)
    for one in step.inputs:
        named |= one.read(x)
    named |= {
        name: torch.cat((x[f"kept_{name}"], x[f"kept_{name}.recent"]), dim=2)
        for name in _carried(list(x))
    }
    return named | {n.removeprefix(_TABLE): value for n, value in x.items() if n.startswith(_TABLE)}


def chooser(
    step: Compress, names: list[str], scale: float, mask: Mask, interleaved: bool = False
) -> Callable[..., dict[str, Tensor]]:
    """A function of tensors, by these names: what a layer keeps of the slots that it has, beyond those
    that no later query of its mask sees. `interleaved`: how its keys are rotated.
    """
    carried = _carried(names)

    def cut(*operands: Tensor) -> dict[str, Tensor]:
        x = _spread(dict(zip(names, operands, strict=True)))
        named = _named(step, x, scale, mask)
        named["ranks"] = x["ranks"]
        shared = "kept_v" not in x
        if _CHOSEN in x:
            chosen, stays = x[_CHOSEN], x[_STAYS]
        else:
            chosen, stays = _chosen(step, x, named)
        named |= {"chosen": chosen, "real": stays >= 0}
        if "room" in x:
            out = _one_after_another(step.keep, named, stays, x["room"], not shared, carried)
            return out | absorbed.written(step.keep, named, x) | {_CHOSEN: chosen, _STAYS: stays}
        index = chosen[..., None].expand(-1, -1, -1, named["keys"].shape[3])
        out = {"k": named["keys"].gather(2, index), "pos": stays}
        if step.keep.moves:
            now = x["ranks"].expand_as(stays).masked_fill(stays < 0, -1)
            tables = x[moves.COS], x[moves.SIN], interleaved
            out["k"] = moves.turn(out["k"], now - stays, *tables)
            out["pos"] = now
        if step.keep.makes:
            out |= _made(step.keep, named, out, tables)
        elif not shared:
            out["v"] = call(step.keep, named)
        out |= {name: named[name].gather(2, chosen) for name in carried}
        out |= absorbed.written(step.keep, named, x)
        if step.keep.demotes:
            out |= low.demoted(step.keep, named, x, mask)
        return out | {_CHOSEN: chosen, _STAYS: stays}

    return cut


def _made(
    keep: Keep, named: Mapping[str, Any], taken: Mapping[str, Tensor], turn: tuple[Any, ...]
) -> dict[str, Tensor]:
    """Keys and values of the places that are `taken`, which the method makes; where nothing goes, those of before."""
    where = named["positions"]
    plain = moves.unturned(named["keys"], where, *turn)
    keys, values = call(keep, {**named, "keys": plain})
    keys = moves.turn(keys, taken["pos"].clamp(min=0), *turn)
    goes = ((where >= 0).sum(2) > named["real"].sum(2))[..., None, None]
    index = named["chosen"][..., None].expand(-1, -1, -1, values.shape[3])
    before = named["values"].gather(2, index)
    return {"k": torch.where(goes, keys, taken["k"]), "v": torch.where(goes, values, before)}


def _one_after_another(
    keep: Keep,
    named: Mapping[str, Any],
    stays: Tensor,
    room: Tensor,
    values: bool,
    carried: Iterable[str],
) -> dict[str, Tensor]:
    """What stays of all heads in one list of as many slots as `room` [M]: rows of keys and values are taken from
    where they lie.
    """
    counts = (stays >= 0).sum(2)  # [B,G]
    owner, rank, real = ragged.ranked(counts, room)  # [B,M]
    rank = rank.clamp(max=stays.shape[2] - 1)
    at = owner * stays.shape[2] + rank

    def taken(
        x: Tensor, index: Tensor
    ) -> Tensor:  # x [B,G,S,…], index [B,M] into its slots -> [B,1,M,…]
        index = index[:, None]
        if x.dim() == 4:
            index = index[..., None].expand(-1, -1, -1, x.shape[3])
        return x.flatten(1, 2)[:, None].gather(2, index)

    slots = owner * named["keys"].shape[2] + taken(named["chosen"], at)[:, 0]
    pos = taken(stays, at).masked_fill(~real[:, None], -1)
    out = {"k": taken(named["keys"], slots), "pos": pos, "counts": counts}
    if values:
        changed = keep.merges  # else those of the chosen slots
        out["v"] = taken(call(keep, named), at) if changed else taken(named["values"], slots)
    return out | {name: taken(named[name], slots) for name in carried}


def _chosen(
    step: Compress, x: Mapping[str, Tensor], named: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The slots that stay [B,G,N], in the order of their positions, and these (-1: there are fewer). The scores are
    `named` then.
    """
    where = named["positions"]
    scores = _scores(step.score, named)
    named["scores"] = _protected(step.score, scores, where, x["seen"])
    counts = x["counts"] if "counts" in x else call(step.budget.heads, named)  # [B,G]
    if step.refines:
        named |= {"counts": counts, "scores": scores}
        named["scores"] = _refined(step, named)
        where = where.masked_fill(named["scores"] <= _NOTHING, -1)  # what goes all the same
    # [B,G,N], best first, of equal ones the newest
    chosen = named["scores"].flip(2).topk(x["ranks"].shape[0], dim=2).indices
    chosen = where.shape[2] - 1 - chosen
    stays = where.gather(2, chosen)
    stays = stays.masked_fill(x["ranks"] >= counts[..., None], -1)
    order = stays.masked_fill(stays < 0, _FAR).sort(dim=2).indices
    return chosen.gather(2, order), stays.gather(2, order)


def _refined(step: Compress, named: Mapping[str, Any]) -> Tensor:
    """The scores after the chain: each method gets finite ones. What had no finite score before a method has none
    after it. The score of a token that goes even where there is room is that of an empty slot.
    """
    where, scores = named["positions"], named["scores"]
    age = named["seen"][:, None, None] - 1 - where
    stays = (where >= 0) & ((where < step.score.sinks) | (age < step.score.recent))
    real, lost = where >= 0, torch.zeros_like(stays)
    for one in step.refines:
        real = real & (scores > -_LARGE)  # NaN: False
        least = scores.masked_fill(~real, _LARGE).amin(2, keepdim=True)
        least = least.masked_fill(~real.any(2, keepdim=True), 0)
        finite = torch.where(real, scores, least).clamp(max=_LARGE)
        scores = _scores(one, {**named, "scores": finite, "protected": stays})
        lost = lost | (real & (scores == -torch.inf))
    scores = scores.masked_fill(~real, float("nan"))
    scores = _protected(step.score, scores, where, named["seen"])
    for one in reversed(step.refines):
        if one.first is not None:
            place = call(one.first, {**named, "protected": stays}).float()
            lost = lost & (place <= 0)
            scores = torch.where(place > 0, -_NOTHING * (0.75 + place / 4), scores / 2)
    return scores.masked_fill((where < 0) | (lost & ~stays), _NOTHING)


def _protected(score: Score, scores: Tensor, where: Tensor, seen: Tensor) -> Tensor:
    """What stays whatever its score gets the highest, empty slots the lowest, and no number the lowest
    of a real one. Where not even the former have room: the first tokens, then the newest.
    """
    far = torch.finfo(torch.float32).max
    scores = torch.nan_to_num(scores, nan=-far / 2).clamp(-far / 2, far / 2)
    age = seen[:, None, None] - 1 - where  # 0: the newest
    late = torch.where(where < score.sinks, where - score.sinks, age)  # the order of what stays
    most = score.sinks + 1 + seen.clamp(max=score.recent)[:, None, None]
    share = (late + score.sinks).to(scores.dtype) / most
    first = far * (1 - share / 4)
    scores = torch.where((where < score.sinks) | (age < score.recent), first, scores)
    return scores.masked_fill(where < 0, -far)
