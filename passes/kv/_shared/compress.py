"""Eviction: attention over what was kept and what came since, and an entry that chooses what is kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from accel.ir.entries.compress import COMPRESS, keep_of, queries_of, ranks_of
from accel.ir.errors import PassError
from accel.ir.facts import KvFacts
from accel.ir.ops.attention import Mask, attention, operands_of
from accel.ir.ops.mass import attention_mass
from accel.ir.ops.op import operand_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import Entry, sizes
from accel.ir.state import POSITIONS, CacheRegion, Part, name_of, output_of
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.kv._shared import low
from accel.passes.kv._shared.cached import appends, cache_of
from accel.passes.kv._shared.note import add_notes
from accel.passes.kv.keep import Base as Keep
from accel.passes.kv.score import Base as Score
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.state.recurrent import buffer

_FAR = 1 << 40  # after every position
_KEPT, _RANKS, _OBSERVED = 31, 23, 11  # example sizes while shapes are worked out


class Budget(Protocol):
    """How many tokens each head keeps, where its layer keeps `keep` [B] per head: [B,G]."""

    def heads(self, scores: Tensor, keep: Tensor) -> Tensor: ...


@dataclass
class _Site:
    """One layer's cache, and the attention that reads it."""

    layer: int
    node: fx.Node
    mass: bool
    kept: dict[str, fx.Node] = field(default_factory=dict)  # part -> the step's placeholder


@dataclass(frozen=True)
class Compress(Pass):
    """attention over `kv.<layer>` -> attention over `kept.<layer>` and `kv.<layer>`; an entry `compress`
    puts the best tokens of both into the former, each layer and head its own.

    The step only reads what was kept, so it costs a call nothing but the slots that are there, and
    the tokens since then can still be forgotten. Inputs of `compress`, beside the state: `seen [B]`;
    per layer `keep.<layer> [B]` (tokens that a head keeps), `ranks.<layer> [N]` (0..N-1, N: the most that
    any head keeps) and, where the score asks for them, `queries.<layer> [B,W,H,D]` with
    `query_positions [B,W]`, which the step gives as `queries.<layer> [B,T,H,D]`.
    """

    score: Score
    budget: Budget
    keep: Keep

    after = (Cache, Head)
    must_change = True
    flat = True

    def run(self, program: Program) -> Report:
        sites = _sites(program, "mass" in _parameters(self.score))
        if not sites:
            return Report(
                refused=["no layer of this model has a key cache; leave kv.score out for it"]
            )
        _check_values(self.keep, sites)
        _check_readers(program, sites)
        _read_kept(program, sites, self.keep)
        if "notes" in _parameters(self.score):
            stored = {s.layer: operand_of(s.node, Part.KEYS) for s in sites}
            for layer, buffers in add_notes(program, self.score, stored).items():
                next(s for s in sites if s.layer == layer).kept.update(buffers)
        if self.score.observe:
            _give_queries(program, sites)
        program.facts.kv = KvFacts(observe=int(self.score.observe))
        program.entries[COMPRESS.name] = _entry(self, program, sites)
        return Report(changed=len(sites))


def _parameters(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)


def _sites(program: Program, mass: bool) -> list[_Site]:
    """The attention of each layer that has a cache of its own."""
    found: dict[int, _Site] = {}
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
        found[layer] = _Site(layer, node, mass)
    return list(found.values())


def _check_values(keep: Keep, sites: list[_Site]) -> None:
    same = [s.layer for s in sites if cache_of(s.node, Part.KEYS) is cache_of(s.node, Part.VALUES)]
    if keep.merges and same:
        raise PassError(
            f"kv.keep changes values, but the values of layer {same[0]} are also its keys (a "
            "latent, MLA); leave kv.keep out for this model, or use 'drop'"
        )


def _check_readers(program: Program, sites: list[_Site]) -> None:
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


def _read_kept(program: Program, sites: list[_Site], keep: Keep) -> None:
    """State for what is kept, and attention over it."""
    editor = Editor(program, program.step.graph)
    outputs = program.step.output_nodes()
    batch = program.step.input("tokens").meta["val"].shape[0]
    for site in sites:
        letter = f"P{site.layer}"
        letters = {"B": batch, letter: editor.symbol(letter, _KEPT + site.layer)}
        both = (Part.KEYS, Part.VALUES)
        old = {cache_of(site.node, part) for part in both}
        parts = both[: len(old)]
        for part in parts:
            node = cache_of(site.node, part)
            wide = sizes(node)
            shape = ("B", int(wide[1]), letter, int(wide[3]))
            state = State(part, site.layer, "float32", shape, region=CacheRegion.KEPT)
            site.kept[part] = buffer(program, editor, state, letters)
        groups = int(sizes(site.kept["k"])[1])
        where = ("B", groups, letter)
        state = State(Part.POSITIONS, site.layer, "int64", where, -1, CacheRegion.KEPT)
        site.kept["pos"] = buffer(program, editor, state, letters)
        added = {f"kept_{p}": site.kept.get(p, site.kept["k"]) for p in ("k", "v", "pos")}
        if keep.demotes:
            added = low.read(program, editor, keep, site.node, added, site.kept)
        site.node.kwargs = {**site.node.kwargs, **added}
        if site.mass:
            _add_mass(program, editor, site, letters, outputs)
    program.step.set_outputs(outputs)


def _add_mass(
    program: Program,
    editor: Editor,
    site: _Site,
    letters: dict[str, Any],
    outputs: dict[str, fx.Node],
) -> None:
    """Attention that each slot drew, added up over the calls."""
    keys = cache_of(site.node, Part.KEYS)
    groups = int(sizes(keys)[1])
    recent = State(Part.MASS, site.layer, "float32", ("B", groups, "C"))
    kept = replace(recent, shape=("B", groups, f"P{site.layer}"), region=CacheRegion.KEPT)
    slots = {"B": letters["B"], "C": keys.meta["val"].shape[2]}
    old = [buffer(program, editor, kept, letters), buffer(program, editor, recent, slots)]
    site.kept["mass"], site.kept["mass.recent"] = old

    form = vars(operands_of(site.node))
    read = {name: n for name, n in form.items() if isinstance(n, fx.Node)}
    rest = {name: value for name, value in form.items() if name not in read}

    def add(before: Tensor, since: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        drawn = attention_mass(**rest, **dict(zip(read, values, strict=True)))
        first = (
            drawn.shape[2] - before.shape[2] - since.shape[2]
        )  # tokens that were demoted come before
        last = first + before.shape[2]
        return before + drawn[..., first:last], since + drawn[..., last:]

    with editor.graph.inserting_before(
        editor.graph.find_nodes(op="output")[0]
    ):  # outside of any layer
        key = "mass", *rest.items(), *read
        outputs[kept.output], outputs[recent.output] = trace(
            editor, kept.name, add, *old, *read.values(), like=site.node, key=key
        )


def _give_queries(program: Program, sites: list[_Site]) -> None:
    """The step gives each layer's queries, by token."""
    editor = Editor(program, program.step.graph)
    outputs = program.step.output_nodes()
    for site in sites:
        queries = operands_of(site.node).q
        with editor.graph.inserting_before(editor.graph.find_nodes(op="output")[0]):
            turned = editor.call(torch.ops.aten.transpose.int, queries, 1, 2, like=site.node)
        outputs[queries_of(site.layer)] = turned
    program.step.set_outputs(outputs)


def _entry(step: Compress, program: Program, sites: list[_Site]) -> Entry:
    """The graph that chooses."""
    graph = fx.Graph()
    source = Editor(program, program.step.graph)
    batch = program.step.input("tokens").meta["val"].shape[0]
    places: dict[str, fx.Node] = {}

    def holder(name: str, value: Any) -> fx.Node:
        if name not in places:
            places[name] = graph.placeholder(name)
            places[name].meta["val"] = value
        return places[name]

    def blank(shape: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        with source.fake:
            return torch.empty(shape, dtype=dtype)

    given: dict[int, dict[str, fx.Node]] = {}
    seen = holder("seen", blank((batch,), torch.int64))
    pos = holder(POSITIONS, program.step.input(POSITIONS).meta["val"])
    window = source.symbol("W", _OBSERVED) if step.score.observe else 0
    for site in sites:
        here = given[site.layer] = {"seen": seen, "recent_pos": pos}
        for part in (Part.KEYS, Part.VALUES):
            node = cache_of(site.node, part)
            if part in site.kept:
                here[f"recent_{part}"] = holder(str(node.target), node.meta["val"])
        for name, node in site.kept.items():
            here[f"kept_{name}"] = holder(str(node.target), node.meta["val"])
        here["keep"] = holder(keep_of(site.layer), blank((batch,), torch.int64))
        count = source.symbol(f"N{site.layer}", _RANKS + site.layer)
        here["ranks"] = holder(ranks_of(site.layer), blank((count,), torch.int64))
        if step.score.observe:
            queries = sizes(operands_of(site.node).q)
            shape = (batch, window, int(queries[1]), int(queries[3]))
            here["queries"] = holder(queries_of(site.layer), blank(shape, torch.float32))
            here["query_positions"] = holder("query_positions", blank((batch, window), torch.int64))
    outputs: dict[str, fx.Node] = {}
    editor = Editor(program, graph)
    for site in sites:
        here = given[site.layer]
        x = operands_of(site.node)
        key = "compress", step, x.scale, x.mask, x.window, *here
        cut = chooser(step, list(here), x.scale, Mask(x.mask, x.window))
        found = trace(editor, f"compress.{site.layer}", cut, *here.values(), key=key)
        outputs |= {output_of(str(site.kept[part].target)): node for part, node in found.items()}
    graph.output(tuple(outputs.values()))
    return Entry(graph, list(outputs))


def chooser(
    step: Compress, names: list[str], scale: float, mask: Mask
) -> Callable[..., dict[str, Tensor]]:
    """A function of tensors, by these names: what a layer keeps of the slots that it has, beyond those
    that no later query of its mask sees.
    """

    def cut(*operands: Tensor) -> dict[str, Tensor]:
        x = dict(zip(names, operands, strict=True))
        groups = x["kept_k"].shape[1]
        recent = x["recent_pos"][:, None].expand(-1, groups, -1)
        where = torch.cat((x["kept_pos"], recent), dim=2)  # [B,G,S]
        after = x["seen"][:, None, None]
        where = where.masked_fill((where >= after) | ~mask.visible(after, where), -1)
        given: dict[str, Any] = {
            "keys": torch.cat((x["kept_k"], x["recent_k"]), dim=2),
            "positions": where,
            "seen": x["seen"],
            "scale": scale,
        }
        shared = "kept_v" not in x  # a latent, which keys and values share
        given["values"] = (
            given["keys"] if shared else torch.cat((x["kept_v"], x["recent_v"]), dim=2)
        )
        if "queries" in x:
            given["queries"] = x["queries"].transpose(1, 2)
            given["query_positions"] = x["query_positions"]
        told = [name for name in ("mass", "notes") if f"kept_{name}" in x]
        given |= {n: torch.cat((x[f"kept_{n}"], x[f"kept_{n}.recent"]), dim=2) for n in told}
        scores = step.score(**{n: given[n] for n in _parameters(step.score)}).float()
        scores = _protected(step.score, scores, where, x["seen"])
        counts = step.budget.heads(scores, x["keep"])  # [B,G]
        chosen = scores.topk(x["ranks"].shape[0], dim=2).indices  # [B,G,N], best first
        stays = where.gather(2, chosen)
        stays = stays.masked_fill(x["ranks"] >= counts[..., None], -1)
        order = stays.masked_fill(stays < 0, _FAR).sort(dim=2).indices
        chosen, stays = chosen.gather(2, order), stays.gather(2, order)
        given |= {"chosen": chosen, "real": stays >= 0}
        index = chosen[..., None].expand(-1, -1, -1, given["keys"].shape[3])
        out = {"k": given["keys"].gather(2, index), "pos": stays}
        if not shared:
            out["v"] = step.keep(**{n: given[n] for n in _parameters(step.keep)})
        out |= {name: given[name].gather(2, chosen) for name in told}
        if step.keep.demotes:
            out |= low.demoted(step.keep, given, x, ~mask.visible(after, x["kept_low.pos"]))
        return out

    return cut


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
