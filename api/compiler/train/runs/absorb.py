"""Training of what absorbs evicted tokens (`kv.keep` methods that are trained): each layer by itself, on what its
attention reads while the model runs as it is.

A row is cut at a random token; of those before, each head keeps its newest and those that drew most attention, a random
share; the others are absorbed. The results of later tokens, through the output projection, should be those of attention
over all. The loss is the squared error as a share of the error without what was absorbed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel.compiler.over_state import keys_of
from accel.compiler.train.run import Run
from accel.ir.ops.attention import merged, operands_of
from accel.ir.program import Program
from accel.ir.region import sizes
from accel.ir.tables import Observed
from accel.passes.kv._shared.tables import attentions, observed
from accel.passes.kv.inputs import Site, call
from accel.passes.kv.inputs.output import weight_of
from accel.passes.kv.keep import Base as Keep
from accel.passes.trained import Parts, Trained, sample

POOL = 24  # rows, the first ones: running the model costs more than a step
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the tokens before a cut
NEWEST = 0.5  # of what is kept


class Absorbing:
    """The layers of a program whose attention sees tokens as long as they stay."""

    def __init__(self, program: Program, method: Any, keys: Any):
        self.program, self.method, self.keys = program, method, keys
        nodes = attentions(program)
        self.output = {
            layer: program.params[str(weight_of(Site(layer, node, {"v": node})).target)].float()
            for layer, node in nodes.items()
        }
        self.sizes = {
            layer: {
                "heads": int(sizes(operands_of(node).q)[1]),
                "groups": int(sizes(keys[layer])[1]),
                "width": int(sizes(keys[layer])[3]),
            }
            for layer, node in nodes.items()
        }

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return sample(self.program, self.keys)

    def start(self, inner: int, seed: int) -> Parts:
        generator = torch.Generator().manual_seed(seed)
        return {
            layer: self.method.start(shape, inner, generator) for layer, shape in self.sizes.items()
        }

    def observe(self, ids: Tensor, known: Tensor) -> dict[int, Observed]:
        """What each layer's attention reads of rows [B,T+1]."""
        with torch.no_grad():
            (rows,) = observed(self.program, [(ids, known)])
        return dict(rows.layers)

    def loss(self, layers: dict[int, Observed], parts: Parts, seed: int) -> Tensor:
        """The mean over layers, at a cut and a share that go by the seed."""
        generator = torch.Generator().manual_seed(seed)
        length = next(iter(layers.values())).keys.shape[2]
        cut = int(torch.randint(length // 4, length - length // 8, (), generator=generator))
        share = SHARES[int(torch.randint(len(SHARES), (), generator=generator))]
        kept = max(2, int(cut * share))
        found = [
            self.left(x, parts[layer], self.output[layer], cut, kept) for layer, x in layers.items()
        ]
        return torch.stack(found).mean()

    def left(
        self, x: Observed, part: dict[str, Tensor], output: Tensor, cut: int, kept_tokens: int
    ) -> Tensor:
        """The share of the error of dropping that is left where what goes is absorbed."""
        q, k, v = x.queries.float(), x.keys.float(), x.values.float()
        groups, repeat, length = k.shape[1], q.shape[1] // k.shape[1], k.shape[2]
        wide, at = v.repeat_interleave(repeat, dim=1), x.positions
        with torch.no_grad():
            scores = x.form.scores(q, at, k, at[:, None])  # [B,G,R,T,T]
            mass = x.form.shares(scores)[:, :, :, :cut, :cut].sum((2, 3))
            mass[..., cut - max(1, int(kept_tokens * NEWEST)) :] = torch.inf
            stays = torch.zeros_like(mass, dtype=torch.bool)
            stays.scatter_(2, mass.topk(kept_tokens, dim=2).indices, True)
            gone = torch.nn.functional.pad(~stays, (0, length - cut))  # [B,G,T]
            scores = scores[:, :, :, cut:]
            want = x.form.shares(scores).flatten(1, 2) @ wide
            scores = scores.masked_fill(gone[:, :, None, None], torch.finfo(torch.float32).min)
            dropped, lse = (
                x.form.shares(scores).flatten(1, 2) @ wide,
                x.form.total(scores).flatten(1, 2),
            )
        state = {
            n: torch.zeros(len(k), groups, *size)
            for n, size in self.method.absorbed(k.shape[3], v.shape[3]).items()
        }
        told = {"scale": x.form.scale, "softcap": x.form.softcap, **part}
        state = call(self.method.absorb, {**told, **state, "keys": k, "values": v, "gone": gone})
        beside = call(self.method.read, {**told, **state, "queries": q[:, :, cut:]})
        found = merged(dropped, lse, *beside)[0]
        errors: list[Tensor] = [
            ((out - want).transpose(1, 2).flatten(2) @ output.T).square().mean()
            for out in (found, dropped)
        ]
        return errors[0] / errors[1].clamp(min=1e-12)


@dataclass
class AbsorbRun(Run):
    """See above."""

    pool: list[dict[int, Observed]] = field(default_factory=list)

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Trained) and issubclass(method, Keep) and method.absorbs

    @classmethod
    def over(cls, program: Program, method: Any) -> Absorbing:
        """See Run."""
        return Absorbing(program, method, keys_of(program))

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        if len(self.pool) < POOL:
            self.pool.append(self.soft.observe(ids, known))
        row = self.pool[self.step % len(self.pool)]
        lost = self.soft.loss(row, self.parts, self.options.seed + self.step)
        self.descend(lost)
        return {"left": lost.item()}


def losses(soft: Absorbing, batches: Iterable[tuple[Tensor, Tensor]], parts: Parts) -> list[float]:
    """Of rows that were not trained on, say."""
    with torch.no_grad():
        return [
            float(soft.loss(soft.observe(*batch), parts, seed))
            for seed, batch in enumerate(batches)
        ]
