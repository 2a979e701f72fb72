"""Symbolic sizes stay symbolic while the function of a method is traced.

Python that asks a symbolic size for a number or a truth value gets the example's answer, and the graph
holds it at every other length. Torch takes such a size to be at least 2 and answers many questions without
a guard, so guards do not tell. Here each question is seen when it is asked, before the answer is recorded.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Literal

import torch
from sympy import Integer, Ne
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from accel.ir.errors import PassError
from accel.ir.program import Editor
from accel.ir.text import size_text

_TORCH = str(Path(torch.__file__).parent)
_SYMBOLS = (  # what a question passes through on its way to the shape environment
    f"{_TORCH}/__init__.py",
    f"{_TORCH}/fx/experimental/sym_node.py",
    f"{_TORCH}/fx/experimental/symbolic_shapes.py",
)
_OPERATORS = f"{_TORCH}/_ops.py", f"{_TORCH}/_subclasses/fake_tensor.py"
_SIZES, _TRIES = (2, 3, 4, 5, 6, 7, 8, 12, 17, 31, 32, 100, 256, 1000, 1 << 20), 40
_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__")


class _Pinned(Exception):
    """A question about a symbolic size whose answer a graph would hold fixed."""

    def __init__(self, question: Any):
        super().__init__(question)
        self.question = question


@contextmanager
def no_specialization(editor: Editor, name: str) -> Iterator[None]:
    """Refuse what is traced within where it decides by a symbolic size or by the values of a tensor.

    Raises:
        PassError: with `name`, the line that decides, the size, and what to write instead.
    """
    environment = editor.fake.shape_env
    evaluate, settings = environment.evaluate_expr, environment.settings
    answers: dict[Any, bool | None] = {}

    def ask(
        expr: Any,
        hint: Any = None,
        fx_node: Any = None,
        size_oblivious: bool = False,
        fallback_value: bool | None = None,
        **more: Any,
    ) -> Any:
        asker = _asker()
        if asker == "python":
            raise _Pinned(expr)
        known = environment._maybe_evaluate_static(expr, size_oblivious=size_oblivious)
        if not expr.free_symbols or known is not None:
            return evaluate(expr, hint, fx_node, size_oblivious, fallback_value, **more)
        if expr not in answers:
            answers[expr] = _one_answer(expr)
        if answers[expr] is not None:
            return answers[expr]
        if fallback_value is not None:  # the asker's own answer where a size is not known
            return fallback_value
        if asker == "check" and not expr.is_Equality:
            return evaluate(expr, hint, fx_node, size_oblivious, **more)
        if asker != "check" and expr.is_Relational:
            with environment.suppress_guards():
                answer = evaluate(expr, hint, fx_node, size_oblivious, **more)
            if _unequal(expr, answer) or (asker == "kernel" and not expr.is_Equality):
                return answer
        raise _Pinned(expr)

    environment.evaluate_expr = ask
    environment.settings = replace(
        settings, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
    )
    try:
        yield
    except _Pinned as error:
        question = size_text(error.question, editor.program.dims)
        raise PassError(
            f"{name}: {_place(error.__traceback__)} takes a symbolic size as a number ({question}), and the graph "
            "would be wrong at other lengths; keep the size symbolic: torch.arange and torch.where instead of "
            "`if` and `range`, torch.sym_min and torch.sym_max instead of `min`, `max` and `int`"
        ) from None
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PassError(
            f"{name}: {_place(error.__traceback__)} takes the values of a tensor as numbers or as a size "
            f"({error.func}), and the graph would be wrong for other values; keep them in tensors: torch.where, "
            "gather or a mask instead of `.item()`, `nonzero` and boolean indices"
        ) from None
    finally:
        del environment.evaluate_expr
        environment.settings = settings


def _asker() -> Literal["python", "check", "kernel", "torch"]:
    """Who asks: Python outside torch, a check that raises, a kernel (of the fake values of an operator that the
    trace holds whole: of strides, above all), or torch's own Python.
    """
    frame: Any = sys._getframe(2)
    names = []
    while frame.f_code.co_filename in _SYMBOLS:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    file = frame.f_code.co_filename
    if names[-1] in _CONVERSIONS and not file.startswith(_TORCH):
        return "python"
    if "expect_true" in names:
        return "check"
    return "kernel" if names[-1] == "guard_bool" and file in _OPERATORS else "torch"


def _one_answer(question: Any) -> bool | None:
    """The answer that a comparison has at all of many sizes, which torch cannot always prove: 4*(C//4) <= C.

    Sizes at which it has no value (a remainder by C//4, where that is 0) are left out.
    """
    if not question.is_Relational:
        return None
    random, found = Random(0), set()
    for _ in range(_TRIES):
        sizes = {s: Integer(random.choice(_SIZES)) for s in question.free_symbols}
        with suppress(ZeroDivisionError):
            found.add(bool(question.xreplace(sizes)))
    return found.pop() if len(found) == 1 else None


def _unequal(question: Any, answer: Any) -> bool:
    """Whether two sizes are compared and not equal: so are they at nearly all lengths."""
    return bool(question.is_Equality and not answer) or bool(question.func is Ne and answer)


def _place(trail: TracebackType | None) -> str:
    """File, line and text of the innermost code outside torch."""
    root = Path(__file__).parents[1]
    frames = [f for f in traceback.extract_tb(trail) if Path(f.filename).is_file()]
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith(_TORCH)]
    path = Path(own[-1].filename)
    shown = path.relative_to(root) if path.is_relative_to(root) else path
    return f"{shown}:{own[-1].lineno} `{own[-1].line}`"
