"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

from ...diffusion_case import surest


def prophetic(early, middle, late):
    """Whether the lead of the best token over the next is large enough for the part that is done."""
    return lambda lead, done: bool(
        lead.mean() >= (early if done < 0.33 else middle if done < 0.67 else late)
    )


CASES = [
    ({"early": 1.0, "middle": 2.0, "late": 3.0}, surest(1), prophetic(1.0, 2.0, 3.0)),
    ({"early": 9.0, "middle": 3.5, "late": 2.5}, surest(1), prophetic(9.0, 3.5, 2.5)),
]
