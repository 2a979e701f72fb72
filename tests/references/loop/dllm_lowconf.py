"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

from ...diffusion_case import surest

CASES = [({}, surest(1), None), ({"steps": 4}, surest(2), None)]
