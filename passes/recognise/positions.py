"""Whatever a model computes from token positions alone becomes a table, read at explicit positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from accel.ir.capture.encoder import INPUTS
from accel.ir.errors import PassError
from accel.ir.ops.rows import lookup
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.recognise.region import Kinds, close, numbering, try_out

aten = torch.ops.aten
_FEW = 16  # positions; what changes in sequences as short as this is no function of positions


@dataclass(frozen=True)
class Positions(Pass):
    """f(positions), or f(arange(T)), per token -> lookup(table, positions).

    Learned position embeddings, rotary cosines and sinusoids all become one form, with one row per
    position up to `max_context`; a function that cannot be evaluated so far lowers `max_context`.
    A value with two token axes is a mask and is left for the attention it belongs to.

    Before and after: `tests/passes/texts/positions.before.txt`, `positions.after.txt`.
    """

    after = (Clean, Fold)

    def run(self, program: Program) -> Report:
        report = Report()
        graph = program.step.graph
        kinds, order = Kinds(graph), numbering(graph)
        _limit_encoder(program, kinds)
        letters = sizes(program.step.input("positions"))
        for node in list(graph.nodes):
            if kinds[node] != "pos" or not isinstance(node.meta.get("val"), Tensor):
                continue
            users = [u for u in node.users if u.op == "output" or kinds.get(u) == "data"]
            users.sort(key=order.__getitem__)
            axes = [i for i, d in enumerate(sizes(node)) if d == letters[1]]
            if not users or len(axes) != 1 or node.op == "placeholder":
                continue
            if _of_both(program, node):  # a mask of cross-attention
                continue
            odd = [d for d in sizes(node)[1:] if not d.isdigit() and d != letters[1]]
            if odd or not (sizes(node)[0].isdigit() or sizes(node)[0] in letters):
                report.refused.append(f"{node.name}: shape {sizes(node)} is not [B,..,T,..]")
                continue
            table = self._table(program, node, axes[0])
            self._read(program, node, users, table, axes[0])
            report.changed += 1
        Clean().run(program)
        return report

    def _table(self, program: Program, node: fx.Node, axis: int) -> Tensor:
        """[M, *rest]: the value at every position; axes of size 1 and the batch axis are dropped."""
        longest = program.facts.max_context
        value = _longest(program, node, longest)
        if value.shape[axis] < longest:
            program.facts.max_context = value.shape[axis]
            program.facts.notes.append(
                f"max_context is {value.shape[axis]}: {node.name} has no value beyond that position"
            )
        value = self._unchanged(program, node, axis, value)
        rest = [i for i, d in enumerate(value.shape) if i != axis and d != 1]
        return (
            value.permute(
                axis, *rest, *[i for i, d in enumerate(value.shape) if i != axis and d == 1]
            )
            .reshape(value.shape[axis], *[value.shape[i] for i in rest])
            .contiguous()
        )

    def _unchanged(self, program: Program, node: fx.Node, axis: int, value: Tensor) -> Tensor:
        """The value at positions 0 .. M-1 for the largest M whose rows any shorter sequence has too."""
        longest = value.shape[axis]

        def at(length: int) -> Tensor:
            return try_out(program, node, {}, torch.arange(length)[None])

        def same(part: Tensor, shorter: Tensor) -> bool:
            return close(part.narrow(axis, 0, shorter.shape[axis]), shorter, 1e-6)

        few = min(_FEW, longest)
        if same(value, at(few)) and same(value, at(max(few, longest // 2))):
            return value
        low, high, known = few, longest, at(few)
        while high - low > 1:
            part = at((low + high) // 2)
            if same(part, known):
                low, known = part.shape[axis], part
            else:
                high = part.shape[axis]
        if low == few:
            raise PassError(
                f"{node.name} changes with the length of the sequence, not only with a token's position, "
                "so it cannot be cached; fix the length in the model's configuration (rope scaling "
                "'dynamic' needs 'linear' or 'yarn')"
            )
        program.facts.max_context = low
        program.facts.notes.append(
            f"max_context is {low}: {node.name} changes with the length of the sequence past that, so it "
            "cannot be cached; fix the length in the model to serve longer ones"
        )
        return known

    def _read(
        self, program: Program, node: fx.Node, users: list[fx.Node], table: Tensor, axis: int
    ) -> None:
        """Put lookup(table, positions), in the node's own layout, before its users."""
        graph = program.step.graph
        editor = Editor(program, graph)
        shape = sizes(node)
        batched = axis != 0 and (shape[0] == "1" or not shape[0].isdigit())
        with graph.inserting_before(users[0]):
            rows = editor.call(
                lookup.default,
                editor.param(f"positions.{node.name}", table),
                program.step.input("positions"),
            )
        if batched:
            with graph.inserting_before(users[0]):
                new = _layout(editor, rows, shape, axis)
            for user in users:  # others, which still only count positions, may stand before it
                user.replace_input_with(node, new)
            return
        for user in users:
            missing = len(sizes(user)) - len(shape)
            if missing < 1:
                raise PassError(
                    f"{user.name} uses {node.name} {shape} without a batch axis; add one in the model"
                )
            wide = ["1"] * missing + shape
            with graph.inserting_before(user):
                user.replace_input_with(node, _layout(editor, rows, wide, axis + missing))


def _of_both(program: Program, node: fx.Node) -> bool:
    """Whether a value has an axis of the encoder's tokens, beside one of the decoder's."""
    step = program.step
    return INPUTS in step.inputs and sizes(step.input(INPUTS))[1] in sizes(node)


def _limit_encoder(program: Program, kinds: Kinds) -> None:
    """An encoder reads its input at once, so its positions stay as they are; where they come out of a
    table, the table's end is the longest input.
    """
    facts = program.facts.encoder
    if facts is None or INPUTS not in program.step.inputs:
        return
    width = sizes(program.step.input(INPUTS))[1]
    for node in program.step.graph.nodes:
        if kinds[node] != "pos" or not isinstance(node.meta.get("val"), Tensor):
            continue
        read = any(kinds[u] == "data" for u in node.users)
        if read and sizes(node).count(width) == 1:
            end = _longest(program, node, facts.max_length).shape[sizes(node).index(width)]
            facts = replace(facts, max_length=min(facts.max_length, end))
    program.facts.encoder = facts


def _longest(program: Program, node: fx.Node, longest: int) -> Tensor:
    """The value at positions 0 .. M-1 for the largest M <= longest that can be evaluated."""
    try:
        return try_out(program, node, {}, torch.arange(longest)[None])
    except (IndexError, RuntimeError):
        low, high = 1, longest
    while high - low > 1:
        middle = (low + high) // 2
        try:
            try_out(program, node, {}, torch.arange(middle)[None])
            low = middle
        except (IndexError, RuntimeError):
            high = middle
    return try_out(program, node, {}, torch.arange(low)[None])


def _layout(editor: Editor, rows: fx.Node, shape: list[str], axis: int) -> fx.Node:
    """[B,T,*rest] -> the axes of `shape`: batch first, tokens at `axis`, ones where it has ones."""
    rest = [i for i in range(1, len(shape)) if i != axis and shape[i] != "1"]
    now = [0, axis, *rest]
    wanted = sorted(now)
    if now != wanted:
        rows = editor.call(aten.permute.default, rows, [now.index(a) for a in wanted])
    for a in range(1, len(shape)):
        if a not in wanted:
            rows = editor.call(aten.unsqueeze.default, rows, a)
    return rows
