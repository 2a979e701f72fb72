"""Recurrences in ONNX: one form for T = 1 and T = n; padded tokens leave the state as it was."""

from __future__ import annotations

import torch
from onnx import GraphProto, TensorProto, helper

from accel.ir.ops import recurrence
from accel.lowering.onnx.builder import MICROSOFT, Builder
from accel.lowering.onnx.table import lower

_ZERO = 0.0


def _real(b: Builder, positions: str) -> str:
    """Whether each token is one: [B,T,1] bool."""
    known = b.node("GreaterOrEqual", positions, b.constant(0, torch.int64))
    return str(b.node("Unsqueeze", known, b.ints(2)))


def _masked(b: Builder, x: str, positions: str) -> str:
    """x [B,T,E], and 0 at padding."""
    return str(b.node("Where", _real(b, positions), x, b.constant(_ZERO, torch.float32)))


@lower(recurrence.causal_conv.default)
def causal_conv(
    b: Builder, x: str, weight: str, bias: str | None, state: str, positions: str
) -> tuple[str, str]:
    kernel = b.node("Unsqueeze", weight, b.ints(1))  # [E,1,K]
    y, _ = b.node(
        "CausalConvWithState", x, kernel, bias, state,
        domain=MICROSOFT, outputs=2, channels_last=1,
    )  # fmt: skip
    seen = b.node("Concat", state, x, axis=1)  # [B,K-1+T,E]
    real = b.cast(_real(b, positions), torch.int64)
    count = b.node("ReduceSum", real, b.ints(1), keepdims=1)  # [B,1,1]
    taps = int(b.shape(weight)[1])
    last = b.node("Add", count, b.constant([[[i] for i in range(taps - 1)]], torch.int64))
    return y, b.node("GatherND", seen, last, batch_dims=1)


@lower(recurrence.selective_scan.default)
def selective_scan(
    b: Builder, x: str, step: str, a: str, b_: str, c: str, state: str, positions: str
) -> tuple[str, str]:
    """A Scan over the tokens: [N,E] products per token, whose last axis is long."""
    decay = b.use(a)
    size, width = (int(d) for d in b.shape(a))
    given = (_masked(b, x, positions), _masked(b, step, positions), b_, c)
    after, y = b.node(
        "Scan", state, *given, outputs=2, num_scan_inputs=4,
        scan_input_axes=[1] * 4, scan_output_axes=[1],
        body=_scan_body(decay, b.ints(1), b.ints(2), size, width),
    )  # fmt: skip
    return y, after


def _scan_body(decay: str, one: str, two: str, size: int, width: int) -> GraphProto:
    """state [B,N,E], x and step [B,E], b and c [B,N] -> the state after the token, y [B,E]."""
    steps = [
        ("Unsqueeze", ["scan.step", one], "scan.step1"),
        ("Mul", [decay, "scan.step1"], "scan.rate"),
        ("Exp", ["scan.rate"], "scan.decay"),
        ("Mul", ["scan.state", "scan.decay"], "scan.kept"),
        ("Unsqueeze", ["scan.x", one], "scan.x1"),
        ("Unsqueeze", ["scan.b", two], "scan.b1"),
        ("Mul", ["scan.x1", "scan.b1"], "scan.new"),
        ("Add", ["scan.kept", "scan.new"], "scan.next"),
        ("Unsqueeze", ["scan.c", one], "scan.c1"),
        ("MatMul", ["scan.c1", "scan.next"], "scan.y1"),
        ("Squeeze", ["scan.y1", one], "scan.y"),
    ]

    def info(name: str, *shape: int) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", *shape])

    rows = [info(f"scan.{n}", width) for n in ("x", "step")]
    rows += [info(f"scan.{n}", size) for n in ("b", "c")]
    return helper.make_graph(
        [helper.make_node(op, inputs, [out], name=out) for op, inputs, out in steps],
        "scan",
        [info("scan.state", size, width), *rows],
        [info("scan.next", size, width), info("scan.y", width)],
    )


@lower(recurrence.linear_attention.default)
def linear_attention(
    b: Builder,
    q: str,
    k: str,
    v: str,
    decay: str,
    beta: str | None,
    state: str,
    positions: str,
) -> tuple[str, str]:
    heads, width = int(b.shape(v)[2]), int(b.shape(v)[3])
    flat = [b.node("Reshape", x, b.ints(0, 0, -1)) for x in (q, k, v)]  # [B,T,H·D]
    if beta is None:
        flat[2] = _masked(b, flat[2], positions)
    else:
        beta = _masked(b, beta, positions)
    y, after = b.node(
        "LinearAttention", *flat, state, _masked(b, decay, positions), beta,
        domain=MICROSOFT, outputs=2, q_num_heads=int(b.shape(q)[2]), kv_num_heads=heads,
        scale=1.0, update_rule="gated" if beta is None else "gated_delta",
    )  # fmt: skip
    return b.node("Reshape", y, b.ints(0, 0, heads, width)), after
