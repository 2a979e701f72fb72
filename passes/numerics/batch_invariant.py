"""The logits of a token have the same bits for every number of tokens and rows in its call."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.errors import PassError
from accel.ir.invariants import Invariant
from accel.ir.ops.attention import attention
from accel.ir.ops.experts import expert_linear
from accel.ir.ops.quantized import quantized_expert_linear
from accel.ir.program import Program
from accel.ir.state import Part
from accel.passes import Report
from accel.passes.numerics import Base

WIDEST = 128  # head size whose products are never cut


@dataclass(frozen=True)
class BatchInvariant(Base):
    """A call of T tokens gives bit for bit the logits of T single-token calls, and a row of a batch those of the
    row alone.

    Kernels process rows in pairs, and a single remaining row differently (4-bit matmul, on some processors 8-bit
    matmul, attention with one query head per KV head). So every call has an even number of rows: the session
    pads an odd one. Variants of the step without this guarantee are not written.
    """

    stage = 3  # after methods of depth and prefill: it looks at what they leave
    relies = frozenset({Invariant.APPEND_ONLY, Invariant.BATCH_INVARIANCE})

    def run(self, program: Program) -> Report:
        if any(s.part is Part.RECURRENT for s in program.state):
            raise PassError(
                "batch-invariant: this model has recurrent state, which is summed in another order "
                "if several tokens share a call; build without the batch-invariant recipe"
            )
        if program.nodes(expert_linear.default, quantized_expert_linear.default):
            raise PassError(
                "batch-invariant: this model has experts, whose products are grouped by the number "
                "of tokens in a call; build without the batch-invariant recipe"
            )
        if program.facts.encoder is not None:
            raise PassError(
                "batch-invariant: cross-attention sums in an order that depends on the number "
                "of tokens in a call; build without the batch-invariant recipe"
            )
        if program.facts.adapters is not None:
            raise PassError(
                "batch-invariant: the products with adapters that sessions choose may sum in an order that depends on "
                "the number of tokens in a call; merge one adapter (merge_adapter), or build without the "
                "batch-invariant recipe"
            )
        nodes = program.nodes(attention.default, entry=program.step)
        if any(int(node.all_input_nodes[0].meta["val"].shape[3]) > WIDEST for node in nodes):
            raise PassError(
                f"batch-invariant: this model's heads are wider than {WIDEST}, and onnxruntime splits "
                "products of that length by the number of tokens in a call; build without the batch-invariant recipe"
            )
        return Report()
