"""Eviction: attention over what was kept and what came since, and an entry that chooses what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from accel.ir.entries.compress import COMPRESS, held_of, keep_of, ranks_of, room_of
from accel.ir.errors import PassError
from accel.ir.kv import KvFacts
from accel.ir.ops.attention import form_of, operands_of
from accel.ir.program import Editor, Program, State
from accel.ir.region import Entry, sizes
from accel.ir.state import POSITIONS, CacheRegion, Part, output_of
from accel.ir.tables import Tables
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.kv import absorbed, moves
from accel.passes.kv._shared import low
from accel.passes.kv._shared.cached import cache_of
from accel.passes.kv._shared.tables import appended
from accel.passes.kv.chooser import CHOSEN, STAYS, TABLE, chooser, scorer
from accel.passes.kv.inputs import EntryInputs, Site
from accel.passes.kv.keep import Base as Keep
from accel.passes.kv.methods import Methods
from accel.passes.kv.sites import check_readers, check_values, leaders_of, sites_of
from accel.passes.state.cache import Cache
from accel.passes.state.head import Head
from accel.passes.state.recurrent import buffer
from accel.passes.trained import Parts, Trained, constants

_KEPT, _RANKS, _HELD, _ROOM = 31, 23, 53, 89  # example sizes while shapes are worked out


@dataclass(frozen=True)
class Compress(Methods, Pass):
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

    after = (Cache, Head)
    must_change = True
    flat = True

    def run(self, program: Program) -> Report:
        sites = sites_of(program)
        if not sites:
            return Report(
                refused=["no layer of this model has a key cache; leave kv.score out for it"]
            )
        check_values(self.keep, sites)
        turns = moves.turned(program, sites, self) if self.keep.moves else {}
        check_readers(program, sites)
        leaders = leaders_of(self, sites)
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
            site.kept_values[part] = buffer(program, editor, state, letters)
        where = ("B", lists, letter)
        state = State(Part.POSITIONS, site.layer, "int64", where, -1, CacheRegion.KEPT)
        site.kept_values["pos"] = buffer(program, editor, state, letters)
        added = {
            f"kept_{p}": site.kept_values.get(p, site.kept_values["k"]) for p in ("k", "v", "pos")
        }
        if lists < groups:
            state = State(Part.COUNTS, site.layer, "int64", ("B", groups), region=CacheRegion.KEPT)
            site.kept_values["counts"] = buffer(program, editor, state, letters)
            added["kept_counts"] = site.kept_values["counts"]
        if step.keep.demotes:
            added = low.read(program, editor, step.keep, site.node, added, site.kept_values)
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
    entry, inputs = EntryInputs(program, graph), step.inputs
    operands: dict[int, dict[str, fx.Node]] = {}
    seen = entry.new("seen", entry.batch)
    pos = entry.shared(POSITIONS)
    for site in sites:
        here = operands[site.layer] = {"seen": seen, "recent_pos": pos}
        for part in (Part.KEYS, Part.VALUES):
            node = cache_of(site.node, part)
            if part in site.kept_values:
                here[f"recent_{part}"] = entry.placeholder(str(node.target), node.meta["val"])
        for name, node in site.kept_values.items():
            here[f"kept_{name}"] = entry.placeholder(str(node.target), node.meta["val"])
        here["keep"] = entry.new(keep_of(site.layer), entry.batch)
        count = entry.source.symbol(f"N{site.layer}", _RANKS + site.layer)
        here["ranks"] = entry.new(ranks_of(site.layer), count)
        if "counts" in site.kept_values:
            for name, letter, size in (("held", "R", _HELD), ("room", "M", _ROOM)):
                count = entry.source.symbol(f"{letter}{site.layer}", size + site.layer)
                given = held_of(site.layer) if name == "held" else room_of(site.layer)
                here[name] = entry.new(given, count)
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
                operands[site.layer][TABLE + name] = number
    for layer, turn in turns.items():
        operands[layer] |= turn.operands(editor)
    if step.across is not None:
        _count_across(step, step.across, editor, sites, operands)
    choices: dict[int, dict[str, fx.Node]] = {}
    for site in sites:
        here = operands[site.layer]
        if (leader := leaders[site.layer]) != site.layer:
            here |= choices[leader]
        form = form_of(operands_of(site.node))
        paired = site.layer in turns and turns[site.layer].interleaved
        key = "compress", step, form, paired, *here
        cut = chooser(step, list(here), form, paired)
        found = dict(trace(editor, f"compress.{site.layer}", cut, *here.values(), key=key))
        choices[site.layer] = {name: found.pop(name) for name in (CHOSEN, STAYS)}
        outputs |= {
            output_of(str(site.kept_values[part].target)): node for part, node in found.items()
        }
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
        here, form = operands[site.layer], form_of(operands_of(site.node))
        key = "scores", step, form, *here
        rank = scorer(step, list(here), form)
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
