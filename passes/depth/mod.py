"""Router-Tuning (arXiv:2410.13184): of a model that stays as it is, routers learn which tokens need a branch; as in
Mixture-of-Depths (arXiv:2404.02258), the others pass it by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.depth import HOLES, Depth
from accel.ir.invariants import Invariant
from accel.ir.program import Editor, Program
from accel.passes import Report
from accel.passes.depth._holes import holes
from accel.passes.depth._routed import (
    ATTN,
    NEVER,
    TARGETS,
    THRESHOLD,
    Branch,
    Routed,
    of_target,
    takes,
)

BLOCK = "block"
HALF = 0.5  # the score from which on a token takes a branch, in training


@dataclass(frozen=True)
class Mod(Routed):
    """A token takes a branch where its score, the sigmoid of one linear map of the residual stream, is at least
    `threshold`: 0 is the model as it is. `target`: what has a router in each layer: attention or the MLP, where
    keys and values are those of all tokens; or `block`, the whole layer, where those that it leaves out write
    none in it, as in Mixture-of-Depths, so that no later token reads them there. Its choice of the best tokens
    of a text looks at later ones; the threshold stands for it, as the paper's own does in decoding.

    Routers are trained so that tokens take the share `share` of the branches.
    """

    threshold: float = option(HALF, least=0, most=1)
    target: str = option(ATTN, one_of=(*TARGETS, BLOCK))
    share: float = option(0.75, above=0, most=1)

    key: ClassVar[str] = "mod"
    lacks = "models that were trained with routers from the beginning, and routers by sequence"

    @property
    def relies(self) -> frozenset[Invariant]:  # type: ignore[override]
        """What has holes can lose no tokens beside them, nor can its layers have slots of their own."""
        found = frozenset(
            {Invariant.ALL_TOKENS_HELD, Invariant.UNIFORM_SLOTS, Invariant.ROW_PRIVATE}
        )
        return super().relies | (found if self.holes else frozenset())

    @property
    def breaks(self) -> frozenset[Invariant]:
        """See Routed; a layer with holes does not hold all tokens."""
        found = super().breaks
        return found | {Invariant.UNIFORM_SLOTS} if self.holes else found

    @property
    def provides(self) -> frozenset[Invariant]:
        """See Base: layers, or branches of them."""
        return frozenset({Invariant.LAYERS_BY_CALL}) if self.holes else super().provides

    @property
    def targets(self) -> tuple[str, ...]:
        """See Learns."""
        return () if self.holes else (self.target,)

    @property
    def holes(self) -> bool:
        """See Learns."""
        return self.target == BLOCK

    def sites(self, program: Program, calls: Sequence[fx.Node]) -> list[list[Branch]]:
        """See Learns."""
        return [[] for _ in calls] if self.holes else super().sites(program, calls)

    def run(self, program: Program) -> Report:
        """See Pass."""
        if not self.holes:
            return super().run(program)
        parts = program.parts[self.key]
        limit = Editor(program, program.step.graph).placeholder(THRESHOLD, (), torch.float32)
        program.step.defaults[THRESHOLD] = torch.tensor(NEVER)

        def taken(editor: Editor, layer: int, stream: fx.Node) -> fx.Node:
            router = of_target(parts[layer], "layer").items()
            learnt = {n: editor.param(f"router.{layer}.{n}", t) for n, t in router}
            found: fx.Node = takes(editor, "taken", self, stream, limit, learnt)
            return found

        calls = holes(program, taken)
        every = (True,) * len(calls)
        program.facts.depth = Depth(every, HOLES, self.limit, routed=True)
        return Report(changed=len(calls))

    @property
    def limit(self) -> float:
        """See Routed."""
        return 1 - self.threshold

    def router(self, width: int) -> dict[str, tuple[int, ...]]:
        """See Learns."""
        return {"w": (width,)}

    def spare(self, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        """See Routed."""
        return torch.sigmoid(-(x @ w))

    # Training (api/compiler/train/runs/routers.py): a token takes or leaves a branch, its score has the gradient.

    def begin(self, width: int, inner: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Routers by which all tokens take all branches, just so."""
        return {"w": torch.zeros(width)}

    def soft(self, x: Tensor, progress: float, w: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """See Learns."""
        score = torch.sigmoid(x @ w)
        taken = (score >= HALF).float() + score - score.detach()
        return taken[..., None], taken.mean()

    def price(self, mean: Tensor) -> Tensor:
        """How far the share of branches that are taken is above `share`."""
        return (mean - self.share).relu()
