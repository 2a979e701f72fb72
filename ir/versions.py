"""How PyTorch exports fast, and what it needs before 2.12 so that programs of symbolic sizes are captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.config
from torch import _prims
from torch._dispatch.python import enable_python_dispatcher
from torch.fx._lazy_graph_module import _use_lazy_graph_module
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
    where it is run, which it never is: together a quarter of an export.
    """
    config: Any = torch.fx.config
    with patch.object(config, "do_not_emit_stack_traces", True), _use_lazy_graph_module(True):
        yield


def _smaller(a: Any, b: Any) -> Any:
    if statically_known_true(a <= b):
        return a
    return b if statically_known_true(b <= a) else torch.sym_min(a, b)


def shapes_in_python() -> AbstractContextManager[object]:
    """Inside, operators on fake tensors are decomposed in Python: those of the CPU refuse symbolic sizes."""
    return enable_python_dispatcher() if _OLD else nullcontext()
