"""Mixtures of experts whose own code loops over what the tokens chose: the same, one row per choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel.ir.capture.forms import needs
from accel.ir.ops.experts import expert_linear


def _repeated(x: Tensor, choices: int) -> Tensor:
    """x [N,E] -> [N*K,E], each row once per choice."""
    rows: Tensor = x.unsqueeze(1).expand(-1, choices, -1).reshape(-1, x.shape[-1])
    return rows


def _summed(y: Tensor, weights: Tensor) -> Tensor:
    """y [N*K,E], weights [N,K] -> [N,E]."""
    each = y.view(*weights.shape, -1)
    return (each * weights.unsqueeze(-1)).sum(1)


def _gating(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The choices in the order of the tokens, not sorted by expert; the sizes become the experts' ids."""
    logits = self.layer(hidden_states).float()
    best, ids = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(best, dim=1).type_as(hidden_states).flatten()
    order = torch.arange(gates.shape[0], device=gates.device)
    return order, order // self.top_k, gates, ids.flatten(), logits


def _parallel(self: Any, inputs: Tensor, ids: Tensor) -> Tensor:
    out: Tensor = expert_linear(inputs, ids, self.weight, False)
    return out


@needs("fc1")
def _aria(self: Any, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
    ids, weights = self.route_tokens_to_experts(router_logits)
    x = _repeated(hidden_states, ids.shape[1])
    gate, up = expert_linear(x, ids.flatten(), self.fc1.weight, True).chunk(2, dim=-1)
    y = expert_linear(torch.nn.functional.silu(gate) * up, ids.flatten(), self.fc2.weight, True)
    return _summed(y, weights)


def _aria_layer(self: Any, hidden_states: Tensor) -> Tensor:
    """Without the views there and back, which export as a guard on the number of tokens. The router gives logits, or
    beside them weights and ids.
    """
    flat = hidden_states.flatten(0, 1)
    chosen = self.router(flat)
    given = (chosen,) if isinstance(chosen, Tensor) else (chosen[2], chosen[1])
    y: Tensor = self.experts(flat, *given).reshape(hidden_states.shape)
    out: Tensor = y + self.shared_experts(hidden_states)
    return out


@needs("top_k")
def _afmoe(
    self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor
) -> Tensor:
    ids = selected_experts.flatten()
    x = _repeated(hidden_states.flatten(0, 1), selected_experts.shape[-1])

    def linear(name: str, rows: Tensor) -> Tensor:
        weight = torch.stack([getattr(e, name).weight for e in self])
        out: Tensor = expert_linear(rows, ids, weight, False)
        return out

    y = linear("down_proj", self[0].act_fn(linear("gate_proj", x)) * linear("up_proj", x))
    out: Tensor = _summed(y, routing_weights.flatten(0, 1)).reshape(hidden_states.shape)
    return out


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    shape, ids = (-1, self.ffn_hidden_size, self.hidden_size), top_k_index.flatten()
    x = _repeated(hidden_states.reshape(-1, self.hidden_size), top_k_index.shape[1])
    gate, up = (expert_linear(x, ids, w.view(shape), False) for w in (self.mlp.w1, self.mlp.v1))
    y = expert_linear(self.mlp.activation_fn(gate) * up, ids, self.mlp.w2.view(shape), True)
    return _summed(y, top_k_weights).view(hidden_states.shape[0], -1, self.hidden_size)


def _longcat(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts past the routed ones give back what they got."""
    ids = top_k_index.flatten()
    x = _repeated(hidden_states, top_k_index.shape[1])
    known = ids.clamp(max=self.num_routed_experts - 1)
    gate, up = expert_linear(x, known, self.gate_up_proj, False).chunk(2, dim=-1)
    y = expert_linear(self.act_fn(gate) * up, known, self.down_proj, False)
    return _summed(torch.where((ids < self.num_routed_experts)[:, None], y, x), top_k_weights)


_POWER = ("GraniteMoe", "GraniteMoeShared", "GraniteMoeHybrid", "JetMoe")
FORMS = {
    "AfmoeExperts": _afmoe,
    "AriaExperts": _aria,
    "AriaTextMoELayer": _aria_layer,
    "DbrxExperts": _dbrx,
    "LongcatFlashExperts": _longcat,
    **{f"{name}TopKGating": _gating for name in _POWER},
    **{f"{name}ParallelExperts": _parallel for name in _POWER},
}
