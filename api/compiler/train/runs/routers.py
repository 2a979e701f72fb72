"""What learns which layers, or branches of them, a token takes (`passes/depth/_routed.py`): the model runs softly, as
the routers say, and predicts its text; the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from accel.compiler.train.layered import Layered
from accel.compiler.train.run import Run
from accel.ir.program import Program
from accel.passes.depth._adapters import begin, insert, parameters
from accel.passes.depth._holes import seen, written
from accel.passes.depth._routed import Branch, Learns, of_target, unit
from accel.passes.gradients import References
from accel.passes.stream import Stream
from accel.passes.trained import Parts


class SoftLayers(Layered):
    """What layers change is weighed by routers. Where a method's routers are settled before the training ends, there
    are adapters around the products of layers, which do nothing until then.
    """

    def __init__(self, program: Program, method: Learns):
        super().__init__(program, method)
        self.sites = method.sites(self.program, self.calls)
        self._adapts = None
        if method.settled < 1:
            none = [begin(call, 1, torch.Generator()) for call in self.calls]
            self._adapts = insert(self.program, self.calls, none)
            self.fixed = {name: self.program.params[name] for name in self.program.params}

    def start(self, inner: int, seed: int) -> Parts:
        generator = torch.Generator().manual_seed(seed)
        parts = {
            layer: self.method.start(self.width, heads, inner, generator)
            for layer, heads in self.heads.items()
        }
        if self._adapts is not None:
            for part, call in zip(parts.values(), self.calls, strict=True):
                part |= begin(call, inner, generator)
        return parts

    def logits(
        self, tokens: Tensor, parts: Parts | None = None, progress: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """[B,T,V] of tokens [B,T], and the mean of what costs; without parts, the model's own."""
        if parts is not None and progress >= self.method.settled:
            return self._settled(tokens, parts)
        stream = self.stream(tokens, References().value)
        x, costs = stream.start, []
        for index, sites in enumerate(self.sites):
            if parts is None:
                x = stream.layer(index, x)
            elif sites:
                x, cost = self._branches(stream, index, x, parts[index], progress)
                costs += cost
            else:
                by, cost_of_it = self.method.soft(
                    unit(x), progress, **of_target(parts[index], "layer")
                )
                replaced = self.hole(by) if self.method.holes else None
                x = x + by * (stream.layer(index, x, replaced=replaced) - x)
                costs.append(cost_of_it)
        mean = torch.stack(costs).mean() if costs else torch.zeros(())
        return stream.logits(x), mean

    def hole(self, by: Tensor) -> dict[fx.Node, Tensor]:
        """What a layer reads that takes the tokens which are weighed by more than 0, of [B,T,1]."""
        places = torch.arange(by.shape[1]).expand(by.shape[:2])
        return {written(self.program): seen(by.detach().transpose(1, 2), places)}

    def _settled(self, tokens: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        """Logits, and the share of layers that run, where prompts of a random length choose the layers of all behind
        them.
        """
        prompt = int(torch.randint(tokens.shape[1] // 4, tokens.shape[1] * 3 // 4 + 1, ()))
        with torch.no_grad():
            keep = self.chosen(tokens[:, :prompt], parts)
        return self.after(tokens, prompt, keep, parts), keep.float().mean()

    def chosen(self, prompts: Tensor, parts: Parts) -> Tensor:
        """The layers [B,L] that prompts [B,T] choose."""
        stream = self.stream(prompts, References().value)
        x, scores = stream.start, []
        for index in range(len(self.calls)):
            scores.append(self.method.score(unit(x), **of_target(parts[index], "layer")))
            x = stream.layer(index, x)
        found: Tensor = self.method.chosen(torch.stack(scores, 2))
        return found

    def after(self, tokens: Tensor, prompt: int, keep: Tensor, parts: Parts | None) -> Tensor:
        """Logits [B,T,V] of tokens [B,T], of which those behind so many run the layers keep [B,L], with adapters in
        rows that leave out one; without parts, with none.
        """
        late = (torch.arange(tokens.shape[1]) >= prompt)[None, :, None]
        gate = (late & ~keep.all(1)[:, None, None]).float()
        replaced = None if self._adapts is None else {self._adapts: gate}
        stream = self.stream(tokens, References().value, replaced)
        for layer, part in (parts or {}).items():
            stream.params = {**stream.params, **parameters(layer, part)}
        x = stream.start
        for index, runs in enumerate(keep.T):
            x = torch.where(late & ~runs[:, None, None], x, stream.layer(index, x))
        return stream.logits(x)

    def _branches(
        self, stream: Stream, index: int, x: Tensor, part: Mapping[str, Tensor], progress: float
    ) -> tuple[Tensor, list[Tensor]]:
        """The stream behind a layer, of x before it, each branch weighed by its router."""
        costs = []

        def weighed(site: Branch, before: Tensor, value: Tensor) -> Tensor:
            router, read = of_target(part, site.target), unit(before)
            by, cost = self.method.soft(read, progress, **router)
            costs.append(cost)
            other = self.method.instead(read, **router)
            found: Tensor = value * by if other is None else value * by + other * (1 - by)
            return found

        sites = [(s, s.before, s.term.value) for s in self.sites[index]]
        return stream.changed(index, x, sites, weighed), costs


class RoutersRun(Run):
    """Routers learn to predict the text by less."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Learns)

    @classmethod
    def over(cls, program: Program, method: Any) -> SoftLayers:
        """See Run."""
        return SoftLayers(program, method)

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1], of which tokens with weight `known` [B,T] can be predicted."""
        tokens, target = ids[:, :-1], ids[:, 1:]
        with torch.random.fork_rng(devices=[]):  # of what `soft` draws
            torch.manual_seed(self.options.seed * 1_000_003 + self.step)
            logits, mean = self.soft.logits(tokens, self.parts, min(1.0, self.progress))
        wrong = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
        text = (wrong * known.flatten()).sum() / known.sum().clamp(min=1)
        self.descend(text + self.options.pressure * self.soft.method.price(mean))
        return {"text": text.item(), "mean": mean.item()}
