"""Opening a graph with ONNX Runtime on the CPU: its options, and what the graph must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import ArtifactError
from accel.ir.facts import Facts
from accel.ir.sizes import in_numbers
from accel.ir.state import StateValue
from accel.lowering.onnx.native import is_native, register
from accel.lowering.onnx.ort import ort
from accel.runtime.artifact.artifact import Artifact
from accel.runtime.backends.layer_inputs import everything
from accel.runtime.inputs.ints import Ints

_ORT_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "float64": "tensor(double)",
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "int8": "tensor(int8)",
    "uint8": "tensor(uint8)",
    "bool": "tensor(bool)",
}


def open_session(path: Path, threads: int, spinning: bool = True, resting: bool = False) -> Any:
    """An onnxruntime.InferenceSession over a graph file, its weights packed. Raises ArtifactError.

    spinning: its threads wait busily during a call, and a while after it unless it is `resting`.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # planning which values share memory grows with the square of the layers; all are freed in time anyway
    options.enable_mem_reuse = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    if resting:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        if is_native(path):
            register(options)
        return ort.InferenceSession(
            str(path), sess_options=options, providers=["CPUExecutionProvider"]
        )
    except OSError as error:  # of the operators: it says what to do
        raise ArtifactError(f"{path} needs accel's own operators: {error}") from error
    except Exception as error:  # onnxruntime raises a dozen classes without a common base
        raise ArtifactError(
            f"{path}: onnxruntime {ort.__version__} cannot open it: {error}. "
            "Build the artifact again, or upgrade onnxruntime"
        ) from error


def aligned(shape: tuple[int, ...], dtype: str, fill: float | None = None) -> npt.NDArray[Any]:
    """An array on a 64-byte boundary (vector loads of its rows never straddle lines); filled, or
    not.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = np.empty(size + 64, np.uint8) if fill != 0 else np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(kind).reshape(shape)
    if fill:
        array.fill(fill)
    return array


def grown(
    old: npt.NDArray[Any] | None, value: StateValue, letters: dict[str, int]
) -> npt.NDArray[Any]:
    """A state buffer that starts as `old` and goes on with the value's fill."""
    shape = in_numbers(value.shape, letters)
    new = aligned(shape, value.dtype, value.fill)
    if old is not None:
        new[tuple(slice(n) for n in old.shape)] = old
    return new


def copied(
    state: tuple[StateValue, ...], buffers: dict[str, npt.NDArray[Any]], rows: Ints | None
) -> dict[str, npt.NDArray[Any]]:
    """State buffers of their own: of all rows, which share what is never written in place, or of `rows` [n]."""
    found = dict(buffers)
    for value in state:
        if value.name in buffers and not value.pooled and not (value.kept and rows is None):
            old = buffers[value.name]
            count = len(old) if rows is None else rows.size
            found[value.name] = aligned((count, *old.shape[1:]), old.dtype.name)
            np.copyto(found[value.name], old if rows is None else old[rows])
    return found


def check_state(session: Any, state: tuple[StateValue, ...], path: Path) -> None:
    """The manifest's state must be what the graph takes: names, types, fixed sizes. Raises
    ArtifactError.
    """
    inputs = {i.name: i for i in session.get_inputs()}
    outputs = {o.name for o in session.get_outputs()}
    wanted = {"tokens", "positions", "slots", "rows", *(v.name for v in state)}
    written = {v.output for v in state if not v.cross and not v.kept}
    missing = sorted((wanted ^ inputs.keys()) | (written - outputs))
    if "logits" not in outputs:
        missing.append("logits")
    if missing:
        raise ArtifactError(
            f"{path}: graph and accel.json disagree on {', '.join(missing[:4])}; build the "
            "artifact again"
        )
    for value in state:
        there = inputs[value.name]
        sizes = [d if isinstance(d, int) else None for d in there.shape]
        same = len(sizes) == len(value.shape) and all(
            size is None or size == want for size, want in zip(sizes, value.shape, strict=True)
        )
        if not same or there.type != _ORT_TYPES[value.dtype]:
            raise ArtifactError(
                f"{path}: state {value.name} is {value.dtype} {list(value.shape)} in accel.json, "
                f"{there.type} {there.shape} in the graph; build the artifact again"
            )


def check_controls(session: Any, facts: Facts, trees: bool, path: Path) -> None:
    """The inputs that choose layers and adapters must be what the manifest says, and a tree is one where calls may be
    trees. Raises ArtifactError.
    """
    wanted = {name: list(array.shape) for name, array in everything(facts.depth).items()}
    if facts.adapters is not None:
        wanted |= facts.adapters.shapes()
    there = {i.name: list(i.shape) for i in session.get_overridable_initializers()}
    if trees:
        there.pop("tree", None)
    if wanted != there:
        raise ArtifactError(
            f"{path}: the graph may be given {_differing(there, wanted)}, but "
            f"accel.json says {_differing(wanted, there)}; build the artifact again"
        )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first inputs of one that the other lacks, or has in another size."""
    found = [f"{n} {size}" for n, size in sorted(one.items()) if other.get(n) != size]
    return ", ".join(found[:3]) or "nothing"


def check_encode(session: Any, artifact: Artifact, path: Path) -> None:
    """The encode entry must take what the manifest says, and give the cross state. Raises
    ArtifactError.
    """
    facts = artifact.facts.encoder
    wanted = {"features"} if facts is not None and facts.features else {"inputs", "inputs.pos"}
    written = {v.output for v in artifact.state if v.cross}
    there = {i.name for i in session.get_inputs()}, {o.name for o in session.get_outputs()}
    wrong = sorted((wanted ^ there[0]) | (written ^ there[1]))
    if wrong:
        raise ArtifactError(
            f"{path}: graph and accel.json disagree on {', '.join(wrong[:4])}; build the "
            "artifact again"
        )
