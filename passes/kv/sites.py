"""Which layers of a program can evict, which of them choose for others, and why a model cannot."""

from __future__ import annotations

from torch import fx

from accel.ir.errors import PassError
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.op import operand_of
from accel.ir.program import Program
from accel.ir.region import sizes
from accel.ir.state import POSITIONS, Part, name_of
from accel.ir.tables import Tables
from accel.passes.kv._shared.cached import appends, cache_of
from accel.passes.kv.inputs import Site, parameters
from accel.passes.kv.keep import Base as Keep
from accel.passes.kv.methods import Methods


def sites_of(program: Program) -> list[Site]:
    """The attention of each layer that has a cache of its own."""
    by_layer: dict[int, Site] = {}
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
        if layer in by_layer:
            raise PassError(
                f"layer {layer} attends twice over one cache, which kv.score does not support"
            )
        by_layer[layer] = Site(layer, node)
    return list(by_layer.values())


def leaders_of(step: Methods, sites: list[Site]) -> dict[int, int]:
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


def _unequal(step: Methods, index: int, sites: list[Site]) -> bool:
    """Whether a layer keeps another number of tokens than the first of its group."""
    first = index - index % step.shared
    lengths = [*range(1, 300), *(3 * 2**n for n in range(7, 24))]
    return any(
        step.budget.tokens(n, index, len(sites)) != step.budget.tokens(n, first, len(sites))
        for n in lengths
    )


def check_values(keep: Keep, sites: list[Site]) -> None:
    same = [s.layer for s in sites if cache_of(s.node, Part.KEYS) is cache_of(s.node, Part.VALUES)]
    if keep.merges and same:
        raise PassError(
            f"kv.keep changes values, but the values of layer {same[0]} are also its keys (a "
            "latent, MLA); leave kv.keep out for this model, or use 'drop'"
        )


def check_readers(program: Program, sites: list[Site]) -> None:
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
