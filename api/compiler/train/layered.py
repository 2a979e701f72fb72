"""A program's step over whole rows, layer by layer: what parts of layers are trained beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from accel.compiler.over_state import keys_of, shared
from accel.compiler.pipeline import pipeline
from accel.ir.program import Program, ValueOf, compute
from accel.passes import run
from accel.passes.depth._joint import layers
from accel.passes.stream import Stream
from accel.passes.trained import sample


class Layered:
    """Its layers, and the keys by which the model is known again. The model stays as it is."""

    def __init__(self, program: Program, method: Any):
        self.program, self.method = program.copy(), method
        keys = keys_of(program)
        self.names = sample(program, keys)  # by what the model is known again
        self.heads = {layer: int(node.meta["val"].shape[1]) for layer, node in keys.items()}
        steps = pipeline(program.facts.encoder is not None)
        count = shared(steps)
        run(self.program, steps[count:], done=steps[:count])
        self.calls = layers(self.program)
        self.fixed = {name: self.program.params[name] for name in self.program.params}
        (self.width,) = {int(call.meta["val"][0].shape[-1]) for call in self.calls}

    def stream(
        self,
        tokens: Tensor,
        value_of: ValueOf = compute,
        replaced: Mapping[fx.Node, Tensor] | None = None,
    ) -> Stream:
        """The residual stream of tokens [B,T]. replaced: see Stream."""
        stream = Stream(self.program, self.calls, tokens, value_of, replaced)
        stream.params = self.fixed
        return stream
