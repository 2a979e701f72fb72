"""What foretells attention or changes it (`Fitted`): it learns from what the model reads of a text, or in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from accel.compiler.over_state import keys_of
from accel.compiler.train.run import Run
from accel.ir.errors import InputError
from accel.ir.ops.attention import Operands, attention, form_with
from accel.ir.ops.op import REFERENCES
from accel.ir.program import Program, compute, evaluate, operand
from accel.ir.tables import Observed, Rows
from accel.passes.calibrate import feeds
from accel.passes.kv._shared.tables import observed
from accel.passes.trained import Fitted, Parts, last_hidden, sample

Attention = Callable[[int, Observed], Tensor]  # of a layer: [B,H,T,Dv]


class Fit:
    """A program, and a method that foretells or changes its attention."""

    def __init__(self, program: Program, method: Fitted):
        self.program, self.method = program, method
        self.keys = keys_of(program)

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return sample(self.program, self.keys)

    def rows(self, ids: Tensor, known: Tensor) -> Any:
        """What each layer's attention reads of rows [B,T+1]; of a method that learns in the model, what that gives."""
        if not self.method.inside:
            return next(observed(self.program, [(ids, known)]))
        return Rows(ids, known, {}, last=Inside(self.program, ids[:, :-1], self.keys))

    def start(self, inner: int, seed: int) -> Parts:
        """For what the program reads of a few tokens, of whatever kind."""
        ids = torch.arange(9)[None] % self.program.facts.vocab_size
        generator = torch.Generator().manual_seed(seed)
        rows = next(observed(self.program, [(ids, torch.ones(1, 8))]))
        return self.method.start(rows, inner, generator)


class Inside:
    """The last hidden states of tokens [B,T], with attention that may be another in some layers. Raises InputError
    where the model has no linear head.
    """

    def __init__(self, program: Program, tokens: Tensor, keys: Mapping[int, fx.Node]):
        self.inputs, self.keys = feeds(program, "step", tokens), keys
        self.params = program.params
        found = last_hidden(program.step)
        if found is None:
            raise InputError(
                f"{program.facts.name}: no linear output head was found behind its last hidden state"
            )
        self.hidden = found

    def __call__(self, instead: Attention | None = None) -> Tensor:
        """[B,T,E]"""

        def value(node: fx.Node, params: Any, inputs: Any, values: Mapping[fx.Node, Any]) -> Any:
            if node.target not in REFERENCES:
                return compute(node, params, inputs, values)
            args: Any = fx.node.map_arg(node.args, lambda n: operand(n, params, values))
            kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: operand(n, params, values))
            layer: Any = node.meta.get("layer")
            if instead is not None and node.target is attention.default and layer in self.keys:
                x = Operands[Tensor](*args, **kwargs)
                return instead(layer, Observed(x.q, x.k, x.v, form_with(x)))
            return REFERENCES[node.target](*args, **kwargs)

        found: Tensor = evaluate([self.hidden], self.params, self.inputs, value_of=value)[0]
        return found


class FitRun(Run):
    """By the method's own loss."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Fitted)

    @classmethod
    def over(cls, program: Program, method: Any) -> Fit:
        """See Run."""
        return Fit(program, method)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        lost = self.soft.method.loss(self.parts, self.soft.rows(ids, known), self.progress)
        self.descend(lost)
        return {"loss": lost.item()}
