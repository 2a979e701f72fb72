"""Losses over a tied head, a chunk of positions at a time: the logits of a step never stand in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK = 1024  # positions: a chunk's logits stay in the processor's cache
ON_GPU = 32_768  # there few large kernels are faster than many small ones


def _parts(states: Tensor) -> Iterator[slice]:
    """The chunks of positions [N,E]."""
    size = CHUNK if states.device.type == "cpu" else ON_GPU
    return (slice(start, start + size) for start in range(0, len(states), size))


class _HeadLoss(torch.autograd.Function):
    """Gradients are computed along with the loss, while a chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, target: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        each = torch.empty(len(states), dtype=torch.float32, device=states.device)
        by_state, by_head = torch.empty_like(states), torch.zeros_like(head)
        for part in _parts(states):
            logits = (states[part] @ head.T).float()
            log_sum = logits.logsumexp(-1)
            goal = target[part, None]
            each[part] = log_sum - logits.gather(1, goal)[:, 0]
            slope = logits.sub_(log_sum[:, None]).exp_()
            slope.scatter_add_(1, goal, slope.new_full(goal.shape, -1.0))
            slope = slope.mul_(weight[part, None]).to(head.dtype)
            by_state[part] = slope @ head
            by_head += slope.T @ states[part]
        ctx.save_for_backward(by_state, by_head)
        ctx.mark_non_differentiable(each)
        return (each * weight).sum(), each

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        by_state, by_head = ctx.saved_tensors
        return by_state * scale, by_head * scale, None, None


def head_loss(
    states: Tensor, head: Tensor, target: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of `weight [N]` times the loss of each position, and those losses [N], which carry no gradient.

    `states` [N,E] are normed, `head` is [V,E], `target` [N].
    """
    total, each = _HeadLoss.apply(states, head, target, weight)  # type: ignore[no-untyped-call]
    return total, each


class _HeadDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        by_state, by_head = torch.empty_like(states), torch.zeros_like(head)
        for part in _parts(states):
            want = (teacher[part] @ head.T).float().log_softmax(-1)
            found = (states[part] @ head.T).float().log_softmax(-1)
            odds = want.exp()
            total += (odds * want.sub_(found)).sum() / len(states)
            slope = found.exp_().sub_(odds).div_(len(states)).to(head.dtype)
            by_state[part] = slope @ head
            by_head += slope.T @ states[part]
        ctx.save_for_backward(by_state, by_head)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        by_state, by_head = ctx.saved_tensors
        return by_state * scale, by_head * scale, None


def head_distance(states: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
    """The mean KL(teacher, own) of what two sets of normed states [N,E] say by one head [V,E].

    The teacher's states get no gradient, and the head gets that of the own logits alone.
    """
    found: Tensor = _HeadDistance.apply(states, head, teacher.detach())  # type: ignore[no-untyped-call]
    return found
