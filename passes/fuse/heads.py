"""The heads of a packed projection are laid out once, not for q, k and v apart.

The parts of a split are replaced together, which no pattern that ends in one value says.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.clean.clean import Clean
from accel.passes.fuse.pack import Pack
from accel.passes.recognise.region import numbering, packet

aten = torch.ops.aten


@dataclass(frozen=True)
class Heads(Pass):
    """transpose(reshape(part, [B,T,h,D])) of each part of [B,T,N]  ->  the parts of one
    transpose(reshape(whole, [B,T,N/D,D])), where all parts have heads of one size D.

    The parts may have been slices, and a norm of each head may stand before the transpose.

    Before and after: `tests/passes/texts/heads.before.txt`, `heads.after.txt`.
    """

    after = (Pack,)

    def run(self, program: Program) -> Report:
        report = Report()
        for graph in program.graphs():
            for node in list(graph.nodes):
                report.changed += _share_out(program, node)
            for node in list(graph.nodes):
                if node.target is aten.split_with_sizes.default or packet(node) is aten.split:
                    shaped = _shaped(program, node)
                    if shaped is not None:
                        _turned(program, shaped)
                        report.changed += 1
        if report.changed:
            Clean().run(program)
        return report


def _share_out(program: Program, whole: fx.Node) -> bool:
    """Slices that together are all of [B,T,N] become one split."""
    slices = [n for n in whole.users if n.target is aten.slice.Tensor]
    if whole.op != "call_function" or len(slices) < 2 or not _is_rows(whole):
        return False
    last, axes = int(sizes(whole)[2]) if sizes(whole)[2].isdigit() else 0, (2, -1)
    found = []
    for node in slices:
        given: list[Any] = list(node.args[1:])
        given += [0, 0, last, 1][len(given) :]
        axis, start, end, step = given
        if axis not in axes or step != 1:
            continue
        if not isinstance(start, int) or not isinstance(end, int):
            return False
        start, end = (max(0, v + last if v < 0 else v) for v in (start, end))
        found.append((start, min(end, last), node))
    found.sort(key=lambda f: f[:2])
    bounds = [f[0] for f in found] + [last]
    if len(found) < 2 or bounds[0] != 0 or [f[1] for f in found] != bounds[1:]:
        return False
    with whole.graph.inserting_after(whole):
        editor = Editor(program, whole.graph)
        counts = [end - start for start, end, _ in found]
        split = editor.call(aten.split_with_sizes.default, whole, counts, -1, like=whole)
    with whole.graph.inserting_after(split):
        _replace(editor, split, [n for _, _, n in found])
    return True


def _shaped(program: Program, split: fx.Node) -> fx.Node | None:
    """The split of [B,T,N/D,D] in place of one of [B,T,N] whose parts were all reshaped so."""
    whole, parts = split.args[0], _parts(split)
    assert isinstance(whole, fx.Node)
    if len(sizes(whole)) != 3 or split.args[2:] not in ((-1,), (2,)) or not parts:
        return None
    shapes = [_only(p, aten.reshape) for p in parts]
    found = [s for s in shapes if s is not None]
    if len(found) != len(split.meta["val"]):
        return None
    new = [sizes(s) for s in found]
    if any(len(s) != 4 or s[:2] != sizes(whole)[:2] or s[3] != new[0][3] for s in new):
        return None
    order = numbering(split.graph)
    first = min(found, key=order.__getitem__)
    heads = [int(s[2]) for s in new]
    lengths: Any = first.args[1]
    with split.graph.inserting_before(first):
        editor = Editor(program, split.graph)
        shape = [*lengths[:2], sum(heads), int(new[0][3])]
        value = editor.call(aten.reshape.default, whole, shape, like=split)
        new_split = editor.call(aten.split_with_sizes.default, value, heads, 2, like=split)
        _replace(editor, new_split, found)
    return new_split


def _turned(program: Program, split: fx.Node) -> None:
    """[B,T,N/D,D] is transposed before it is split, where each part of it was afterwards."""
    ways = [_way(p) for p in _parts(split)]
    if any(w is None for w in ways):
        return
    editor = Editor(program, split.graph)
    with split.graph.inserting_before(split):
        value = editor.call(aten.transpose.int, split.args[0], 1, 2, like=split)
        new = editor.call(aten.split_with_sizes.default, value, split.args[1], 1, like=split)
        for i, (norm, turned) in enumerate(w for w in ways if w is not None):
            part = editor.call(operator.getitem, new, i, like=turned)
            if norm is not None:
                norm.update_arg(0, part)
                norm.meta["val"] = editor.value(norm)
            turned.replace_all_uses_with(norm or part)


def _way(part: fx.Node) -> tuple[fx.Node | None, fx.Node] | None:
    """A norm of each head, where there is one, and the exchange of axes 1 and 2 that a part goes through."""
    norm = _only(part, torch.ops.accel.rms_norm, aten.layer_norm)
    if norm is not None and norm.target is aten.layer_norm.default and len(norm.args[1]) != 1:  # type: ignore[arg-type]
        return None
    turned = _only(norm or part, aten.transpose, aten.permute)
    if turned is None:
        return None
    axes: Any = turned.args[1:]
    if packet(turned) is aten.permute:
        exchanged = [a % 4 for a in axes[0]] == [0, 2, 1, 3]
    else:
        exchanged = {a % 4 for a in axes} == {1, 2}
    return (norm, turned) if exchanged else None


def _parts(split: fx.Node) -> list[fx.Node]:
    """The parts that are read, in order."""
    users: list[Any] = list(split.users)
    return sorted(users, key=lambda n: n.args[1])


def _only(value: fx.Node, *operators: Any) -> fx.Node | None:
    """The one user of a value, where it is such an operator."""
    users = list(value.users)
    return users[0] if len(users) == 1 and packet(users[0]) in operators else None


def _replace(editor: Editor, split: fx.Node, old: Sequence[fx.Node]) -> None:
    """The parts of a split in place of other values."""
    for i, node in enumerate(old):
        node.replace_all_uses_with(editor.call(operator.getitem, split, i, like=node))


def _is_rows(node: fx.Node) -> bool:
    """Whether its value is a tensor [B,T,E]."""
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dim() == 3
