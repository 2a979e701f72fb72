"""EMS-SD (arXiv:2405.07542): the tokens of all rows in one row, without padding."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.entries.embed import EMBEDDED, EMBEDS
from accel.ir.entries.flat import FLAT, OWNER
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.flat import flat_append, flat_attention
from accel.ir.ops.kv import kv_append
from accel.ir.ops.op import operand_of
from accel.ir.ops.rows import given_rows
from accel.ir.program import Editor, Program
from accel.ir.region import Entry, Region
from accel.ir.taps import is_tap
from accel.passes import Report
from accel.passes.batch import Base
from accel.passes.clean.clean import remove_dead
from accel.passes.state.copies import Copied, copy_node, copy_region

_TOKENS = 83  # example size while shapes are worked out
_EMBEDDINGS = {EMBEDS, EMBEDDED}  # which heads of drafts are given, and calls of the model never
_OF_TOKENS, _OF_ROWS = frozenset({"tokens"}), frozenset({"rows"})


@dataclass(frozen=True)
class Flat(Base):
    """A call of the entry computes as many tokens as there are: norms, products and experts see F tokens, where the
    step's see B times the most of a row; each token attends to the slots of its row, and goes into one. Rows without
    tokens are left alone.
    """

    relies = frozenset({Invariant.CHAINS, Invariant.FULL_ATTENTION, Invariant.ALL_LAYERS_RUN})
    breaks = frozenset({Invariant.BATCH_INVARIANCE})

    def run(self, program: Program) -> Report:
        return flat(program)


def flat(program: Program) -> Report:
    """step -> flat(tokens [1,F], positions [1,F], slots [B], rows [1,N], owner [F,2], state) beside it; the owner is
    that of `ir/ops/flat.py`. It gives logits [1,N,V], the state, and what methods read of tokens (`accel.ir.taps`)
    [1,F,E]. Embeddings that calls may give in place of tokens (`Embeds`) are none here.

    Raises:
        PassError: something other than attention reads both a token and what its row holds.
    """
    copying = _Copying()
    editor, copied = _inputs(program, copying)
    for node in program.step.graph.nodes:
        if node.target is given_rows.default and node.args[2] not in copied:
            copied[node] = copied[node.args[0]]
            copying.of[node] = copying.of[node.args[0]]
        elif node.op in ("call_function", "get_attr"):
            copied[node] = copying(editor, node, copied)
    states = {s.output for s in program.state}
    outputs = {
        name: copied[node]
        for name, node in program.step.output_nodes().items()
        if name == "logits" or name in states or is_tap(name)
    }
    editor.graph.output(tuple(outputs.values()))
    remove_dead(editor.graph)
    program.entries[FLAT.name] = Entry(editor.graph, list(outputs))
    return Report(changed=copying.changed)


def _inputs(program: Program, copying: _Copying) -> tuple[Editor, Copied]:
    """The entry's placeholders, by those of the step."""
    step, graph = program.step, fx.Graph()
    own = {"tokens": _OF_TOKENS, "positions": _OF_TOKENS, "rows": _OF_TOKENS, "slots": _OF_ROWS}
    own |= {s.name: _OF_ROWS for s in program.state}
    if more := sorted(set(step.inputs) - own.keys() - _EMBEDDINGS):
        raise PassError(
            f"batch.flat: a call of this model is also told {', '.join(more[:3])}, which flat calls are not; leave "
            "[batch] out"
        )
    copied: Copied = {}
    for name in own:
        new = graph.placeholder(name)
        new.meta["val"] = step.input(name).meta["val"]
        copied[step.input(name)] = new
        copying.of[step.input(name)] = own[name]
    editor = Editor(program, graph)
    count, wanted = editor.symbol("F", _TOKENS), step.input("rows").meta["val"].shape[1]
    for name, width in (("tokens", count), ("positions", count), ("rows", wanted)):
        with editor.fake:
            copied[step.input(name)].meta["val"] = torch.empty((1, width), dtype=torch.int64)
    editor.placeholder(OWNER, (count, 2), torch.int64)
    return editor, copied


class _Copying:
    """Makes the nodes of the entry out of those of the step, and knows of each what it was computed from."""

    def __init__(self) -> None:
        self.of: dict[
            fx.Node, Any
        ] = {}  # of a node of the step; of a region's call, of each result
        self.changed = 0

    def __call__(self, editor: Editor, node: fx.Node, copied: Copied) -> fx.Node:
        if isinstance(node.target, Region):
            return self._region(editor, node, copied)
        if node.target is operator.getitem and isinstance(self._of(node.args[0]), tuple):
            self.of[node] = self._of(node.args[0])[node.args[1]]
            return copy_node(editor, node, copied)
        found = frozenset[str]().union(*(self._of(n) for n in node.all_input_nodes))
        self.of[node] = found
        if found != _OF_TOKENS | _OF_ROWS:
            return copy_node(editor, node, copied)
        if node.target is kv_append.default and self._appends(node):
            self.of[node] = _OF_ROWS
            op = flat_append
        elif node.target is attention.default and self._attends(node):
            self.of[node] = _OF_TOKENS
            op = flat_attention
        else:
            raise PassError(
                f"batch.flat: {node.name} reads tokens and what their rows hold; only attention over the cache may, "
                "where each token has its row's; leave [batch] out"
            )
        self.changed += 1
        args: Any = fx.node.map_arg(node.args, copied.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, copied.__getitem__)
        return editor.call(op.default, *args, like=node, **kwargs, owner=_owner(editor))

    def _of(self, node: Any) -> Any:
        return self.of.get(node, frozenset())

    def _appends(self, node: fx.Node) -> bool:
        """Whether tokens go into their rows' slots."""
        operands = [self._of(operand_of(node, name)) for name in ("buffer", "new", "slots")]
        return operands == [_OF_ROWS, _OF_TOKENS, _OF_ROWS]

    def _attends(self, node: fx.Node) -> bool:
        """Whether tokens attend to their rows' slots, and to nothing else."""
        x = operands_of(node)
        rows = [x.k, x.v, x.k_pos, x.kept_k, x.kept_v, x.kept_pos, x.kept_counts]
        plain = all(one is None for one in (x.tree, x.first, x.pages, x.beside, x.beside_lse))
        return (
            plain
            and all(self._of(one) == _OF_TOKENS for one in (x.q, x.q_pos))
            and all(self._of(one) == _OF_ROWS for one in rows if one is not None)
            and not any(self._of(one) for one in (x.bias, x.sink) if one is not None)
        )

    def _region(self, editor: Editor, node: fx.Node, copied: Copied) -> fx.Node:
        """A layer again, which also gets the owners."""
        assert isinstance(node.target, Region)
        graph = node.target.graph
        for holder, given in zip(graph.find_nodes(op="placeholder"), node.args, strict=True):
            self.of[holder] = self._of(given)
        (out,) = graph.find_nodes(op="output")
        new = copy_region(editor, node, copied, self, (_owner(editor),))
        self.of[node] = tuple(map(self._of, out.args[0]))
        return new


def _owner(editor: Editor) -> fx.Node:
    """The owners, in the entry or in a region."""
    holders: list[fx.Node] = list(editor.graph.find_nodes(op="placeholder"))
    return next(n for n in holders if n.target == OWNER)
