"""VQ-Logits (arXiv:2505.10202): tokens in groups share a row of the head; those of the likeliest groups are then given
logits of their own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.program import Editor, Program, evaluate
from accel.ir.region import Conditional
from accel.ir.trace import trace
from accel.passes import Report
from accel.passes.calibrate import feeds
from accel.passes.head import Base
from accel.passes.head._codes import codebook, members, of_groups
from accel.passes.weights._calibrated import calibration_of

aten = torch.ops.aten
WIDE = (
    8  # tokens whose logits a call gives of a row, above which it multiplies all rows of the head
)
ROOM = 1.25  # how many times as many tokens as the mean a group may have
APART = 2.0  # deviations of a group's tokens from its mean, by which the likeliest groups are found


@dataclass(frozen=True)
class VqLogits(Base):
    """The rows of the head become `codes` groups (0: eight times the root of their number) by k-means, and the logit of
    a group, the mean of its tokens', is that of each of them. Tokens of the `rerank` likeliest groups then get the
    logits of their own rows, where a call gives logits of a few tokens: calls that score a text multiply all rows.
    With rerank = 0 the logits of groups are all there is, as in the paper.

    Rows are near where their logits are, on `tokens` tokens of the calibration text. As many codes as tokens are the
    head itself.
    """

    codes: int = option(0, least=0)
    rerank: int = option(64, least=0)
    tokens: int = option(2048, least=1)

    reads_text = True
    error = 10.0  # with rerank = 0 tokens of a group cannot be told apart
    lacks = "training of the codes with the model"
    small: ClassVar[Mapping[str, Any]] = {"codes": 24, "rerank": 6, "tokens": 5}

    @property
    def breaks(self) -> frozenset[Invariant]:
        """Calls of a few tokens give other logits than longer ones."""
        return frozenset({Invariant.DECODE_WIDTH}) if self.rerank else frozenset()

    def run(self, program: Program) -> Report:
        """See Pass."""
        product = self.product(program)
        x, weight, *bias = (n for n in product.args if isinstance(n, fx.Node))
        names = dict(
            zip(("weight", "bias"), (str(n.target) for n in (weight, *bias)), strict=False)
        )
        rows = program.params[names["weight"]]
        count = min(self.codes or 8 * math.isqrt(len(rows)), len(rows))
        if self.rerank > count:
            raise PassError(
                f"{self.use}: rerank is {self.rerank}, but there are {count} codes; give at most {count}"
            )
        if count == len(rows):
            return Report(refused=[f"{count} codes are the head itself"])
        tables = self._tables(program, x, rows, count)
        if bias:
            tables["level"] = of_groups(
                program.params[names["bias"]].float()[:, None], tables["group"], count
            )[:, 0]
        if not self.rerank:
            with product.graph.inserting_before(product):
                editor = Editor(program, product.graph)
                logits = _traced(editor, _by_group, x, {}, tables)
        else:
            logits = self._either(program, product, x, names, tables)
        product.replace_all_uses_with(logits, delete_user_cb=lambda user: user is not logits)
        product.graph.erase_node(product)
        program.facts.notes.append(
            f"{self.use}: {count} codes for {len(rows)} tokens"
            + (
                f", of which {self.rerank * tables['members'].shape[1]} get their own logits"
                if self.rerank
                else ""
            )
        )
        return Report(changed=1)

    def _tables(self, program: Program, x: fx.Node, rows: Tensor, count: int) -> dict[str, Tensor]:
        """The codes [K,E], the code of each token [V], the tokens of each code [K,M], their spread [K]."""
        calibration = calibration_of(program)
        text = calibration.tokens[:, : program.facts.max_context]
        text = text[: max(1, self.tokens // text.shape[1])]
        moments = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
        with torch.no_grad():
            for row in text.split(1):
                (states,) = evaluate([x], program.params, feeds(program, "step", row))
                flat = states.flatten(0, 1).double()
                moments += flat.mT @ flat / len(flat)
        size, turn = torch.linalg.eigh(moments / len(text))
        root = (
            turn * size.clamp(min=1e-12).sqrt()
        ).float()  # two rows so far apart are as their logits are
        seen = rows.float() @ root
        group = codebook(seen, count, math.ceil(ROOM * len(rows) / count), calibration.progress)
        apart = (seen - of_groups(seen, group, count)[group]).square().sum(1, keepdim=True)
        return {
            "codes": of_groups(rows.float(), group, count),
            "group": group,
            "members": members(group, count),
            "apart": of_groups(apart, group, count)[:, 0].sqrt(),
        }

    def _either(
        self,
        program: Program,
        product: fx.Node,
        x: fx.Node,
        names: dict[str, str],
        tables: dict[str, Tensor],
    ) -> fx.Node:
        """if(N > 8, the product, the likeliest groups' tokens)."""
        with product.graph.inserting_before(product):
            editor = Editor(program, product.graph)
            count = editor.call(aten.sym_size.int, x, 1)
            wide = editor.call(
                aten.gt.Scalar,
                editor.call(aten.scalar_tensor.default, count, dtype=torch.int64),
                WIDE,
            )

        def few(x: Tensor, known: Mapping[str, Tensor]) -> Tensor:
            z = _groups(x, known)
            best = (z + APART * known["apart"]).topk(self.rerank).indices
            tokens = known["members"][best].flatten(2)  # [B,N,R]
            logits = (F.embedding(tokens, known["weight"]) @ x[..., None])[..., 0]
            if "bias" in known:
                logits = logits + known["bias"][tokens]
            return z.index_select(2, known["group"]).scatter(2, tokens, logits)

        def all_rows(x: Tensor, known: Mapping[str, Tensor]) -> Tensor:
            return F.linear(x, known["weight"], known.get("bias"))

        graphs = []
        for function, constants in ((all_rows, {}), (few, tables)):
            graph = fx.Graph()
            for name, node in (("run", wide), ("x", x)):
                graph.placeholder(name).meta["val"] = node.meta["val"]
            holder = list(graph.nodes)[-1]
            graph.output((_traced(Editor(program, graph), function, holder, names, constants),))
            graphs.append(graph)
        with product.graph.inserting_before(product):
            call = product.graph.call_function(Conditional("head", *graphs), (wide, x))
            call.meta["val"] = (product.meta["val"],)
            return editor.call(operator.getitem, call, 0, like=product)


def _groups(x: Tensor, known: Mapping[str, Tensor]) -> Tensor:
    """Logits of groups [B,N,K]."""
    return F.linear(x, known["codes"], known.get("level"))


def _by_group(x: Tensor, known: Mapping[str, Tensor]) -> Tensor:
    """Logits of all tokens [B,N,V], alike within a group."""
    return _groups(x, known).index_select(2, known["group"])


def _traced(
    editor: Editor,
    function: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
    x: fx.Node,
    names: Mapping[str, str],
    tables: Mapping[str, Tensor],
) -> fx.Node:
    """What a function makes of x [B,N,E], parameters of the program by name and tables of the head."""
    nodes = {key: editor.param(name) for key, name in names.items()}
    nodes |= {key: editor.param(f"head.{key}", table) for key, table in tables.items()}

    def named(x: Tensor, *values: Tensor) -> Tensor:
        return function(x, dict(zip(nodes, values, strict=True)))

    found: fx.Node = trace(editor, "head", named, x, *nodes.values())
    return found
