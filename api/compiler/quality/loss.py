"""What a recipe that approximates costs: bits per weight, and how far predictions moved."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.calibration import Calibration
from accel.ir.ops.experts import expert_linear
from accel.ir.program import Program
from accel.ir.weights import Pages
from accel.passes.calibrate import side_of
from accel.passes.drive import PROMPT, calls_of, decoded, exits

aten = torch.ops.aten
_WORK = 1 << 36  # parameters times tokens that may be spent on measuring
_WORK_ALONE, _ALONE = (
    1 << 33,
    64,
)  # the same of tokens that have calls of their own, and most of them
_MOST, _FEWEST = 2048, 256  # tokens
_LOGITS = 1 << 25  # logits of one call
_SLICE = 1 << 22  # logits that are compared at a time
_READ: dict[Any, int] = {
    aten.linear.default: 1, aten.embedding.default: 0, expert_linear.default: 2,
}  # fmt: skip


def storage(before: Program, after: Program) -> dict[str, Any]:
    """{"bits_per_weight", "bytes"} of the matrices and embeddings, scales and zero points included."""
    names = _weights(before)
    count = sum(before.params.blank(name).numel() for name in names)
    size = sum(
        after.params.stored(name).nbytes
        for name in after.params
        if after.params.blank(name).dim() > 1 and (name in names or name not in before.params)
    )
    return {"bits_per_weight": round(8 * size / max(1, count), 3), "bytes": size}


def loss(before: Program, after: Program, text: Calibration) -> dict[str, Any]:
    """What is lost on text that was not calibrated on: of the KL divergence of each token's prediction from the float32
    model's the mean, the median and the 99 % quantile, and both perplexities:
    {"kl", "kl_median", "kl_99", "perplexity", "perplexity_float32", "tokens", "text"}.

    Both programs run by the reference of each operator, which rounds what the kernels round. Where decoding leaves out
    layers, or a cache encodes what it keeps, the first part of each row is the prompt, and what follows it counts
    (`accel.passes.drive.decoded`). Tokens are not evicted.
    """
    rows = text.held_out[:, : min(_MOST, after.facts.max_context)]
    parameters = max(1, before.facts.parameters)
    wanted = min(_MOST, max(_FEWEST, _WORK // parameters))
    if alone := exits(after):  # a call for each token
        wanted = PROMPT + min(_ALONE, max(_ALONE // 4, _WORK_ALONE // parameters))
        rows = rows[:, :wanted]
    rows = rows[: max(1, wanted // rows.shape[1])]
    calls = calls_of(after, rows.shape[1])
    first = calls[1] if len(calls) > 2 else 0
    together = max(1, _LOGITS // (rows.shape[1] * before.facts.vocab_size))
    together = 1 if alone else together
    apart: list[Tensor] = []
    sums = torch.zeros(2, dtype=torch.float64)
    predicted = 0
    for done, part in enumerate(rows.split(together)):
        text.progress(f"measuring the loss: {done * together} of {len(rows)}", 1.0)
        a = decoded(before, part, [0, part.shape[1]], side_of(before, part))[:, first:]
        Pages.give_back()
        b = decoded(after, part, calls, side_of(after, part))[:, first:]
        moved, surprises = _compared(a, b, part[:, first:])
        del a, b
        Pages.give_back()
        apart.append(moved)
        sums += surprises
        predicted += part[:, first + 1 :].numel()
    perplexity = [math.exp(min(700.0, float(s) / max(1, predicted))) for s in sums]
    each = torch.cat(apart)
    return {
        "kl": round(float(each.mean()), 6),
        "kl_median": round(float(each.median()), 6),
        "kl_99": round(float(each.quantile(0.99)), 6),
        "perplexity": round(perplexity[1], 4),
        "perplexity_float32": round(perplexity[0], 4),
        "tokens": each.numel(),
        "text": text.source,
    }


def _weights(program: Program) -> set[str]:
    """The parameters that products, embeddings and experts read as their weight."""
    found = set()
    for node in program.nodes(*_READ):
        weight = node.args[_READ[node.target]]
        if getattr(weight, "op", "") == "get_attr":
            found.add(str(weight.target))  # type: ignore[union-attr]
    return found


def _compared(a: Tensor, b: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [n,T,V] of two programs the KL divergence [n * T], and of both the sum of -log p of each token after
    the first [2]; of a few tokens at a time, for logits of a large vocabulary are larger than the model.
    """
    apart, sums = [], torch.zeros(2, dtype=torch.float64)
    step = max(1, _SLICE // (a.shape[0] * a.shape[2]))
    for start in range(0, a.shape[1], step):
        p, q = (x[:, start : start + step].log_softmax(-1) for x in (a, b))
        apart.append((p.exp() * (p - q)).sum(-1).double())
        after = tokens[:, start + 1 : start + step + 1]
        for i, x in enumerate((p, q)):
            flat = x[:, : after.shape[1]].flatten(0, 1)
            sums[i] += F.nll_loss(flat, after.flatten(), reduction="sum").double()
    return torch.cat(apart, 1).flatten(), sums
