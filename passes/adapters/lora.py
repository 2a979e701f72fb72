"""LoRA (Hu et al., arXiv 2106.09685) as inputs of the step, so that a session binds the adapters that it uses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accel.ir.adapters import ROWS, AdapterFacts, a_of, b_of
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import sizes
from accel.passes import Pass, Report
from accel.passes.recognise.linear import Linears

aten = torch.ops.aten
_RANK = 11  # example while shapes are worked out


@dataclass(frozen=True)
class Lora(Pass):
    """linear(x, W)  ->  linear(x, W) + matmul(matmul(x, a) * rows, b), for each of these modules (`ir.adapters`)."""

    modules: tuple[str, ...]

    after = (Linears,)
    must_change = True
    alone = True  # later passes are held to what it leaves

    def run(self, program: Program) -> Report:
        step, editor = program.step, Editor(program, program.step.graph)
        sites = {module: _sites(program, module) for module in self.modules}
        tokens = step.input("tokens")
        rank = editor.symbol("R", _RANK)
        rows = editor.placeholder(ROWS, (tokens.meta["val"].shape[0], 1, rank), torch.float32)
        step.defaults[ROWS] = torch.zeros(1, 1, 0)
        shapes: dict[str, tuple[int, int]] = {}
        for module, nodes in sites.items():
            weight = nodes[0].args[1]
            assert isinstance(weight, fx.Node)
            out, into = (int(n) for n in weight.meta["val"].shape)
            a = editor.placeholder(a_of(module), (into, rank), torch.float32)
            b = editor.placeholder(b_of(module), (rank, out), torch.float32)
            step.defaults |= {a_of(module): torch.zeros(into, 0), b_of(module): torch.zeros(0, out)}
            for node in nodes:
                adapt(editor, node, (a, b, rows), tokens)
            shapes[module] = into, out
        program.facts.adapters = AdapterFacts(shapes)
        return Report(changed=sum(map(len, sites.values())))


def _sites(program: Program, module: str) -> list[fx.Node]:
    """The products with a module's weight. Raises PassError where there is none, or of another form."""
    names = {f"{module}.weight", f"{module}.weight.T"}
    nodes = [
        n
        for n in program.step.graph.find_nodes(op="call_function", target=aten.linear.default)
        if str(n.args[1].target) in names
    ]
    if reason := _unlike(program, nodes):
        raise PassError(
            f"adapters: {module} {reason}, so a session cannot choose its adapter; merge the adapter instead "
            "(merge_adapter=DIR)"
        )
    return nodes


def _unlike(program: Program, nodes: Collection[fx.Node]) -> str:
    """Why an adapter cannot be an input there; empty where it can."""
    tokens = program.step.input("tokens")
    batch, length = tokens.meta["val"].shape
    logits = program.step.output_nodes()["logits"]
    if not nodes:
        return "is no product with a stored weight in the captured graph"
    for node in nodes:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if sizes(x)[:-1] not in ([str(batch), str(length)], [str(batch * length)]):
            return f"takes values of size {sizes(x)}, and not one for each token (an encoder does)"
        if node is logits or sizes(node)[-1] == str(program.facts.vocab_size):
            return "is the output head"
    return ""


def adapt(
    editor: Editor,
    node: fx.Node,
    low_rank: tuple[fx.Node, fx.Node, fx.Node],
    tokens: fx.Node | None = None,
) -> None:
    """Add the low-rank product of (a [K,R], b [R,O], rows [B,1,1] or [B,1,R]) to a product of [B,T,K]; with the tokens
    [B,T], also of [B*T,K].
    """
    a, b, rows = low_rank
    x: Any = node.args[0]
    flat = len(sizes(x)) == 2
    with editor.graph.inserting_after(node):
        total = editor.graph.call_function(aten.add.Tensor, (node, node))
    with editor.graph.inserting_before(total):
        if flat:
            batch, length = (editor.call(aten.sym_size.int, tokens, i) for i in range(2))
            x = editor.call(aten.reshape.default, x, [batch, length, -1], like=node)
        low = editor.call(aten.matmul.default, x, a, like=node)
        chosen = editor.call(aten.mul.Tensor, low, rows, like=node)
        update = editor.call(aten.matmul.default, chosen, b, like=node)
        if flat:
            update = editor.call(aten.reshape.default, update, [-1, update.meta["val"].shape[2]])
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    total.args = (node, update)
    total.meta = {**node.meta, "val": editor.value(total)}
