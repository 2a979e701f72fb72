"""The written graphs, run by ONNX Runtime, against what the program gives for the same inputs.

Where products of few bits round their inputs, two right roundings differ by as much as each differs from none. So a
graph of onnxruntime's products is run once with their inputs as they are, which shows any mistake in bytes, scales,
offsets and wiring; and every graph as it is, which may be as noisy as the reference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
import torch
from torch import Tensor, fx

from accel.ir.capture.examples import side_inputs
from accel.ir.entries import kind_of
from accel.ir.entries.step import STEP
from accel.ir.errors import LoweringError
from accel.ir.ops.op import operand_of
from accel.ir.ops.quantized import PRODUCTS
from accel.ir.program import Program
from accel.ir.state import Part, state_of, writes_state
from accel.ir.ties import TOPK
from accel.ir.weights import Stored, composed
from accel.lowering.onnx.native import is_native, register
from accel.lowering.onnx.ort import ort
from accel.lowering.onnx.rules.accel_ops import BLOCK
from accel.lowering.onnx.threads import default_threads
from accel.passes.check import (
    NOISE,
    codes_slack,
    codes_turn,
    differs,
    noise,
    nudge,
    nudged,
    quantile,
)  # fmt: skip
from accel.passes.exact import exact

Values = dict[str, Tensor]
_FOLDER = "session.model_external_initializers_file_folder_path"
_FLOAT32 = 1  # the accuracy level of MatMulNBits at which inputs are not rounded


@dataclass(frozen=True)
class _Case:
    """Inputs of calls, one after the other, and what they give together, tokens come second of its axes: with nothing
    rounded on the way, and as the reference rounds inputs of products, where any does.
    """

    calls: Sequence[Values]
    want: Values
    rounded: Values | None = None


def entry_error(
    program: Program,
    name: str,
    files: Iterable[Path],
    cases: Sequence[tuple[Tensor, Tensor]] = (),
    rounded: Sequence[Tensor] = (),
) -> float:
    """The largest error of any graph of an entry, relative to the largest value of each output; of accel's own
    operators, which always round, that of nine tokens in ten.

    An entry is run on its example (`accel.ir.entries`), where all that it gives counts; the step on
    `cases` (tokens [B,T], logits [B,T,V] with nothing rounded) with their `rounded` logits, as `NumericCheck` has them,
    and where layers may be left out, once without all of them.

    Weights are read where they lie and nothing is kept for later, so this needs little memory beyond
    the file's: no packing, and what is stored in half precision is not widened for good. Weights of
    few bits are packed all the same, since onnxruntime computes otherwise where they are not.

    Raises:
        Miscompiled: ONNX Runtime computes something else.
        LoweringError: it refuses the graph.
    """
    kind = kind_of(name)
    assert kind is not None and kind.error is not None
    slack = codes_slack(program) if kind.rounds else 0.0
    noisy = kind.rounds and bool(program.nodes(*PRODUCTS))
    chooses = kind.chooses or bool(program.nodes(TOPK))
    bound, worst = max(kind.error, slack), 0.0
    share = (0.5 if chooses else 0.9) if slack else 1.0
    tried = list(_cases(program, name, cases, rounded if noisy else None))
    for file in files:
        errors = []
        if not noisy or not is_native(file):
            session = _open(program, file, exact=noisy)
            errors = [e for case in tried for e in _errors(session, case, not bound)]
            del session  # before the next one is opened
        found = max((quantile(e[e != 0], share) for e in errors), default=0.0)
        if found > bound and codes_turn(program):
            bound = max(bound, _moved(program, name, tried, 0.9 if slack else 1.0))
        if found > bound:
            raise differs(
                f"{_ran(file)} by {found:.2e} of the largest value, more than {bound:g}", program
            )
        if noisy:
            loud = _noise(_open(program, file), file, tried, chooses, program)
            found = found if errors else loud
        worst = max(worst, found)
    return worst


def _moved(program: Program, name: str, tried: Sequence[_Case], share: float) -> float:
    """What is left of the last places of an entry's inputs and of the model's vectors, relative to the largest value
    of an output: where codes of one layer go by what those of another one stand for, that may be a step of them.
    """
    worst = 0.0
    for given, case in [(case.calls[0], case) for case in tried if len(case.calls) == 1]:
        near = {n: nudge(v) if v.is_floating_point() else v for n, v in given.items()}
        got = nudged(exact(program)).run(name, near)
        errors = [_rows(got[n], want) for n, want in case.want.items()]
        worst = max([worst, *(quantile(e[e != 0], share) for e in errors)])
    return NOISE * worst


def _ran(file: Path) -> str:
    return f"{file.name}, run by onnxruntime {ort.__version__}, differs from the model"


def _noise(
    session: ort.InferenceSession,
    file: Path,
    tried: Sequence[_Case],
    chooses: bool,
    program: Program,
) -> float:
    """The error of nine tokens in ten of a graph that rounds. Raises Miscompiled where it is noisier than the
    reference.
    """
    worst = 0.0
    for case in tried:
        assert case.rounded is not None
        for name, got in _run(session, case.calls, list(case.want)).items():
            want = case.want[name]
            errors, own = _rows(got, want), _rows(case.rounded[name], want)
            moved = (errors != 0) | (own != 0)  # not the slots that nothing was written to
            errors, own = errors[moved], own[moved]
            if over := noise(errors, own, chooses):
                raise differs(
                    f"{_ran(file)} more than the reference does, which rounds likewise: {name} by {over[0]:.2e} of "
                    f"the largest value, where {over[1]:.2e} is allowed",
                    program,
                )
            worst = max(worst, quantile(errors, 0.9))
    return worst


def _errors(session: ort.InferenceSession, case: _Case, equal: bool) -> list[Tensor]:
    """Of each output, the errors [n] of its rows."""
    got = _run(session, case.calls, list(case.want))
    return [_rows(got[n], want, equal) for n, want in case.want.items()]


def _cases(
    program: Program,
    name: str,
    cases: Sequence[tuple[Tensor, Tensor]],
    rounded: Sequence[Tensor] | None,
) -> Iterator[_Case]:
    """What an entry is run on. `rounded`: none where no product of few bits is in it."""
    plans: Collection[str] = ()
    if name == STEP.name:
        for i, (tokens, logits) in enumerate(cases):
            also = None if rounded is None else {"logits": rounded[i]}
            yield _Case(_calls(program, tokens), {"logits": logits}, also)
        if program.facts.depth is None:
            return
        plans = program.facts.depth.plans
    kind = kind_of(name)
    assert kind is not None
    given = kind.example(program, name)
    given |= {n: torch.zeros_like(given[n]) for n in plans}
    also = None if rounded is None else program.run(name, given)
    yield _Case(
        [given], exact(program).run(name, given) if also else program.run(name, given), also
    )


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


def _rows(got: Tensor, want: Tensor, equal: bool = False) -> Tensor:
    """How far each row of one output is off, relative to its largest value (at least 1); a whole number, such as a
    position, by 1 or not at all, and where all must be `equal`, any. NaN equals NaN.
    """
    dtype = want.dtype
    if not want.numel():
        return torch.zeros(0)
    if equal or dtype is torch.int64:
        return (got != want).float().flatten()
    got, want = got.float(), want.float()
    off = torch.where(got.isnan() & want.isnan(), 0.0, (got - want).abs())
    if dtype is torch.int8:  # a number between two codes may go to either
        off = (off - 1).clamp(min=0)
    if dtype is torch.uint8:  # the same, of several codes in a byte
        return ((off > 0).float().mean() * 255 / max(1.0, float(want.max()))).reshape(1)
    off = off / max(1.0, float(want.nan_to_num(0.0).abs().max()))
    return off.amax(-1).flatten() if off.dim() else off.reshape(1)


def _scales(program: Program) -> Iterator[Stored]:
    """Those of the products of few bits."""
    for node in program.nodes(*PRODUCTS):
        if isinstance(scales := operand_of(node, "scales"), fx.Node) and scales.op == "get_attr":
            yield program.params.stored(str(scales.target))


def _computed(scales: Stored) -> bool:
    """Whether nodes make them of constants: MatMulNBits computes otherwise where nobody has done so before."""
    return composed(scales) is not None or scales.blank.dtype is not torch.float32


def _open(program: Program, file: Path, exact: bool = False) -> ort.InferenceSession:
    """A session of a graph; `exact`: products of few bits take their inputs as they are."""
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
    half = any(program.params.blank(n).dtype is torch.float16 for n in program.params)
    if half and not any(map(_computed, _scales(program))):
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        unwanted = ["ConstantFolding"]  # which the higher levels do all the same
    try:
        if is_native(file):
            register(options)
        model: str | bytes = str(file)
        if exact:
            model = _exact_model(file)
            options.add_session_config_entry(_FOLDER, str(file.parent))
        return ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=unwanted
        )
    except Exception as error:  # onnxruntime's errors share no base class
        raise LoweringError(
            f"onnxruntime {ort.__version__} refuses {file.name}: {error}"
        ) from error


def _exact_model(file: Path) -> bytes:
    """A graph whose products of few bits compute in float32, at whatever cost; its weights stay where they lie."""
    model = onnx.load(str(file), load_external_data=False)
    graphs = [model.graph, *model.functions]
    while graphs:
        for node in graphs.pop().node:
            for attribute in node.attribute:
                if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                    attribute.i = _FLOAT32
                if attribute.HasField("g"):
                    graphs.append(attribute.g)
                graphs.extend(attribute.graphs)
    found: bytes = model.SerializeToString()
    return found
