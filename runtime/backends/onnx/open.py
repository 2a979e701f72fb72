"""Opening a graph with ONNX Runtime on the CPU, and buffers for its state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import AccelError, ArtifactError, OutOfMemoryError
from accel.ir.state import Home, StateValue
from accel.lowering.onnx.native import is_native, register
from accel.lowering.onnx.ort import ort
from accel.runtime.backends.onnx.mapped import advise, mapped
from accel.runtime.inputs.ints import Ints

_NO_MEMORY = ("Failed to allocate memory", "bad_alloc", "bad allocation")  # of its arena; else C++


class _Session(ort.InferenceSession):  # type: ignore[misc]
    """One whose calls raise ArtifactError, OutOfMemoryError; onnxruntime's dozen classes have no common base."""

    def __init__(self, path: Path, options: Any):
        providers = ["CPUExecutionProvider"]  # the only one: no other is tried, and nothing printed
        super().__init__(str(path), options, providers, enable_fallback=False)
        self.path = path

    def run(self, *args: Any) -> Any:
        try:
            return super().run(*args)
        except Exception as error:
            raise self._failed(error) from error

    def run_with_iobinding(self, binding: Any) -> None:
        try:
            super().run_with_iobinding(binding)
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> AccelError:
        said = f"{self.path}: onnxruntime {ort.__version__} cannot run it: {error}"
        if any(words in str(error) for words in _NO_MEMORY):
            return OutOfMemoryError(f"{said}. Memory ran out: give fewer or shorter prompts")
        return ArtifactError(f"{said}. Build the artifact again")


def open_session(
    path: Path, threads: int, spinning: bool = True, resting: bool = False, mapped: bool = False
) -> Any:
    """An onnxruntime.InferenceSession over a graph file, its weights packed. Raises ArtifactError.

    spinning: its threads wait busily during a call, and a while after it unless it is `resting`. mapped: weights are
    read where the file is mapped, which processes share, and no copy is packed.
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
    if mapped:
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        if is_native(path):
            register(options)
        return _Session(path, options)
    except OSError as error:  # of the operators: it says what to do
        raise ArtifactError(f"{path} needs accel's own operators: {error}") from error
    except Exception as error:  # onnxruntime raises a dozen classes without a common base
        raise ArtifactError(
            f"{path}: onnxruntime {ort.__version__} cannot open it: {error}. "
            "Build the artifact again, or upgrade onnxruntime"
        ) from error


def ort_value(array: npt.NDArray[Any]) -> Any:
    """An OrtValue over the array's own memory. Empty arrays have none to share: onnxruntime copies
    them.
    """
    return ort.OrtValue.ortvalue_from_numpy(array)


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


def made(value: StateValue, shape: tuple[int, ...], fill: float | None = None) -> npt.NDArray[Any]:
    """A new buffer of a state value where it belongs; filled, or not. Raises StorageError."""
    make = mapped if value.home is Home.MAPPED else aligned
    return make(shape, value.dtype, fill)


def fill(new: npt.NDArray[Any], old: npt.NDArray[Any] | None) -> None:
    """Let a state buffer start as `old`, where there is one."""
    if old is not None:
        advise([old], scattered=False)
        new[tuple(slice(n) for n in old.shape)] = old


def copied(
    state: tuple[StateValue, ...], buffers: dict[str, npt.NDArray[Any]], rows: Ints | None
) -> dict[str, npt.NDArray[Any]]:
    """State buffers of their own: of all rows, which share what is never written in place, or of `rows` [n]."""
    found = dict(buffers)
    for value in state:
        if (
            value.name in buffers
            and not value.pooled
            and not (value.written_between_steps and rows is None)
        ):
            old = buffers[value.name]
            count = len(old) if rows is None else rows.size
            found[value.name] = made(value, (count, *old.shape[1:]))
            advise([old], scattered=False)
            np.copyto(found[value.name], old if rows is None else old[rows])
    return found
