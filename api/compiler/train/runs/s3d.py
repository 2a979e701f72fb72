"""Training of the masks of `s3d` (arXiv:2405.20314), and of what stands for the layers that its drafts leave out,
beside a model that stays as it is: at random places of a text, masks behind a token say the tokens that come.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.compiler.over_state import shared
from accel.compiler.pipeline import pipeline
from accel.compiler.train.run import Run
from accel.ir.depth import RUN_LAYERS
from accel.ir.entries.step import LOGITS
from accel.ir.errors import InputError
from accel.ir.program import Program, evaluate
from accel.ir.region import sizes
from accel.passes import run
from accel.passes.depth.by_call import ByCall
from accel.passes.gradients import References
from accel.passes.state.embedded import STREAM, embedded, embedding_of
from accel.passes.state.extra_ids import ROWS, check
from accel.passes.state.masks import DOWN, LAYERS, NAMES, UP, bridge
from accel.passes.trained import ALL, Parts, first_product, write
from accel.runtime.draft.s3d import S3d

FASTER = 10  # times as fast as products masks learn, whose numbers are larger
CUTS = 64  # places of a row at which masks are tried in one step


class Masked:
    """A program as the method finds it, and its step over embeddings, whose layers a call chooses."""

    def __init__(self, program: Program, method: S3d):
        """`program`: over state."""
        self.program, self.method = program.copy(), method
        check(self.program, method.full_name)
        if not method.masks:
            raise InputError(f"{method.full_name}: masks = 0 has nothing to train; give more")
        steps = pipeline()
        run(self.program, steps[shared(steps) :], done=steps[: shared(steps)])
        self.names = first_product(self.program, self.program.step)
        self.read = embedding_of(self.program.step, method.full_name)
        self.width = int(sizes(self.read)[2])
        ByCall().run(self.program)
        self.layers = torch.from_numpy(method.of_layers(len(self.program.facts.layers)))
        gone = (~self.layers).nonzero().flatten().tolist()
        if gone:
            blank = {DOWN: torch.zeros(self.width, 1), UP: torch.zeros(1, self.width)}
            bridge(self.program, gone[0], blank)
        self.fixed = {name: self.program.params[name] for name in self.program.params}
        self.embedded = embedded(self.program, method.full_name)

    def start(self, inner: int, seed: int) -> Parts:
        """Masks by chance, small beside embeddings, so that attention soon outweighs them, and products of 0."""
        generator, size = torch.Generator().manual_seed(seed), self.program.facts.vocab_size
        tokens = torch.randint(0, size, (1, 256), generator=generator)
        scale = self.embeddings(tokens).square().mean().sqrt()
        rows = scale / 10 / FASTER * torch.randn(self.method.masks, self.width, generator=generator)
        down = torch.randn(self.width, inner, generator=generator) / self.width**0.5
        return {ALL: {ROWS: rows, DOWN: down, UP: torch.zeros(inner, self.width)}}

    def embeddings(self, tokens: Tensor) -> Tensor:
        """What the model reads of tokens [B,T]: [B,T,E]."""
        found: Tensor = evaluate([self.read], self.fixed, {"tokens": tokens})[0]
        return found

    def logits(self, part: Mapping[str, Tensor], ids: Tensor, cuts: Tensor) -> Tensor:
        """What drafts say at places of rows [B,T], [B,K], whose last token is there: [B,K,1+N,V]."""
        (batch, length), (_, count) = ids.shape, cuts.shape
        read = self.embeddings(ids)
        state = {s.name: s.allocate(B=batch, C=length) for s in self.program.state}
        places = torch.arange(length).repeat(batch, 1)
        with torch.no_grad():  # what the whole model holds of the text
            begin = torch.zeros(batch, dtype=torch.int64)
            out = self._call(self.fixed, read, places, begin, state, {"rows": begin[:, None]})
        state = {s.name: _each(out[s.output], count) for s in self.program.state}
        newest = read.gather(1, cuts[..., None].expand(-1, -1, self.width)).flatten(0, 1)
        masks = part[ROWS].expand(batch * count, -1, -1)
        stream = torch.cat((newest[:, None], masks), 1)
        first = cuts.flatten()
        places = first[:, None] + torch.arange(stream.shape[1])
        params = {**self.fixed, NAMES[DOWN]: part[DOWN], NAMES[UP]: part[UP]}
        out = self._call(params, stream, places, first, state, {RUN_LAYERS: self.layers})
        found: Tensor = out[LOGITS].unflatten(0, (batch, count))
        return found

    def _call(
        self,
        params: Mapping[str, Tensor],
        stream: Tensor,
        places: Tensor,
        slots: Tensor,
        state: Mapping[str, Tensor],
        more: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """What the step gives for a stream [B,T,E] at places [B,T], behind what a state holds."""
        rows = torch.arange(stream.shape[1]).repeat(len(stream), 1)
        inputs = {STREAM: stream, "positions": places, "slots": slots, "rows": rows, **state}
        entry = self.embedded
        given = {name: inputs[name] for name in entry.inputs if name in inputs}
        given = {**entry.defaults, **given, **(more or {})}
        found = References().graph(entry.graph, params, given)
        return dict(zip(entry.outputs, found, strict=True))


def _each(x: Tensor, count: int) -> Tensor:
    """Each row [B,…] so many times [B*count,…], without a copy where there is one row."""
    return x[:, None].expand(-1, count, *x.shape[1:]).flatten(0, 1)


class MaskedRun(Run):
    """Beside a `Masked`."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, S3d)

    @classmethod
    def over(cls, program: Program, method: Any) -> Masked:
        """See Run."""
        return Masked(program, method)

    def write(self, out: Path, about: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """See Run. A part has the layers that it is for, and serves as many masks as it has, or fewer."""
        soft, which = self.soft, {n: v for n, v in by.items() if n in ("first", "last")}
        parts = {ALL: {**self.part, LAYERS: soft.layers.float()}}
        write(soft.method, out, parts, soft.names, about, which)

    @property
    def part(self) -> dict[str, Tensor]:
        """What drafts go by, of what learns."""
        learnt = self.parts[ALL]
        return {**learnt, ROWS: learnt[ROWS] * FASTER}

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        count, generator = self.soft.method.masks + 1, torch.Generator().manual_seed(self.step)
        places = ids.shape[1] - count
        if places < 1:
            raise InputError(
                f"rows of {ids.shape[1] - 1} tokens have no room for {count} that masks say; give length=… of more"
            )
        cuts = torch.randint(places, (len(ids), CUTS), generator=generator)
        said = cuts[..., None] + 1 + torch.arange(count)
        rows = torch.arange(len(ids))[:, None, None]
        target, weight = ids[rows, said], known[rows, said - 1]
        logits = self.soft.logits(self.part, ids, cuts)
        lost = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none")
        loss = (lost.view_as(weight) * weight).sum() / weight.sum().clamp(min=1)
        right = ((logits.argmax(-1) == target) * weight).sum((0, 1)) / weight.sum((0, 1)).clamp(
            min=1
        )
        self.descend(loss)
        shares = {f"right {i}": float(share) for i, share in enumerate(right, 1)}
        return {"loss": loss.item(), **shares}
