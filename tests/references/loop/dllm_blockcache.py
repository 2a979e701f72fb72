"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

from ...diffusion_case import above

CASES = [({"threshold": 0.5}, above(0.5), None)]
