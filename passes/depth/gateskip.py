"""GateSkip (arXiv:2510.13876): gates weigh what attention and MLPs add to the residual stream; where a gate is low for
a token, it leaves the branch out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.program import Program
from accel.passes.depth._delete import ANOTHER
from accel.passes.depth._routed import TARGETS, Branch, Routed, of_target, unit
from accel.passes.depth._threshold import sample
from accel.passes.stream import Stream
from accel.passes.trained import INNER, Parts

_OPEN = 5.0  # of a gate that has learnt nothing, before the sigmoid
_LEFT_OUT = 0.2  # the share of tokens that leave a branch out at the end of training


@dataclass(frozen=True)
class GateSkip(Routed):
    """What a branch adds is multiplied by its gate, [E] numbers of the token's residual stream. The importance of a
    token is the mean of them; the share `ratio` of the tokens of a calibration text that are least important for a
    branch leave it out, and so does every token that is no more important than they are. A `ratio` of 0 leaves out
    none.

    The paper takes the least important tokens of each prompt, and says nothing of single ones; here both go by the
    same limits. Its gates are square matrices, and the model is trained with them: here they are products of two, of
    `inner` columns, and the model stays as it is, which the paper finds clearly worse.
    """

    ratio: float = option(0.05, least=0, below=1)

    key: ClassVar[str] = "gateskip"
    error = ANOTHER  # gates are no 1
    reads_text = True
    lacks = "training of the model along with its gates"

    @property
    def targets(self) -> tuple[str, ...]:
        """See Learns."""
        return TARGETS

    @property
    def limit(self) -> float:
        """See Routed: of a confidence that is 0 or 1."""
        return 0.5

    def router(self, width: int) -> dict[str, tuple[int, ...]]:
        """See Learns."""
        return {"down": (INNER, width), "up": (width, INNER), "bias": (width,)}

    def gate(self, x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        """[B,T,E] -> [B,T,E]."""
        return torch.sigmoid(x @ down.T @ up.T + bias)

    def spare(self, x: Tensor, least: Tensor, **gate: Tensor) -> Tensor:  # type: ignore[override]
        """See Routed. least: the importance that is not enough, []."""
        return (self.gate(x, **gate).mean(-1) <= least).float()

    def scale(self, x: Tensor, least: Tensor, **gate: Tensor) -> Tensor:  # type: ignore[override]
        """See Routed."""
        return self.gate(x, **gate)

    def measured(
        self,
        program: Program,
        calls: Sequence[fx.Node],
        sites: Sequence[Sequence[Branch]],
        parts: Parts,
    ) -> Parts:
        """The parts, each gate with its limit `least`: of the text's tokens, which have left out branches before."""
        least: dict[str, Tensor] = {}

        def gated(site: Branch, before: Tensor, value: Tensor) -> Tensor:
            by = self.gate(unit(before), **of_target(parts[site.layer], site.target))
            important = by.mean(-1)
            least[site.name] = torch.quantile(important, self.ratio)
            return value * (by * (important > least[site.name])[..., None])

        if self.ratio:
            with torch.no_grad():
                stream = Stream(program, calls, torch.cat(list(sample(program))))
                x = stream.start
                for index, here in enumerate(sites):
                    x = stream.changed(index, x, [(s, s.before, s.term.value) for s in here], gated)
        return {
            layer: part
            | {f"{t}.least": least.get(f"{t}.{layer}", torch.tensor(-1.0)) for t in TARGETS}
            for layer, part in parts.items()
        }

    # Training (api/compiler/train/runs/routers.py)

    def begin(self, width: int, inner: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Gates that are nearly open."""
        down = torch.randn(inner, width, generator=generator) * width**-0.5
        up = torch.randn(width, inner, generator=generator) * 0.01
        return {"down": down, "up": up, "bias": torch.full((width,), _OPEN)}

    def soft(self, x: Tensor, progress: float, **gate: Tensor) -> tuple[Tensor, Tensor]:
        """See Learns. The share of tokens that leave a branch out rises from 0 on."""
        by = self.gate(x.detach(), **gate)
        important = by.detach().mean(-1)
        least = torch.quantile(important, _LEFT_OUT * progress)
        kept = (important > least) | (progress == 0)
        return by * kept[..., None], by.square().mean()

    def price(self, mean: Tensor) -> Tensor:
        """Gates cost what they let through."""
        return 0.1 * mean
