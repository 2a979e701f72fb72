"""Recurrences in ONNX: one form for T = 1 and T = n; padded tokens leave the state as it was."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from onnx import TensorProto, ValueInfoProto, helper

from accel.ir.ops import recurrence
from accel.lowering.onnx.writer.builder import MICROSOFT, Builder
from accel.lowering.onnx.writer.table import lower

_END = 2**63 - 1
Step = tuple[str, list[str], str]  # operator, inputs, output


def _real(b: Builder, positions: str) -> str:
    """Whether each token is one: [B,T,1] bool."""
    known = b.node("GreaterOrEqual", positions, b.constant(0, torch.int64))
    return str(b.node("Unsqueeze", known, b.ints(2)))


def _masked(b: Builder, x: str, positions: str) -> str:
    """x [B,T,E], and 0 at padding."""
    return str(b.node("Where", _real(b, positions), x, b.constant(0.0, torch.float32)))


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


Rows = Sequence[tuple[str, str, tuple[int, ...]]]  # value [B,T,...], its name in a body, [...]


def _scan(b: Builder, state: Rows, rows: Rows, steps: list[Step], y: str, width: int) -> list[str]:
    """A Scan over the tokens. The state `x` [B,...] becomes `x.after`; returns it, then y [B,T,E].

    Rows are numbers, but for the one named `real`.
    """

    def info(name: str, shape: tuple[int, ...]) -> ValueInfoProto:
        kind = TensorProto.BOOL if name == "real" else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, ["B", *shape])

    body = helper.make_graph(
        [helper.make_node(op, inputs, [made], name=made) for op, inputs, made in steps],
        "scan",
        [info(name, shape) for _, name, shape in (*state, *rows)],
        [*(info(f"{name}.after", shape) for _, name, shape in state), info(y, (width,))],
    )
    found: tuple[str, ...] = b.node(
        "Scan", *(value for value, _, _ in (*state, *rows)), outputs=len(state) + 1, body=body,
        num_scan_inputs=len(rows), scan_input_axes=[1] * len(rows), scan_output_axes=[1],
    )  # fmt: skip
    return list(found)


@lower(recurrence.selective_scan.default)
def selective_scan(
    b: Builder,
    x: str,
    step: str,
    a: str,
    b_: str | None,
    c: str | None,
    state: str,
    positions: str,
) -> tuple[str, str]:
    """[N,E] products per token, whose last axis is long."""
    size, width = (int(d) for d in b.shape(a))
    one, two = b.ints(1), b.ints(2)
    rows = [
        (_masked(b, x, positions), "scan.x", (width,)),
        (_masked(b, step, positions), "scan.step", (width,)),
    ]
    steps: list[Step] = [
        ("Unsqueeze", ["scan.step", one], "scan.step1"),
        ("Mul", [b.use(a), "scan.step1"], "scan.rate"),
        ("Exp", ["scan.rate"], "scan.decay"),
        ("Mul", ["scan.state", "scan.decay"], "scan.kept"),
        ("Unsqueeze", ["scan.x", one], "scan.x1"),
    ]
    new, y = "scan.x1", "scan.state.after"
    if b_ is not None:
        rows.append((b_, "scan.b", (size,)))
        steps += [("Unsqueeze", ["scan.b", two], "scan.b1")]
        steps += [("Mul", ["scan.x1", "scan.b1"], "scan.new")]
        new = "scan.new"
    steps += [("Add", ["scan.kept", new], "scan.state.after")]
    if c is not None:
        rows.append((c, "scan.c", (size,)))
        steps += [("Unsqueeze", ["scan.c", one], "scan.c1")]
        steps += [("MatMul", ["scan.c1", "scan.state.after"], "scan.y1")]
        y = "scan.y1"
    steps += [("Squeeze", [y, one], "scan.y")]
    held = [(state, "scan.state", (size, width))]
    after, out = _scan(b, held, rows, steps, "scan.y", width)
    return out, after


@lower(recurrence.wkv.default)
def wkv(
    b: Builder, k: str, v: str, decay: str, first: str, state: str, positions: str
) -> tuple[str, str]:
    """Everything as [B,1,E] inside: the three parts of the state lie side by side."""
    width = int(b.shape(k)[2])
    one, two = b.ints(1), b.ints(2)
    parts = [b.node("Slice", state, b.ints(i), b.ints(i + 1), one) for i in range(3)]
    rows = [
        (b.node("Unsqueeze", k, two), "wkv.k", (1, width)),
        (b.node("Unsqueeze", v, two), "wkv.v", (1, width)),
        (b.node("Unsqueeze", _real(b, positions), two), "real", (1, 1)),
    ]
    names = ("wkv.total", "wkv.weight", "wkv.peak")
    zero = b.constant(0.0, torch.float32)
    lowest = b.constant(torch.finfo(torch.float32).min / 2, torch.float32)

    def mean(peak: str, key: str, to: str) -> list[Step]:
        """The state's sums and one more token, divided by exp of the larger exponent."""
        return [
            ("Max", [peak, key], f"{to}.top"),
            ("Sub", [peak, f"{to}.top"], f"{to}.a"),
            ("Exp", [f"{to}.a"], f"{to}.old"),
            ("Sub", [key, f"{to}.top"], f"{to}.b"),
            ("Exp", [f"{to}.b"], f"{to}.new"),
            ("Mul", [f"{to}.old", "wkv.total"], f"{to}.c"),
            ("Mul", [f"{to}.new", "wkv.v"], f"{to}.d"),
            ("Add", [f"{to}.c", f"{to}.d"], f"{to}.total"),
            ("Mul", [f"{to}.old", "wkv.weight"], f"{to}.e"),
            ("Add", [f"{to}.e", f"{to}.new"], f"{to}.weight"),
        ]

    steps: list[Step] = [
        ("Equal", ["wkv.weight", zero], "wkv.empty"),
        ("Where", ["wkv.empty", lowest, "wkv.peak"], "wkv.start"),
        ("Add", ["wkv.k", b.use(first)], "wkv.here"),
        *mean("wkv.start", "wkv.here", "out"),
        ("Div", ["out.total", "out.weight"], "wkv.y1"),
        ("Squeeze", ["wkv.y1", one], "wkv.y"),
        ("Add", ["wkv.start", b.use(decay)], "wkv.later"),
        *mean("wkv.later", "wkv.k", "next"),
        *(
            ("Where", ["real", f"next.{n}", f"wkv.{o}"], f"wkv.{o}.after")
            for n, o in (("total", "total"), ("weight", "weight"), ("top", "peak"))
        ),
    ]
    held = [(part, name, (1, width)) for part, name in zip(parts, names, strict=True)]
    *after, y = _scan(b, held, rows, steps, "wkv.y", width)
    return y, b.node("Concat", *after, axis=1)


@lower(recurrence.running_peak.default)
def running_peak(
    b: Builder, x: str, decay: str, state: str, positions: str
) -> tuple[str, str, str]:
    width = int(b.shape(x)[2])
    lowest = b.constant(torch.finfo(torch.float32).min, torch.float32)
    rows = [
        (b.node("Where", _real(b, positions), x, lowest), "peak.x", (width,)),
        (_masked(b, decay, positions), "peak.decay", (width,)),
    ]
    steps: list[Step] = [
        ("Add", ["peak.state", "peak.decay"], "peak.kept"),
        ("Max", ["peak.kept", "peak.x"], "peak.state.after"),
        ("Identity", ["peak.state"], "peak.before"),
    ]
    held = [(state, "peak.state", (width,))]
    after, before = _scan(b, held, rows, steps, "peak.before", width)
    later = b.node("Slice", before, b.ints(1), b.ints(_END), b.ints(1))
    last = b.node("Unsqueeze", after, b.ints(1))
    return b.node("Concat", later, last, axis=1), before, after


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
    if len(b.shape(decay)) == 4:
        decay = b.node("Reshape", decay, b.ints(0, 0, -1))
    y, after = b.node(
        "LinearAttention", *flat, state, _masked(b, decay, positions), beta,
        domain=MICROSOFT, outputs=2, q_num_heads=int(b.shape(q)[2]), kv_num_heads=heads,
        scale=1.0, update_rule="gated" if beta is None else "gated_delta",
    )  # fmt: skip
    return b.node("Reshape", y, b.ints(0, 0, heads, width)), after


@lower(recurrence.dplr_attention.default)
def dplr_attention(
    b: Builder,
    q: str,
    k: str,
    v: str,
    decay: str,
    erase: str,
    write: str,
    state: str,
    positions: str,
) -> tuple[str, str]:
    """Rows as [B,H,1,D] and columns as [B,H,D,1] inside."""
    heads, width, value = (int(b.shape(q)[2]), int(b.shape(q)[3]), int(b.shape(v)[3]))

    def real(x: str) -> str:
        return _masked(b, b.node("Reshape", x, b.ints(0, 0, -1)), positions)

    def column(x: str) -> str:
        return str(b.node("Reshape", x, b.ints(0, 0, heads, width, 1)))

    def row(x: str, size: int) -> str:
        return str(b.node("Reshape", x, b.ints(0, 0, heads, 1, size)))

    rows = [
        (row(q, width), "dplr.q", (heads, 1, width)),
        (row(erase, width), "dplr.erase", (heads, 1, width)),
        (row(v, value), "dplr.v", (heads, 1, value)),
        (column(real(k)), "dplr.k", (heads, width, 1)),
        (column(real(write)), "dplr.write", (heads, width, 1)),
        (column(b.node("Exp", real(decay))), "dplr.rate", (heads, width, 1)),
    ]
    steps: list[Step] = [
        ("MatMul", ["dplr.erase", "dplr.state"], "dplr.found"),
        ("Mul", ["dplr.state", "dplr.rate"], "dplr.kept"),
        ("Mul", ["dplr.write", "dplr.found"], "dplr.changed"),
        ("Mul", ["dplr.k", "dplr.v"], "dplr.new"),
        ("Add", ["dplr.kept", "dplr.changed"], "dplr.old"),
        ("Add", ["dplr.old", "dplr.new"], "dplr.state.after"),
        ("MatMul", ["dplr.q", "dplr.state.after"], "dplr.y1"),
        ("Reshape", ["dplr.y1", b.ints(0, -1)], "dplr.y"),
    ]
    held = [(state, "dplr.state", (heads, width, value))]
    after, y = _scan(b, held, rows, steps, "dplr.y", heads * value)
    return b.node("Reshape", y, b.ints(0, 0, heads, value)), after
