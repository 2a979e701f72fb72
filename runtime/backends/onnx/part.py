"""Entries beside the step, over the state of one session."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.state import state_of
from accel.runtime.backends.onnx.open import ort_value
from accel.runtime.call import Arrays


class Parts:
    """Their bindings, made once for the buffers that there are."""

    def __init__(self, entry: Callable[[str], Any]):
        """`entry`: the onnxruntime.InferenceSession of an entry."""
        self._entry = entry
        self.extra_inputs: Mapping[
            str, npt.NDArray[Any]
        ] = {}  # inputs that entries may take beside the state
        self._bound: dict[str, _Bound] = {}
        self._buffers: Arrays = {}

    def forget(self) -> None:
        """Let go of the buffers."""
        self._bound, self._buffers = {}, {}

    def run(self, entry: str, inputs: Arrays, buffers: Arrays, twice: Collection[str]) -> Arrays:
        """One call over the state in `buffers`, which is written where it lies: what the entry gives beside it, and
        the next of state that has two buffers (`twice`), by the names of outputs.
        """
        if buffers is not self._buffers or twice:
            self.forget()
            self._buffers = buffers
        session = self._entry(entry)
        if entry not in self._bound:
            self._bound[entry] = _Bound(session, buffers, twice, self.extra_inputs)
        bound = self._bound[entry]
        values = {
            n: ort_value(np.ascontiguousarray(a)) for n, a in inputs.items() if n in bound.inputs
        }
        for name, value in values.items():
            bound.binding.bind_ortvalue_input(name, value)
        for name in bound.left:
            bound.binding.bind_output(name, "cpu")
        session.run_with_iobinding(bound.binding)
        if not bound.left:
            return {}
        found = zip(bound.outputs, bound.binding.get_outputs(), strict=True)
        return {n: v.numpy() for n, v in found if n in bound.left}


class _Bound:
    """A binding with the state in it; `left`: the outputs that are not written where they lie."""

    def __init__(
        self,
        session: Any,
        buffers: Arrays,
        twice: Collection[str],
        extra_inputs: Mapping[str, npt.NDArray[Any]],
    ):
        self.binding = session.io_binding()
        self.inputs = {i.name for i in session.get_inputs()}
        self.outputs: list[
            str
        ] = []  # in the order in which they are bound, in which a binding gives them
        self.left: list[str] = []
        self._held = {
            n: ort_value(a) for n, a in buffers.items() if n in self.inputs
        }  # must outlive the binding
        optional = {i.name for i in session.get_overridable_initializers()}
        self._beside = {n: ort_value(a) for n, a in extra_inputs.items() if n in optional}
        for name, value in {**self._held, **self._beside}.items():
            self.binding.bind_ortvalue_input(name, value)
        for name in (o.name for o in session.get_outputs()):
            state = state_of(name)
            if state in self._held and state not in twice:
                self.binding.bind_ortvalue_output(name, self._held[state])
                self.outputs.append(name)
            else:
                self.left.append(name)
        self.outputs += self.left
