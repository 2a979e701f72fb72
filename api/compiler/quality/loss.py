"""What storing weights in fewer bits costs: bits per weight, and how far predictions moved."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ir.calibration import Calibration
from accel.ir.ops.experts import expert_linear
from accel.ir.program import Program
from accel.passes.calibrate import feeds

aten = torch.ops.aten
_WORK = 1 << 39  # parameters times tokens that may be spent on measuring
_MOST, _FEWEST = 2048, 256  # tokens
_LOGITS = 1 << 25  # logits of one call
_READ: dict[Any, int] = {
    aten.linear.default: 1, aten.embedding.default: 0, expert_linear.default: 2,
}  # fmt: skip


def storage(before: Program, after: Program) -> dict[str, Any]:
    """{"bits_per_weight", "bytes"} of the matrices and embeddings, scales and zero points included."""
    names = _weights(before)
    count = sum(before.params.blank(name).numel() for name in names)
    size = sum(
        blank.nbytes
        for name in after.params
        if (blank := after.params.blank(name)).dim() > 1
        and (name in names or name not in before.params)
    )
    return {"bits_per_weight": round(8 * size / max(1, count), 3), "bytes": size}


def loss(before: Program, after: Program, text: Calibration) -> dict[str, Any]:
    """Mean KL divergence per token from the float32 model's predictions, and both perplexities, on
    text that was not calibrated on: {"kl", "perplexity", "perplexity_float32", "tokens", "text"}.

    Both programs run by the reference of each operator, which rounds what the kernels round.
    """
    rows = text.held_out[:, : min(_MOST, after.facts.max_context)]
    wanted = min(_MOST, max(_FEWEST, _WORK // max(1, before.facts.parameters)))
    rows = rows[: max(1, wanted // rows.shape[1])]
    together = max(1, _LOGITS // (rows.shape[1] * before.facts.vocab_size))
    sums = torch.zeros(3, dtype=torch.float64)
    predicted = 0
    for done, part in enumerate(rows.split(together)):
        text.progress(f"measuring the loss: {done * together} of {len(rows)}", 1.0)
        a, b = (_log_probabilities(program, part) for program in (before, after))
        sums[0] += (a.exp() * (a - b)).sum().double()
        if part.shape[1] > 1:
            sums[1:] += torch.stack([_surprise(a, part), _surprise(b, part)])
            predicted += part[:, 1:].numel()
    perplexity = [math.exp(min(700.0, float(s) / max(1, predicted))) for s in sums[1:]]
    return {
        "kl": round(float(sums[0]) / rows.numel(), 6),
        "perplexity": round(perplexity[1], 4),
        "perplexity_float32": round(perplexity[0], 4),
        "tokens": rows.numel(),
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


def _log_probabilities(program: Program, tokens: Tensor) -> Tensor:
    """[n,T] -> [n,T,V]."""
    logits: Tensor = program.run("step", feeds(program, "step", tokens))["logits"]
    return logits.float().log_softmax(-1)


def _surprise(log_probabilities: Tensor, tokens: Tensor) -> Tensor:
    """The sum of -log p of each token after the first."""
    flat = log_probabilities[:, :-1].flatten(0, 1)
    return F.nll_loss(flat, tokens[:, 1:].flatten(), reduction="sum").double()
