"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

import numpy as np
import torch

from ...diffusion_case import entropies, whole


def scheduled(by, steps=None, end=1e-3):
    """As many of the masks as the time from one step to the next says; of those steps that fill some."""

    @whole
    def stays(sure, step, masks, memory, logits):
        times = np.linspace(1, end, (steps or masks) + 1)
        counts, left, i = [], masks, 0
        while left:  # what every step of the block fills, by the published loop
            n = left if i + 1 >= len(times) - 1 else int(left * (1 - times[i + 1] / times[i]))
            counts += [n] if n else []
            left, i = left - n, i + 1
        top = logits.topk(2).values
        score = {
            "entropy": -entropies(logits, sure), "margin": top[:, 0] - top[:, 1], "confidence": sure,
        }[by]  # fmt: skip
        score = score.masked_fill(sure == -torch.inf, -torch.inf)
        return score.sort(descending=True, stable=True).indices[: counts[step]].tolist()

    return stays


CASES = [
    ({"order": "entropy"}, scheduled("entropy"), None),
    ({"order": "margin", "steps": 4}, scheduled("margin", 4), None),
    ({"order": "confidence", "steps": 11, "end": 0.1}, scheduled("confidence", 11, 0.1), None),
]
