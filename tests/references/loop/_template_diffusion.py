"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once). Write the
published rule here, not by the loop's own code.
"""

from ...diffusion_case import surest

CASES = [({}, surest(1), None)]
