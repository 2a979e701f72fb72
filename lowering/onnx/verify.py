"""The written graph, run by ONNX Runtime, against the logits that the captured program gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
from torch import Tensor

from accel.ir.capture.examples import encoder_example, encoder_side, example
from accel.ir.errors import LoweringError, Miscompiled
from accel.ir.ops.quantized import PRODUCTS
from accel.ir.program import Program
from accel.ir.region import Entry
from accel.ir.state import output_of, state_of
from accel.lowering.onnx.native import is_native, register
from accel.lowering.onnx.rules.accel_ops import BLOCK
from accel.passes.calibrate import feeds
from accel.passes.check import rounding


def onnx_error(
    program: Program, file: Path, cases: list[tuple[Tensor, Tensor]], bound: float | None = None
) -> float:
    """The largest error over the cases (tokens [B,T], logits [B,T,V]), relative to the largest logit.

    Weights are read where they lie and nothing is kept for later, so this needs little memory beyond
    the file's: no packing, and what is stored in half precision is not widened for good. Weights of
    few bits are packed all the same, since onnxruntime computes otherwise where they are not.

    Where layers may be left out, one more call leaves out all of them, and the state is compared too.

    `bound`: by default 1e-3, more where products round their inputs (`passes.check.rounding`).

    Raises:
        LoweringError: ONNX Runtime refuses the graph, or computes something else.
    """
    session = _open(program, file)
    if bound is None:
        bound = max(1e-3, rounding(program))
    worst = 0.0
    for tokens, want in cases:
        got = torch.from_numpy(_logits(program, session, tokens))
        scale = max(1.0, float(want.abs().max()))
        off = float((got - want).abs().max()) / scale
        worst = max(worst, off if off == off else float("inf"))
    if program.facts.depth is not None:
        worst = max(worst, _left_out(program, session, cases[0][0]))
    return _held(worst, bound, file, "logit")


def _left_out(program: Program, session: ort.InferenceSession, tokens: Tensor) -> float:
    """The largest error of any output where every layer is left out, relative to the largest value."""
    given = feeds(program, "step", tokens)
    given["run_layers"] = torch.zeros_like(program.step.defaults["run_layers"])
    want = program.run("step", given)
    got = session.run(list(want), {name: value.numpy() for name, value in given.items()})
    errors = [0.0]
    for value, right in zip(got, want.values(), strict=True):
        off = (torch.from_numpy(value) - right).abs().double()
        errors.append(float(off.max()) / max(1.0, float(right.abs().max())) if off.numel() else 0.0)
    return max(e if e == e else float("inf") for e in errors)


def encode_error(program: Program, file: Path, bound: float = 1e-3) -> float:
    """The largest error of the encode entry's state, relative to the largest value of each.

    Raises:
        LoweringError: as `onnx_error`.
    """
    worst = 0.0
    given = encoder_example(program.facts.encoder, batch=2)
    want = program.run("encode", given)
    got = _open(program, file).run(
        list(want), {name: value.numpy() for name, value in given.items()}
    )
    for name, value in zip(want, got, strict=True):
        scale = max(1.0, float(want[name].abs().max()))
        off = float((torch.from_numpy(value) - want[name]).abs().max()) / scale
        worst = max(worst, off if off == off else float("inf"))
    return _held(worst, bound, file, "value")


def compress_error(program: Program, file: Path, bound: float = 1e-3) -> float:
    """The largest error of what the compress entry keeps of random keys and values, relative to the
    largest of each; the slots that it chooses must be the same.

    Raises:
        LoweringError: as `onnx_error`.
    """
    given = _random_inputs(program, program.entries["compress"])
    want = program.run("compress", given)
    got = _open(program, file).run(
        list(want), {name: value.numpy() for name, value in given.items()}
    )
    worst = 0.0
    for name, value in zip(want, got, strict=True):
        off = (torch.from_numpy(value).float() - want[name].float()).abs()
        if want[name].dtype is torch.int8:  # a number between two codes may go to either
            off = (off - 1).clamp(min=0)
        if want[name].dtype is torch.uint8:  # the same, of several codes in a byte
            off = (off > 0).float().mean() * 255
        scale = 1e-6 if state_of(name).endswith(".pos") else max(1.0, float(want[name].abs().max()))
        worst = max(worst, float(off.max()) / scale)
    return _held(worst, bound, file, "value")


def part_error(program: Program, file: Path) -> float:
    """The largest error of what any variant of a part of the step makes of random tokens, relative to
    the largest of each output.

    Raises:
        LoweringError: as `onnx_error`.
    """
    entry = program.entries[file.stem]
    tokens, positions = example(2, min(13, program.facts.max_context), program.facts.vocab_size, 7)
    given = {
        "tokens": tokens,
        "positions": positions,
        "slots": torch.zeros(2, dtype=torch.int64),
        "rows": positions[:, -1:],
        **{s.name: s.allocate(B=2, C=BLOCK) for s in program.state if s.name in entry.inputs},
    }
    if "stream" in entry.inputs:
        wide = int(entry.input("stream").meta["val"].shape[2])
        given["stream"] = torch.randn(
            2, tokens.shape[1], wide, generator=torch.Generator().manual_seed(0)
        )
    given = {n: v for n, v in given.items() if n in entry.inputs}
    found = program.run(file.stem, given)
    names = [n for n in ("scores", "stream", "logits") if n in found]
    worst = 0.0
    for path in sorted(file.parent.glob(f"{file.stem}*.onnx")):
        got = _open(program, path).run(names, {n: v.numpy() for n, v in given.items()})
        for name, value in zip(names, got, strict=True):
            off = float((torch.from_numpy(value) - found[name]).abs().max())
            off /= max(1.0, float(found[name].abs().max()))
            worst = max(worst, off if off == off else float("inf"))
    return _held(worst, max(1e-3, rounding(program)), file, "value")


def shift_error(program: Program, file: Path, bound: float = 1e-4) -> float:
    """The largest error of the shift entry on random keys that go forth and back.

    Raises:
        LoweringError: as `onnx_error`.
    """
    random = torch.Generator().manual_seed(0)
    given = {"delta": torch.tensor([[3, 3, 0], [-5, -5, 1]])}
    for holder in program.entries["shift"].graph.find_nodes(op="placeholder")[1:]:
        _, groups, _, width = holder.meta["val"].shape
        given[str(holder.target)] = torch.randn(2, int(groups), 3, int(width), generator=random)
    want = program.run("shift", given)
    got = _open(program, file).run(list(want), {n: v.numpy() for n, v in given.items()})
    off = [
        float((torch.from_numpy(a) - b).abs().max())
        for a, b in zip(got, want.values(), strict=True)
    ]
    return _held(max(off), bound, file, "key")


def commit_error(program: Program, file: Path) -> float:
    """The largest error of the entry `commit` over random state: it copies, so 0.

    Raises:
        LoweringError: as `onnx_error`.
    """
    random = torch.Generator().manual_seed(0)
    given = {
        "slots": torch.tensor([3, 0]),
        "path": torch.tensor([[0, 2, 3, 3], [0, 1, 2, 3]]),
        "positions": torch.tensor([[3, 4, 5, -1], [0, -1, -1, -1]]),
    }
    for state in program.state:
        if state.name in program.entries["commit"].inputs:
            blank = state.allocate(B=2, C=BLOCK)
            given[state.name] = torch.randint(-9, 9, blank.shape, generator=random).to(blank.dtype)
    want = program.run("commit", given)
    got = _open(program, file).run(list(want), {n: v.numpy() for n, v in given.items()})
    off = [bool((torch.from_numpy(a) != b).any()) for a, b in zip(got, want.values(), strict=True)]
    return _held(float(any(off)), 0.0, file, "value")


def segment_error(program: Program, file: Path) -> float:
    """The largest error of what any variant of the entry `sparse` writes and gives for random tokens over
    random keys and values, relative to the largest of each output. Where products or the cache round, a
    close choice of blocks may turn: there the median of the tokens counts.

    Raises:
        LoweringError: as `onnx_error`.
    """
    assert program.facts.prefill is not None and program.facts.prefill.segments is not None
    entry, plan = program.entries["sparse"], program.facts.prefill.segments
    start = -(-plan.threshold // plan.tokens) * plan.tokens
    width = min(5, program.facts.max_context - start)
    tokens, positions = example(1, width, program.facts.vocab_size, 7)
    given = {
        "tokens": tokens,
        "positions": positions + start,
        "slots": torch.full((1,), start),
        "rows": torch.zeros(1, 1, dtype=torch.int64),
        **_filled(program, entry, -(-(start + width) // BLOCK) * BLOCK),
    }
    given = {n: v for n, v in given.items() if n in entry.inputs}
    want = program.run("sparse", given)
    loose, worst = rounding(program), 0.0
    for path in sorted(file.parent.glob("sparse*.onnx")):
        got = _open(program, path).run(list(want), {n: v.numpy() for n, v in given.items()})
        for value, right in zip(got, want.values(), strict=True):
            right = right.float()
            each = (torch.from_numpy(value).float() - right).abs() / max(
                1.0, float(right.abs().max())
            )
            off = float(each.median() if loose else each.max()) if each.numel() else 0.0
            worst = max(worst, off if off == off else float("inf"))
    return _held(worst, max(1e-3, loose), file, "value")


def _filled(program: Program, entry: Entry, slots: int) -> dict[str, Tensor]:
    """State of one row whose `slots` hold random keys and values of as many tokens."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for state in program.state:
        if state.name not in entry.inputs:
            continue
        blank = state.allocate(B=1, C=slots)
        if state.role == "pos":
            found[state.name] = torch.arange(slots)[None]
        elif blank.dtype is torch.float32:
            found[state.name] = torch.randn(blank.shape, generator=generator).abs() + 0.1
            if state.role in ("k", "v"):
                found[state.name] = torch.randn(blank.shape, generator=generator)
        elif blank.dtype is torch.int8:
            found[state.name] = torch.randint(
                -127, 128, blank.shape, generator=generator, dtype=torch.int8
            )
        else:
            found[state.name] = blank
    return found


CHECKS = {  # what an entry's name begins with -> its check
    "encode": encode_error, "compress": compress_error, "filter": part_error, "prompt": part_error,
    "commit": commit_error, "shift": shift_error, "sparse": segment_error,
}  # fmt: skip


def _random_inputs(program: Program, entry: Entry) -> dict[str, Tensor]:
    """Of a compress entry: two rows, the second shorter, each head with some slots that are empty."""
    generator = torch.Generator().manual_seed(0)
    letters = {"B": 2, "C": 24, "W": 3} | {f"P{i}": 8 for i in range(len(program.facts.layers))}
    letters |= {f"Q{i}": 7 for i in range(len(program.facts.layers))}
    letters |= {f"N{i}": 9 for i in range(len(program.facts.layers))}
    if program.facts.kv is not None and (block := program.facts.kv.flush):
        letters |= {"C": 24 + 2 * block, "P": 3, "F": 2, "N": 4, "M": 5}
    found: dict[str, Tensor] = {}
    for holder in entry.graph.find_nodes(op="placeholder"):
        name, value = str(holder.target), holder.meta["val"]
        shape = [d if isinstance(d, int) else letters[program.dims[str(d)]] for d in value.shape]
        kind = name.partition(".")[0]
        if value.dtype is torch.float32:
            found[name] = (
                torch.randn(shape, generator=generator).abs()
                if kind == "mass"
                else torch.randn(shape, generator=generator)
            )
        elif value.dtype is torch.int8:
            found[name] = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        elif value.dtype is torch.uint8:
            found[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        elif value.dtype is torch.float16:
            found[name] = torch.rand(shape, generator=generator).half()
        elif kind == "fresh":
            found[name] = torch.arange(shape[0] * shape[1]).reshape(shape)
        elif kind == "places":  # old and new blocks; the second row has fewer
            found[name] = torch.tensor([[0, 1, 3, 4], [0, 3, -1, -1]])
        elif kind == "tail":
            found[name] = torch.tensor([[7, 8, 9, 10, 11], [3, 4, -1, -1, -1]])
        elif kind == "seen":
            found[name] = torch.tensor([30, 21])
        elif kind == "keep":
            found[name] = torch.tensor([9, 6])
        elif kind == "ranks":
            found[name] = torch.arange(shape[0])
        elif kind == "query_positions":
            found[name] = torch.tensor([[27, 28, 29], [-1, 19, 20]])
        elif name == "kv.pos":
            found[name] = torch.arange(8, 8 + shape[1]).repeat(2, 1)
        else:  # positions that were kept
            found[name] = torch.arange(shape[-1]).expand(shape).clone()
            found[name][:, 0, 6:] = -1
    return found


def _open(program: Program, file: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = options.enable_mem_reuse = False
    options.execution_order = (
        ort.ExecutionOrder.PRIORITY_BASED
    )  # or it would cast all weights first
    if not program.nodes(*PRODUCTS):  # which computes otherwise when it is not packed
        options.add_session_config_entry("session.disable_prepacking", "1")
    unwanted = []
    if any(program.params.blank(n).dtype is torch.float16 for n in program.params):
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        unwanted = ["ConstantFolding"]  # which the higher levels do all the same
    try:
        if is_native(file):
            register(options)
        return ort.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=unwanted
        )
    except Exception as error:  # onnxruntime's errors share no base class
        raise LoweringError(
            f"onnxruntime {ort.__version__} refuses {file.name}: {error}"
        ) from error


def _held(worst: float, bound: float, file: Path, what: str) -> float:
    """The error, where it is within its bound."""
    if worst > bound:
        raise Miscompiled(
            f"{file.name}, run by onnxruntime {ort.__version__}, differs from the model by {worst:.2e} of "
            f"the largest {what}, more than {bound:.0e}: report it with the model's configuration"
        )
    return worst


def _logits(program: Program, session: ort.InferenceSession, tokens: Tensor) -> npt.NDArray[Any]:
    """Logits [B,T,V] in one call; in three, the second padded, where state goes on from call to call."""
    batch, length = tokens.shape
    letters = {"B": batch, "C": -(-(length + 3) // BLOCK) * BLOCK}
    state = {s.name: s.allocate(**letters).numpy() for s in program.state if not s.cross}
    side = {name: value.numpy() for name, value in encoder_side(program, batch).items()}
    recurrent = any(s.role == "recurrent" for s in program.state)
    cuts = sorted({0, length // 2, length - 1, length}) if recurrent else [0, length]
    known = {i.name for i in session.get_inputs()}
    parts = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        pad = ((0, 0), (0, int(start > 0)))
        positions = np.tile(np.arange(start, end), (batch, 1))
        feeds = {
            "tokens": np.pad(tokens[:, start:end].numpy(), pad),
            "positions": np.pad(positions, pad, constant_values=-1),
            "slots": np.full(batch, start),
            "rows": positions - start,
            **side,
            **state,
        }
        names = ["logits", *map(output_of, state)] if recurrent else ["logits"]
        out = session.run(names, {k: v for k, v in feeds.items() if k in known})
        parts.append(out[0])
        state = dict(zip(state, out[1:], strict=True)) if recurrent else state
    return np.concatenate(parts, axis=1)
