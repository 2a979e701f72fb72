"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

import torch

from ...diffusion_case import entropies, whole


def bounded(gamma, by):
    """The longest beginning of an order whose entropies, but for the largest, sum to no more than gamma."""

    @whole
    def stays(sure, step, masks, memory, logits):
        h = entropies(logits, sure)
        top = logits.topk(2).values
        proxy = {"entropy": h, "confidence": -sure, "margin": top[:, 1] - top[:, 0]}[by]
        proxy = proxy.masked_fill(sure == -torch.inf, torch.inf)
        order = [i for i in proxy.sort(stable=True).indices.tolist() if sure[i] > -1]
        n = 1
        while n < len(order):
            some = h[order[: n + 1]]
            if some.sum() - some.max() > gamma:
                break
            n += 1
        return order[:n]

    return stays


CASES = [
    ({"gamma": gamma, "order": by}, bounded(gamma, by), None)
    for gamma, by in [(0.5, "entropy"), (1.5, "confidence"), (1.0, "margin")]
]
