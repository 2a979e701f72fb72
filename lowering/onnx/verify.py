"""The written graphs, run by ONNX Runtime, against what the program gives for the same inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from accel.ir.capture.examples import side_inputs
from accel.ir.entries import kind_of
from accel.ir.entries.step import STEP
from accel.ir.errors import LoweringError
from accel.ir.ops.quantized import PRODUCTS
from accel.ir.program import Program
from accel.ir.state import Part, state_of, writes_state
from accel.lowering.onnx.native import is_native, register
from accel.lowering.onnx.ort import ort
from accel.lowering.onnx.rules.accel_ops import BLOCK
from accel.lowering.onnx.threads import default_threads
from accel.passes.check import differs, rounding

Values = dict[str, Tensor]


@dataclass(frozen=True)
class _Case:
    """Inputs of calls, one after the other, and what they give together: tokens come second of its axes."""

    calls: Sequence[Values]
    want: Values


def entry_error(
    program: Program,
    name: str,
    files: Iterable[Path],
    cases: Sequence[tuple[Tensor, Tensor]] = (),
) -> float:
    """The largest error of any graph of an entry, relative to the largest value of each output.

    An entry is run on its example (`accel.ir.entries`), where all that it gives counts; the step on
    `cases` (tokens [B,T], logits [B,T,V]), which the captured module gave, and where layers may be left
    out, once without all of them. Where rounding may turn a choice, the median of the tokens counts.

    Weights are read where they lie and nothing is kept for later, so this needs little memory beyond
    the file's: no packing, and what is stored in half precision is not widened for good. Weights of
    few bits are packed all the same, since onnxruntime computes otherwise where they are not.

    Raises:
        Miscompiled: ONNX Runtime computes something else.
        LoweringError: it refuses the graph.
    """
    kind = kind_of(name)
    assert kind is not None and kind.error is not None
    loose = rounding(program) if kind.rounds else 0.0
    bound, worst = max(kind.error, loose), 0.0
    tried = list(_cases(program, name, cases))
    for file in files:
        session, found = _open(program, file), 0.0
        for case in tried:
            got = _run(session, case.calls, list(case.want))
            median = bool(loose) and kind.chooses
            errors = (_error(got[n], case.want[n], not bound, median) for n in case.want)
            found = max([found, *(e if e == e else float("inf") for e in errors)])
        if found > bound:
            raise differs(
                f"{file.name}, run by onnxruntime {ort.__version__}, differs from the model by {found:.2e} of "
                f"the largest value, more than {bound:.0e}",
                program,
            )
        worst = max(worst, found)
    return worst


def _cases(program: Program, name: str, cases: Sequence[tuple[Tensor, Tensor]]) -> Iterator[_Case]:
    """What an entry is run on."""
    if name == STEP.name:
        for tokens, logits in cases:
            yield _Case(_calls(program, tokens), {"logits": logits})
        if program.facts.depth is None:
            return
    kind = kind_of(name)
    assert kind is not None
    given = kind.example(program, name)
    if name == STEP.name:
        given["run_layers"] = torch.zeros_like(given["run_layers"])
    yield _Case([given], program.run(name, given))


def _calls(program: Program, tokens: Tensor) -> list[Values]:
    """Steps over tokens [B,T]: one, or three, the second padded, where state goes on from call to call."""
    batch, length = tokens.shape
    letters = {"B": batch, "C": -(-(length + 3) // BLOCK) * BLOCK}
    state = {s.name: s.allocate(**letters) for s in program.state if not s.cross}
    side = side_inputs(program, batch)
    recurrent = any(s.part is Part.RECURRENT for s in program.state)
    cuts = sorted({0, length // 2, length - 1, length}) if recurrent else [0, length]
    calls: list[Values] = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        pad = (0, int(start > 0))
        positions = torch.arange(start, end).repeat(batch, 1)
        calls.append(
            {
                "tokens": torch.nn.functional.pad(tokens[:, start:end], pad),
                "positions": torch.nn.functional.pad(positions, pad, value=-1),
                "slots": torch.full((batch,), start),
                "rows": positions - start,
                **side,
                **state,
            }
        )
    return calls


def _run(session: ort.InferenceSession, calls: Sequence[Values], names: Sequence[str]) -> Values:
    """What a graph gives in these calls; the state that one leaves is what the next reads."""
    known = {i.name for i in (*session.get_inputs(), *session.get_overridable_initializers())}
    carried = [o.name for o in session.get_outputs() if writes_state(o.name)]
    carried = carried if len(calls) > 1 else []
    state: dict[str, npt.NDArray[Any]] = {}
    parts: list[list[Tensor]] = []
    for given in calls:
        feeds = {n: v.numpy() for n, v in given.items() if n in known} | state
        out = session.run([*names, *carried], feeds)
        state = {state_of(n): a for n, a in zip(carried, out[len(names) :], strict=True)}
        parts.append([torch.from_numpy(a) for a in out[: len(names)]])
    if len(parts) == 1:
        return dict(zip(names, parts[0], strict=True))
    return {n: torch.cat(p, dim=1) for n, p in zip(names, zip(*parts, strict=True), strict=True)}


def _error(got: Tensor, want: Tensor, exact: bool, median: bool) -> float:
    """How far one output is off; a whole number, such as a position, by 1 or not at all. No number is as none is."""
    dtype = want.dtype
    if not want.numel():
        return 0.0
    if exact or dtype is torch.int64:
        return float((got != want).any())
    got, want = got.float(), want.float()
    off = torch.where(got.isnan() & want.isnan(), 0.0, (got - want).abs())
    if dtype is torch.int8:  # a number between two codes may go to either
        off = (off - 1).clamp(min=0)
    if dtype is torch.uint8:  # the same, of several codes in a byte
        off = (off > 0).float().mean() * 255
    off = off / max(1.0, float(want.nan_to_num(0.0).abs().max()))
    return float(off.median() if median else off.max())


def _open(program: Program, file: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = default_threads()
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
