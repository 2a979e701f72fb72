"""FiRST (arXiv:2410.12513): routers score each layer for the tokens of a prompt; by the mean a layer is left out for
all that comes after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.depth import NESTED, ROUTE, RUN_ROWS, Depth
from accel.ir.errors import PassError
from accel.ir.program import Editor, Program
from accel.ir.region import Region
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.depth._adapters import ADAPTER, Adapts
from accel.passes.depth._joint import conditions, holders, layers
from accel.passes.depth._routed import Branch, Learns, Reads, of_target, unit

aten = torch.ops.aten
_OPEN = 3.0  # of a router that has learnt nothing, before the sigmoid


@dataclass(frozen=True)
class FirstRouter(Learns):
    """A prompt runs all layers. Where the mean score of its tokens for a layer is below `threshold`, the layer is left
    out for every token after it; a `threshold` of 0 leaves out none. The first and the last layer always run. A row's
    layers are its own: a layer runs where one row takes it, and changes the streams of the rows that do.

    A router is one linear map of the residual stream and a sigmoid. In training it is what a layer's change of the
    stream is multiplied by. Then routers are fixed, layers are left out by them behind prompts of random lengths, and
    adapters of low rank around the products of all layers learn (`inner` of `accel-compile train` is the rank). They
    act on the tokens of rows that leave out a layer: prompts, and with `threshold` 0 all tokens, are the model's own.

    Of the prompt's cache what a layer that is left out holds is not read again, and stays in memory.
    """

    threshold: float = option(0.5, least=0, most=1)

    key: ClassVar[str] = "first-router"
    more: ClassVar[str] = ADAPTER
    settled: ClassVar[float] = 0.4
    small: ClassVar[Mapping[str, Any]] = {"threshold": 0.0}

    @property
    def targets(self) -> tuple[str, ...]:
        """See Learns: a router of whole layers."""
        return ()

    def sites(self, program: Program, calls: Sequence[fx.Node]) -> list[list[Branch]]:
        """See Learns."""
        return [[] for _ in calls]

    def router(self, width: int) -> dict[str, tuple[int, ...]]:
        """See Learns."""
        return {"w": (width,), "bias": ()}

    def score(self, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        """[B,T,E] -> [B,T]."""
        return torch.sigmoid(x @ w + bias)

    def steps(self) -> Sequence[Pass]:
        """See Rewriting."""
        return [Reads(self, self), Adapts(self, self.key), self]

    def run(self, program: Program) -> Report:
        """See Pass."""
        calls, parts = layers(program), program.parts[self.key]
        if len(calls) < 3:
            raise PassError(
                f"{self.use}: of {len(calls)} layers the first and the last always run, and none is left; build "
                "without it"
            )
        graph = program.step.graph
        editor, outputs = Editor(program, graph), dict(program.step.output_nodes())
        scores = []
        for layer, call in enumerate(calls):
            learnt = of_target(parts[layer], "layer")
            before: Any = call.args[0]
            with graph.inserting_before(call):
                given = [editor.param(f"router.{layer}.{n}", t) for n, t in learnt.items()]
                names = tuple(learnt)

                def scored(x: Tensor, *values: Tensor, names: tuple[str, ...] = names) -> Tensor:
                    return self.score(unit(x), **dict(zip(names, values, strict=True)))

                name = f"router.{layer}"
                scores.append(
                    trace(editor, name, scored, before, *given, key=("scored", self, names))
                )
        with graph.inserting_before(next(iter(graph.find_nodes(op="output")))):
            outputs[ROUTE] = editor.call(aten.stack.default, scores, 2)
        program.step.set_outputs(outputs)
        conditions(program, NESTED)
        keep = program.step.input(RUN_ROWS)
        for layer, call in enumerate(calls):
            _for_rows(program, call, keep, layer)
        every = (True,) * len(calls)
        program.facts.depth = Depth(every, NESTED, by_prompt=self.threshold)
        return Report(changed=len(calls))

    # Training (api/compiler/train/runs/routers.py)

    def begin(self, width: int, inner: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Routers that are nearly open."""
        return {"w": torch.zeros(width), "bias": torch.tensor(_OPEN)}

    def soft(self, x: Tensor, progress: float, **router: Tensor) -> tuple[Tensor, Tensor]:
        """See Learns."""
        score = self.score(x, **router)
        return score[..., None], score.mean()

    def chosen(self, scores: Tensor) -> Tensor:
        """The layers [B,L] that run, of the scores of each row's prompt [B,T,L]."""
        found = scores.mean(1) >= self.threshold
        found[:, [0, -1]] = True
        return found

    def price(self, mean: Tensor) -> Tensor:
        """A layer that runs costs."""
        return mean


def _for_rows(program: Program, call: fx.Node, keep: fx.Node, layer: int) -> None:
    """if(flag, f(x), x)  ->  if(flag, where(keep[:,l], f(x), x), x)."""
    region = call.target
    assert isinstance(region, Region)
    with call.graph.inserting_before(call):
        editor = Editor(program, call.graph)
        mine = editor.call(aten.select.int, keep, 1, layer)
        mine = editor.call(aten.reshape.default, mine, [-1, 1, 1])
    for graph in (region.graph, region.otherwise):  # type: ignore[attr-defined]
        inside = holders(graph, call, [mine])
        if graph is region.graph:
            before = inside[call.args[1]]  # type: ignore[index]
            (out,) = graph.find_nodes(op="output")
            first, *others = out.args[0]
            with graph.inserting_before(out):
                masked = Editor(program, graph).call(aten.where.self, inside[mine], first, before)
            out.args = ((masked, *others),)
    call.args = (*call.args, mine)
