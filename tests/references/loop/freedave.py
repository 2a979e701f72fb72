"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

from ...diffusion_case import surest

CASES = [({"drafts": 3}, surest(1), None)]
