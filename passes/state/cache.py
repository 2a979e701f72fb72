"""Make the state explicit: attention reads slots of a buffer that the step writes, recurrences carry on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.capture.examples import side_inputs
from accel.ir.errors import PassError
from accel.ir.facts import LayerFacts
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of, set_operand
from accel.ir.program import Editor, Program, State, ancestors, evaluate
from accel.ir.region import sizes
from accel.ir.state import Part
from accel.passes import Pass, Report
from accel.passes.recognise.attention import Attention, unread
from accel.passes.recognise.cuts import layer_groups, mixers
from accel.passes.recognise.mask import HIDDEN
from accel.passes.recognise.region import Kinds
from accel.passes.recognise.rope import Rope
from accel.passes.state import recurrent
from accel.passes.state.recurrent import buffer

_SLOTS = 59  # example number of slots while shapes are worked out


@dataclass(frozen=True)
class Cache(Pass):
    """attention(q, k, v, positions, positions) -> attention over `kv.<layer>.k/v` and `kv.pos`;
    a recurrence from the empty state -> one from `recurrent.<layer>.<part>`.

    Keys and values each get a dense buffer [B,G,C,D]: one where they are the same, and one where several
    layers read them, which is the first one's. All layers write the same slots, so one `kv.pos [B,C]` says
    which position each slot holds. See recurrent.py for the rest.

    Before and after: `tests/passes/texts/cache.before.txt`, `cache.after.txt`.
    """

    after = (Attention, Rope)
    must_change = True

    def run(self, program: Program) -> Report:
        step, graph = program.step, program.step.graph
        editor = Editor(program, graph)
        groups = layer_groups(program)
        attentions = [n for g in groups for n in g if n.target is attention.default]
        mixed = mixes_tokens(program)
        if mixed:
            if missed := unread(program):
                raise PassError(
                    f"{missed}. So {mixed} mixes tokens in a way that accel cannot cache"
                )
            raise PassError(
                f"{mixed}: this mixes tokens outside attention; accel can cache only attention "
                "and the recurrences that it has an operator for"
            )
        for node in attentions:
            if _looks_ahead(program, node) and not program.facts.both_ways:
                raise PassError(
                    f"{node.name} lets a token attend to later tokens, so it cannot be decoded "
                    "token by token; accel needs causal attention"
                )
        if program.facts.both_ways and len(attentions) < sum(map(len, groups)):
            raise PassError(
                "a recurrence runs from token to token, but tokens of this model see later ones; accel supports "
                "such models with attention only"
            )
        letters = {"B": step.input("tokens").meta["val"].shape[0], "C": editor.symbol("C", _SLOTS)}
        slots = editor.placeholder("slots", (letters["B"],), torch.int64)
        outputs = step.output_nodes()
        shared = _positions(program, editor, attentions, slots, letters, outputs)
        owners: dict[fx.Node, tuple[fx.Node, int]] = {}
        for layer, sites in enumerate(groups):
            for node in sites:
                node.meta["layer"] = layer
                if node.target is attention.default:
                    _cache(program, editor, node, (slots, shared), letters, outputs, owners)
            kept = recurrent.carry(program, editor, sites, letters, outputs)
            program.facts.layers.append(_facts(sites, kept, dict(owners.values())))
        step.set_outputs(outputs)
        return Report(changed=sum(map(len, groups)) or int(program.facts.stateless))


def _positions(
    program: Program,
    editor: Editor,
    attentions: list[fx.Node],
    slots: fx.Node,
    letters: dict[str, Any],
    outputs: dict[str, fx.Node],
) -> fx.Node | None:
    """`kv.pos` with this call's positions in their slots; none where nothing attends."""
    if not attentions:
        return None
    state = State(Part.POSITIONS, None, "int64", ("B", "C"), -1)
    pos = buffer(program, editor, state, letters)
    with editor.graph.inserting_before(attentions[0]):
        all_pos = editor.call(kv_append.default, pos, program.step.input("positions"), slots)
    outputs[state.output] = all_pos
    return all_pos


def _cache(
    program: Program,
    editor: Editor,
    node: fx.Node,
    where: tuple[fx.Node, fx.Node | None],
    letters: dict[str, Any],
    outputs: dict[str, fx.Node],
    owners: dict[fx.Node, tuple[fx.Node, int]],
) -> None:
    """One attention over slots; `where`: the first slot of each row, the position in every slot.
    `owners`: keys or values -> what is stored of them, by which layer.
    """
    layer = node.meta["layer"]
    for part in (Part.KEYS, Part.VALUES):
        new = operand_of(node, part)
        assert isinstance(new, fx.Node)
        if new in owners:  # of a layer before, or a latent, which is both
            set_operand(node, part, owners[new][0])
            continue
        groups, width = int(sizes(new)[1]), int(sizes(new)[3])
        state = State(part, layer, "float32", ("B", groups, "C", width))
        held = buffer(program, editor, state, letters)
        with editor.graph.inserting_before(node):
            stored = editor.call(kv_append.default, held, new, where[0], like=node)
        set_operand(node, part, stored)
        owners[new] = stored, layer
        outputs[state.output] = stored
    set_operand(node, "k_pos", where[1])


def _looks_ahead(program: Program, node: fx.Node) -> bool:
    """Whether a mask shows a query the keys after it."""
    x = operands_of(node)
    if x.mask != "full":
        return False
    if not isinstance(x.bias, fx.Node):
        return True
    table = program.params[str(x.bias.target)]
    return table.dim() == 2 or bool((table > HIDDEN).triu(1).any())


def mixes_tokens(program: Program) -> str | None:
    """The first value, attention and recurrences aside, in which one token's result depends on
    another's; none found: None.

    Checked on numbers: with the result of each of them held fixed, changing one token must change that
    token's logits only. A row per token changed: ids below 7 are often those of padding, which some
    modules count.
    """
    graph = program.step.graph
    sites = mixers(graph)
    kinds = Kinds(graph)
    logits = program.step.output_nodes()["logits"]
    if logits not in ancestors([logits], set()) or kinds[logits] != "data":
        return f"{logits.name} does not depend on the tokens"
    length = min(7, program.facts.max_context)
    positions = torch.arange(length).repeat(length, 1)
    tokens = positions % program.facts.vocab_size
    other = (tokens + torch.eye(length, dtype=torch.int64)) % program.facts.vocab_size
    inputs = {"tokens": tokens, "positions": positions, **side_inputs(program, length)}
    with torch.no_grad():
        given = [a for s in sites for a in s.all_input_nodes if kinds[a] == "data"]
        wanted = [logits, *given]
        found = evaluate([*sites, *wanted], program.params, inputs)
        fixed, before = dict(zip(sites, found, strict=False)), found[len(sites) :]
        after = evaluate(wanted, program.params, {**inputs, "tokens": other}, fixed)
    for node, a, b in zip(wanted, before, after, strict=True):
        # of attention [B,H,T,D]; tokens come second everywhere else
        axis = 2 if attention.default in {u.target for u in node.users} else 1
        differs = (a - b).abs().movedim(axis, 1).reshape(length, length, -1).amax(2)
        if float(differs.fill_diagonal_(0).max()) > 1e-5 * max(1.0, float(a.abs().max())):
            return node.name
    return None


def _facts(sites: list[fx.Node], state_bytes: int, owners: dict[fx.Node, int]) -> LayerFacts:
    """`state_bytes`: bytes of recurrent state per row. `owners`: what is stored -> by which layer."""
    node = next((n for n in sites if n.target is attention.default), None)
    if node is None:
        return LayerFacts("recurrent", 0, 0, 0, 0, state_bytes=state_bytes)
    x = operands_of(node)
    q, k = sizes(x.q), sizes(x.k)
    owner = owners.get(x.k)
    shares = None if owner == node.meta["layer"] else owner
    return LayerFacts(
        x.mask, x.window, int(q[1]), int(k[1]), int(q[3]), state_bytes=state_bytes, shares=shares
    )
