"""What is trained softly in the model (`soften`): the model gives what it alone gives (KL), predicts its text, and
stays within a budget.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from accel.compiler.over_state import keys_of
from accel.compiler.train.run import Run
from accel.ir.ops.attention import Operands, attention, form_with, weights
from accel.ir.ops.op import REFERENCES
from accel.ir.program import Program, compute, operand
from accel.passes.calibrate import feeds
from accel.passes.kv.inputs import Site
from accel.passes.kv.inputs.output import weight_of
from accel.passes.trained import Lesson, Parts, Trained, sample, source


class Soft:
    """A program's step over whole rows, its attention changed by what is trained."""

    def __init__(self, program: Program, method: Any):
        self.program, self.method = program, method
        self.fixed = {name: program.params[name] for name in program.params}
        self.keys = keys_of(program)
        self.hidden = {layer: source(node) for layer, node in self.keys.items()}

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return sample(self.program, self.keys)

    def start(self, inner: int, seed: int) -> Parts:
        generator = torch.Generator().manual_seed(seed)
        shape = {
            i: (k.meta["val"].shape[1], self.hidden[i].meta["val"].shape[-1])
            for i, k in self.keys.items()
        }
        return {
            i: self.method.start(int(e), int(g), inner, generator) for i, (g, e) in shape.items()
        }

    def logits(
        self, tokens: Tensor, parts: Parts | None = None, budget: int = 0
    ) -> tuple[Tensor, Tensor]:
        """[B,T,V] of tokens [B,T], and the mean excess over the layers; without parts, the model's own."""
        inputs = feeds(self.program, "step", tokens)
        values: dict[fx.Node, Any] = {}
        excess = torch.zeros(())
        for node in self.program.step.graph.nodes:
            if node.op == "output":
                continue
            layer = node.meta.get("layer")
            if parts is not None and node.target is attention.default and layer in parts:
                values[node], over = self._attend(node, values, parts[layer], budget)
                excess = excess + over / len(parts)
            elif node.target in REFERENCES:
                args, kwargs = self._given(node, values)
                values[node] = REFERENCES[node.target](*args, **kwargs)
            else:
                values[node] = compute(node, self.fixed, inputs, values)
        return values[self.program.step.output_nodes()["logits"]], excess

    def lessons(self, tokens: Tensor) -> dict[int, Lesson]:
        """What each layer computes of tokens [B,T] and their repeat."""
        inputs = feeds(self.program, "step", torch.cat((tokens, tokens), 1))
        values: dict[fx.Node, Any] = {}
        found = {}
        for node in self.program.step.graph.nodes:
            if node.op == "output":
                continue
            if node.target not in REFERENCES:
                values[node] = compute(node, self.fixed, inputs, values)
                continue
            args, kwargs = self._given(node, values)
            values[node] = REFERENCES[node.target](*args, **kwargs)
            layer = node.meta.get("layer")
            if node.target is attention.default and layer in self.keys:
                x = Operands[Tensor](*args, **kwargs)
                weight = self.fixed[str(weight_of(Site(layer, node, {"v": node})).target)].float()
                output = weight.unflatten(1, (x.q.shape[1], -1)).permute(1, 2, 0)
                count = 2 * tokens.shape[1]
                found[layer] = Lesson(
                    values[self.hidden[layer]], x.q, x.k[:, :, :count], x.v[:, :, :count], output, form_with(x)
                )  # fmt: skip
        return found

    def _given(self, node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, Any]:
        """The values of a node's operands."""
        args, kwargs = (
            fx.node.map_arg(a, lambda n: operand(n, self.fixed, values))
            for a in (node.args, node.kwargs)
        )
        return args, kwargs

    def _attend(
        self, node: fx.Node, values: dict[fx.Node, Any], part: dict[str, Tensor], budget: int
    ) -> tuple[Tensor, Tensor]:
        args, kwargs = self._given(node, values)
        x = Operands[Tensor](*args, **kwargs)
        notes = self.method.note(values[self.hidden[node.meta["layer"]]], **part).transpose(
            1, 2
        )  # [B,G,T]
        after = x.q_pos[:, :, None] - x.k_pos[:, None]
        repeat = x.q.shape[1] // x.k.shape[1]
        probs, mixed = weights(x, self.method.soften(notes, after).repeat_interleave(repeat, dim=1))
        return probs @ mixed, self.method.excess(notes, after, budget)


class SoftRun(Run):
    """Attention forgets as the cache will."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Trained) and hasattr(method, "soften")

    @classmethod
    def over(cls, program: Program, method: Any) -> Soft:
        """See Run."""
        return Soft(program, method)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], of which tokens with weight `known` [B,T] can be predicted."""
        tokens, target = ids[:, :-1], ids[:, 1:]
        with torch.no_grad():
            want = self.soft.logits(tokens)[0].log_softmax(-1)
        found, excess = self.soft.logits(tokens, self.parts, self.options.budget)
        found = found.log_softmax(-1)
        kl = F.kl_div(found, want, log_target=True, reduction="none").sum(-1).mean()
        wrong = F.nll_loss(found.flatten(0, 1), target.flatten(), reduction="none")
        text = (wrong * known.flatten()).sum() / known.sum().clamp(min=1)
        self.descend(kl + text + self.options.pressure * excess)
        return {"kl": kl.item(), "text": text.item(), "excess": excess.item()}
