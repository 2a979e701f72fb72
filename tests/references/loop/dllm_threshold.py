"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

from ...diffusion_case import above, by_factor

CASES = [({"threshold": 0.5}, above(0.5), None), ({"factor": 1.5}, by_factor(1.5), None)]
