"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

import math

from ...diffusion_case import surest, whole

ANSWER = 21  # slots of the answers that the law decodes


def falling(least, aggregate, patience=None, most=0.0):
    """Whether the leads are large enough for the steps that are done, and the tokens were steady for long enough."""

    @whole
    def early(lead, done, memory, slots, tokens):
        before, now = memory.get("tokens", {}), dict(zip(slots, tokens, strict=True))
        changed = sum(before.get(slot) != token for slot, token in now.items()) / len(now)
        memory["steady"] = memory.get("steady", 0) + 1 if changed <= most else 0
        memory["tokens"] = now
        steady = patience is None or memory["steady"] > patience
        return steady and float(aggregate(lead)) >= least(done * ANSWER / (ANSWER - 1))

    return early


CASES = [
    (
        {"high": 9.0, "low": 1.0, "patience": -1},
        surest(1), falling(lambda t: 9 - 8 * t, lambda x: x.mean()),
    ),
    (
        {"high": 8.0, "low": 0.5, "schedule": "cosine", "over": "least", "patience": -1},
        surest(1), falling(lambda t: 0.5 + 3.75 * (1 + math.cos(math.pi * t)), lambda x: x.min()),
    ),
    (
        {"high": 6.0, "low": 0.5, "schedule": "exponential", "rate": 3.0, "most_changed": 0.3},
        surest(1), falling(lambda t: 0.5 + 5.5 * math.exp(-3 * t), lambda x: x.mean(), 0, 0.3),
    ),
]  # fmt: skip
