"""Measuring tables: the attention of each layer over rows of a text, and what a method makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from accel.ir.ops.attention import attention, form_of, operands_of
from accel.ir.ops.op import operand_of
from accel.ir.ops.rope import rope
from accel.ir.program import Program, operand
from accel.ir.state import Part
from accel.ir.tables import Observed, Rows, Tables
from accel.passes.calibrate import calibrate, feeds
from accel.passes.kv._shared.cached import appends
from accel.passes.kv._shared.second_model import reader
from accel.passes.trained import Parts, product

Text = Iterable[tuple[Tensor, Tensor]]  # tokens [B,T+1], which of them can be predicted [B,T]


def attentions(program: Program) -> dict[int, fx.Node]:
    """The attention of each layer that appends to a cache of its own."""
    nodes = program.nodes(attention.default, entry=program.step)
    return {n.meta["layer"]: n for n in nodes if n.meta.get("layer") is not None and appends(n)}


def appended(node: fx.Node) -> fx.Node:
    """The keys [B,G,T,D] that a step appends to the cache that an attention reads."""
    append = operand_of(node, Part.KEYS)
    assert isinstance(append, fx.Node)
    keys = operand_of(append, "new")
    assert isinstance(keys, fx.Node)
    return keys


def measured(method: Tables, program: Program, text: Text) -> Parts:
    """The constants of each layer, of a program over state that no method has changed."""
    return method.measure(observed(program, _answered(program, text)))


def _answered(program: Program, text: Text) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of a text; of examples only those that the program answers, or as text if it answers none."""
    wrong, right = list[tuple[Tensor, Tensor]](), False
    for tokens, known in text:
        if (known >= 0).all() or says(program, tokens, known):
            right = True
            yield tokens, known
        elif not right:
            wrong.append((tokens, torch.ones_like(known)))
    if not right:
        yield from wrong


def says(program: Program, tokens: Tensor, known: Tensor) -> bool:
    """Whether each token [1,T+1] that is `known` [1,T] is the likeliest one."""
    asked = (known[0] > 0).nonzero()[:, 0]
    given = {**feeds(program, "step", tokens[:, :-1]), "rows": asked[None]}
    said = program.run("step", given)["logits"][0].argmax(-1)
    return torch.equal(said, tokens[0, 1:][asked])


def observed(program: Program, text: Text) -> Iterator[Rows]:
    """What attention reads of rows of a text, of a program over state that no method has changed."""
    nodes = attentions(program)
    first = product(appended(nodes[min(nodes)])) if nodes else None
    turned = {
        "unrotated": {i: appended(site) for i, site in nodes.items()},
        "unrotated_queries": {i: operands_of(site).q for i, site in nodes.items()},
    }
    turns = {
        n: (i, name)
        for name, some in turned.items()
        for i, n in some.items()
        if n.target is rope.default
    }
    read = None if program.second_model is None else reader(program.second_model)
    for tokens, known in text:
        layers: dict[int, Observed] = {}
        hidden: list[Tensor] = []
        before: dict[int, dict[str, Tensor]] = {i: {} for i in nodes}

        def visit(
            node: fx.Node,
            *operands: Tensor,
            observed: dict[int, Observed] = layers,
            hidden: list[Tensor] = hidden,
            before: dict[int, dict[str, Tensor]] = before,
        ) -> None:
            if node is first:
                hidden.append(operands[0])
            elif node in turns:
                layer, name = turns[node]
                before[layer][name] = operands[0]
            else:
                layer, x = node.meta["layer"], operands_of(node)
                read = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
                given = dict(zip(read, operands, strict=True))
                sink, bias = (
                    None if n is None else given[n] if n in given else operand(n, program.params, {})
                    for n in (x.sink, x.bias)
                )  # fmt: skip
                form = replace(form_of(x), sink=sink, bias=bias)
                q, k, v = operands[:3]
                observed[layer] = Observed(q, k, v, form, **before[layer])

        wanted = [*nodes.values(), *turns, *([first] if first is not None else [])]
        calibrate(program, tokens[:, :-1], wanted, visit)
        places = torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1)
        with torch.no_grad():
            others = () if read is None else read(tokens[:, :-1], places)
        yield Rows(tokens, known, layers, next(iter(hidden), None), others)
