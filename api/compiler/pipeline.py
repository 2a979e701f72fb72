"""The passes of every model, in order."""

from __future__ import annotations

from collections.abc import Sequence

from accel.compiler.assemble import Plan
from accel.passes import Pass
from accel.passes.adapters.lora import Lora
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.clean.real import Reals
from accel.passes.fuse.heads import Heads
from accel.passes.fuse.pack import Pack
from accel.passes.fuse.residual import Residual
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.experts import Experts
from accel.passes.recognise.gate import Activations, Gates
from accel.passes.recognise.linear import Linears
from accel.passes.recognise.norm import Norms
from accel.passes.recognise.positions import Positions
from accel.passes.recognise.rope import Rope
from accel.passes.state.cache import Cache
from accel.passes.state.cross import Cross
from accel.passes.state.head import Head
from accel.passes.state.latent import Latent
from accel.passes.state.layers import Layers


def pipeline(
    encoder: bool = False, recipe_passes: Sequence[Pass] = (), adapted: Sequence[str] = ()
) -> list[Pass]:
    """The passes of every model, in order, with the recipe's own passes among or after them. `adapted`: modules whose
    adapters sessions choose.
    """
    recipe_passes = sorted(recipe_passes, key=lambda step: step.stage)
    lora = [Lora(tuple(adapted))] if adapted else []
    return [
        Clean(), Reals(), Fold(), Linears(), *lora, Experts(), Positions(), Norms(), Attention(), Rope(),
        Activations(), Gates(), *([Cross()] if encoder else []), Latent(), Cache(), Head(),
        *(step for step in recipe_passes if step.flat), Pack(), Heads(), Layers(), Residual(),
        *(step for step in recipe_passes if not step.flat),
    ]  # fmt: skip


def loses(step: Pass) -> bool:
    """Whether a pass may change the text, which is then measured."""
    return step.grade == "approximate"


def reads_text(plan: Plan) -> bool:
    """Whether a build calibrates on a text, or measures on it what is lost."""
    return any(step.reads_text or loses(step) for step in plan.passes)
