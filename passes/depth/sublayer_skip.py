"""LLM-Drop (arXiv:2406.15786): delete the attentions, or MLPs, that change the residual stream least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.program import Program
from accel.passes import Report
from accel.passes.depth._branches import Branches, branches
from accel.passes.depth._cut import cut
from accel.passes.depth._delete import Deletion, no_adapters
from accel.passes.depth._joint import layers
from accel.passes.stream import Stream

KINDS = ATTENTION, MLP, BOTH = ("attention", "mlp", "both")


@dataclass(frozen=True)
class SublayerSkip(Deletion):
    """Deletes the fraction `share` of the attentions, with weights and caches; or of the MLPs, or of both as one list
    (`of`). The first layer stays.

    The importance of a branch is 1 - cos(before, after) of the residual stream that it is added to, averaged over
    `tokens` tokens of the calibration text without the first of each row, which many models use as an attention sink.
    """

    of: str = option(ATTENTION, one_of=KINDS)
    small: ClassVar[Mapping[str, Any]] = {"share": 0.5, "tokens": 5}

    def run(self, program: Program) -> Report:
        """See Pass."""
        no_adapters(program, self.use)
        calls = layers(program)
        found = [branches(program, call) for call in calls]
        kinds = [kind for kind in (ATTENTION, MLP) if self.of in (kind, BOTH)]
        there = [(kind, i) for i in range(1, len(calls)) for kind in kinds]
        count = int(self.share * len(calls) * len(kinds))
        if count == 0:
            what = " and ".join(f"{k}s" if k == ATTENTION else "MLPs" for k in kinds)
            return Report(refused=[f"{self.share:g} of {len(calls)} {what} is none"])
        if count > len(there):
            whole = len(calls) * len(kinds)
            raise PassError(
                f"{self.use}: {self.share:g} of {whole} are {count}, but those of the first layer stay; "
                f"give a share of at most {len(there) / whole:.3g}"
            )
        scores = influence(program, calls, found, self.text(program))
        order = sorted(there, key=lambda branch: scores[branch])[:count]
        cut(
            program,
            calls,
            found,
            *({i for k, i in order if k == kind} for kind in (ATTENTION, MLP)),
        )
        listed = ", ".join(f"{kind} {i} ({scores[kind, i]:.3f})" for kind, i in sorted(order))
        program.facts.notes.append(
            f"{self.use} deleted {listed} of {len(calls)} layers (influence)"
        )
        return Report(changed=count)


def influence(
    program: Program, calls: Sequence[fx.Node], of: Sequence[Branches], text: Tensor
) -> dict[tuple[str, int], float]:
    """1 - mean cos(before, after) of each branch on rows of token ids [n,T], in float32."""
    sums = dict.fromkeys([(kind, i) for i in range(len(calls)) for kind in (ATTENTION, MLP)], 0.0)
    with torch.no_grad():
        for row in text.split(1):
            stream = Stream(program, calls, row)
            x = stream.start
            for i, layer in enumerate(of):
                for kind, terms in ((ATTENTION, layer.attention), (MLP, layer.mlp)):
                    for term in terms:
                        before, change = stream.inside(i, x, [term.carried, term.value])
                        near = F.cosine_similarity(
                            before.float(), (before + change).float(), dim=-1
                        )
                        sums[kind, i] += float((1 - near.nan_to_num(0.0))[:, 1:].double().mean())
                x = stream.layer(i, x)
    return {branch: total / len(text) for branch, total in sums.items()}
