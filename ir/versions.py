"""How PyTorch exports fast, and what it needs before 2.12 so that programs of symbolic sizes are captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.config
from torch import _prims
from torch._dispatch.python import enable_python_dispatcher
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import statically_known_true

_OLD = torch.__version__ < "2.12"


@contextlib.contextmanager
def plain_strides() -> Iterator[None]:
    """Inside, the smaller of two strides is named where it is known for all sizes. Else an export writes the stride of
    merged axes as a minimum, and guards on it.
    """
    if not _OLD:
        yield
        return
    with patch.object(_prims, "min", _smaller, create=True):  # hides the builtin one in that module
        yield


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Inside, nodes bear no traces of the Python lines that made them, and the Python code of a graph is written only
    where it is run, which it never is: together a quarter of an export. Arithmetic on sizes is remembered.
    """
    config: Any = torch.fx.config
    with (
        patch.object(config, "do_not_emit_stack_traces", True),
        _use_lazy_graph_module(True),
        remembered_sizes(),
    ):
        yield


_KNOWN = "_accel_known"  # of a shape environment
_ARITHMETIC = ("eq", "ne", "lt", "le", "gt", "ge", "mul", "sym_max", "sym_min", "and", "or")


@contextlib.contextmanager
def remembered_sizes() -> Iterator[None]:
    """Inside, what comes of two symbolic sizes is computed once. Fake tensors ask of each operator again how its
    strides follow from its sizes, and torch does the algebra anew each time: a fifth of an export.
    """
    if hasattr(getattr(SymNode, f"_{_ARITHMETIC[0]}", None), _KNOWN):  # within another
        yield
        return
    with contextlib.ExitStack() as undo:
        for name in (f"_{name}" for name in _ARITHMETIC):
            if hasattr(SymNode, name):  # torch's own names, which may change
                undo.enter_context(patch.object(SymNode, name, _remembered(name)))
        yield


def _remembered(name: str) -> Callable[[Any, Any], Any]:
    compute = getattr(SymNode, name)

    def result(self: Any, other: Any) -> Any:
        env = self.shape_env
        if get_proxy_mode() is not None or env is None or self.fx_node or other.fx_node:
            return compute(self, other)  # a node of the graph, or of torch's own proof
        known = env.__dict__.setdefault(_KNOWN, {})
        kinds, changed = (self.pytype, other.pytype), env._replacements_version_counter
        key = (name, self._expr, other._expr, kinds, changed)
        found = known.get(key)
        if found is None:
            known[key] = found = compute(self, other)
        made = object.__new__(SymNode)  # the tracer tells sizes apart by identity
        made.__dict__.update(found.__dict__)
        return made

    setattr(result, _KNOWN, True)
    return result


def _smaller(a: Any, b: Any) -> Any:
    if statically_known_true(a <= b):
        return a
    return b if statically_known_true(b <= a) else torch.sym_min(a, b)


def shapes_in_python() -> AbstractContextManager[object]:
    """Inside, operators on fake tensors are decomposed in Python: those of the CPU refuse symbolic sizes."""
    return enable_python_dispatcher() if _OLD else nullcontext()
