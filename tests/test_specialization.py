"""What `trace` inserts holds at any length: a function that pins a symbolic size is refused."""

import contextlib
import inspect
import math
from pathlib import Path

import pytest
import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloorDiv, PythonMod

from accel.ir import trace as tracing
from accel.ir.errors import PassError
from accel.ir.facts import Facts
from accel.ir.program import Editor, Program, execute
from accel.ir.region import Entry
from accel.ir.specialization import _one_answer
from accel.ir.trace import trace
from accel.ir.weights import Weights

EXAMPLE = 7


def program():
    """An empty program over x [B,T,4]."""
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = FakeTensorMode(
        shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    )
    value = fake.from_tensor(torch.ones(5, EXAMPLE, 4), symbolic_context=sizes)
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = value
    dims = {str(size): letter for size, letter in zip(value.shape, "BT", strict=False)}
    return Program(Weights(), {"step": Entry(graph, ["y"])}, Facts("m", 11, 99), dims=dims)


def traced(function, made=None):
    """The program with what the function does with x."""
    made = made or program()
    graph = made.step.graph
    graph.output((trace(Editor(made, graph), "kv.score.mine", function, made.step.input("x")),))
    return made


def branch(x):
    return x * 2 if x.shape[1] > 1 else x


def branch_on_none(x):
    return x * 2 if x.shape[1] > 0 else x


def branch_on_one(x):
    return x if x.shape[1] == 1 else x * 2


def branch_on_rows(x):
    return x if x.shape[0] == x.shape[1] else x * 2


def integer(x):
    return torch.arange(int(x.shape[1]))


def loop(x):
    return sum(x[:, i] for i in range(x.shape[1]))


def least(x):
    return x[:, : min(3, x.shape[1])]


def root(x):
    return x * math.sqrt(x.shape[1])


def in_a_tensor(x):
    return x * torch.tensor(x.shape[1])


def rows_in_a_list(x):
    return torch.stack(list(x)).sum(0)


def parts(x):
    return x.split(3, dim=1)[-1]


def fixed_view(x):
    return x.view(-1, 7, 4)


def fixed_operand(x):
    return x + torch.ones(7, 1)


PINS = [
    (branch, "T>1"), (branch_on_none, "True"), (branch_on_one, "Eq(T,1)"), (branch_on_rows, "Eq(B,T)"), (integer, "T"),
    (loop, "T"), (least, "T<3"), (root, "T"), (in_a_tensor, "T"), (rows_in_a_list, "B"), (parts, "((T+2)//3)"),
    (fixed_view, "Eq("), (fixed_operand, "Eq(T,7)"),
]  # fmt: skip


@pytest.mark.parametrize("function, size", PINS, ids=[f.__name__ for f, _ in PINS])
def test_a_pinned_size_is_refused_with_the_method_the_line_and_the_size(function, size):
    lines, first = inspect.getsourcelines(function)
    made = program()
    for _ in range(2):  # what was refused once left no guard that answers it the second time
        with pytest.raises(PassError) as error:
            traced(function, made.copy())
        said = str(
            error.value
        )  # the file as seen from the checkout, or whole where it lies outside
        assert said.startswith("kv.score.mine: ")
        assert f"{Path(__file__).name}:{first + 1} `{lines[1].strip()}`" in said
        assert f"as a number ({size}" in str(error.value) and "torch.where" in str(error.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.max().item(),
        lambda x: x[:, : int(x.max().item())],
        lambda x: x * 2 if (x > 0).any() else x,
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
    ],
    ids=["item", "a size by item", "branch", "nonzero", "mask"],
)
def test_values_taken_as_numbers_are_refused(function):
    with pytest.raises(
        PassError, match=r"^kv.score.mine: \S+/test_specialization.py:\d+ .*in tensors: torch.where"
    ):
        traced(function)


HOLD = {
    "first": lambda x: x[:, :8],
    "last": lambda x: x[:, -4:],
    "all but one": lambda x: x[:, : x.shape[1] - 1],
    "bounded": lambda x: x[:, torch.sym_max(x.shape[1] - 3, 0) :],
    "differences": lambda x: x.diff(dim=1),
    "positions": lambda x: x * torch.arange(x.shape[1])[:, None],
    "by the size": lambda x: x * (1 / x.shape[1]) * x.shape[1] ** 0.5,
    "where": lambda x: torch.where(torch.arange(x.shape[1])[:, None] < 2, x, 0),
    "one against many": lambda x: x[:, :1] + x,
    "spread": lambda x: x[:, :1].expand(-1, x.shape[1], -1),
    "flat": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1),
    "by halves": lambda x: x.reshape(x.shape[0], -1, 2),
    "products": lambda x: torch.einsum("btd,bsd->bts", x, x) @ x,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "pooled": lambda x: torch.nn.functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 0, 2, 0)),
    "sorted": lambda x: x.sort(dim=1).values,
    "causal": lambda x: torch.ones(x.shape[1], x.shape[1]).tril() @ x,
    "repeated": lambda x: x.repeat_interleave(2, dim=1),
    "constant": lambda x: torch.where(x > torch.tensor(0.5), x, torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "sum in place": lambda x: (x * 2).add_(1).clamp_(min=0),
    "wider in place": lambda x: x * (x * 2).add_(torch.tensor(0.5, dtype=torch.float64)),
    "cosines": lambda x: torch.nn.functional.cosine_similarity(x[:, :1], x, dim=-1),
}


def apart(function, made, length):
    """Whether a traced function gives something else than in eager PyTorch, at a length."""
    x = torch.randn(3, length, 4, generator=torch.Generator().manual_seed(length))
    want, (got,) = function(x), execute(made.step.graph, made.params, {"x": x})
    return want.shape != got.shape or not torch.allclose(want, got, atol=1e-6)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", HOLD)
def test_other_functions_hold_at_any_length(name):
    made = traced(HOLD[name])
    assert [n for n in (1, 2, 3, 17) if apart(HOLD[name], made, n)] == []
    editor = Editor(made, made.step.graph)
    assert not editor.fake.shape_env.replacements and "evaluate_expr" not in vars(
        editor.fake.shape_env
    )


@pytest.mark.parametrize(
    "function", [branch, branch_on_one, integer, root], ids=lambda f: f.__name__
)
def test_what_is_refused_would_be_wrong(function, monkeypatch):
    """The negative control: without the check a trace is made, and other lengths differ."""
    monkeypatch.setattr(tracing, "no_specialization", lambda *_: contextlib.nullcontext())
    made = traced(function)
    assert not apart(function, made, EXAMPLE)
    assert [n for n in (1, 2, 3, 17) if apart(function, made, n)]


def set_part(x):
    made = torch.zeros_like(x)
    made[..., 0] = 1
    return x + made


def scale_part(x):
    made = x.clone()
    made[:, :2] *= 3
    return made


def add_to_operand(x):
    x += 1
    return x


@pytest.mark.parametrize(
    "function, operator",
    [(set_part, "fill_"), (scale_part, "mul_"), (add_to_operand, "add_")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_write_into_a_tensor_is_refused(function, operator):
    """Passes would drop it, for nothing reads its result."""
    with pytest.raises(PassError, match=rf"^kv.score.mine: .* \(aten.{operator}\S*\).*torch.where"):
        traced(function)


def test_a_write_that_another_type_would_give_is_no_plain_call():
    """x.gt_(y) holds numbers, and x > y bools."""
    with pytest.raises(PassError, match="writes into a tensor .aten.gt_"):
        traced(lambda x: (x * 2).gt_(0.5) * x)


def test_constants_of_two_functions_of_one_name_stay_apart():
    made = program()
    graph, x = made.step.graph, made.step.input("x")
    editor = Editor(made, graph)

    def times(number):
        return lambda x: x * torch.tensor(number)

    for number in (2.0, 3.0, 2.0):
        x = trace(editor, "kv.codec.mine", times(number), x)
    graph.output((x,))
    (got,) = execute(graph, made.params, {"x": torch.ones(1, 3, 4)})
    assert (got == 12).all() and len(made.params) == 2, "equal ones are one"


def test_a_check_that_raises_is_no_pin():
    made = traced(lambda x: x.topk(3, dim=1).values)
    assert not apart(lambda x: x.topk(3, dim=1).values, made, 17)


def test_the_method_of_a_pass_is_named(stateful, monkeypatch):
    from accel.passes.kv.score.knorm import KNorm

    from .kv_case import evicting, recipe

    def pinning(self, keys):
        return -keys.norm(dim=-1) if keys.shape[2] > 1 else keys.new_zeros(keys.shape[:3])

    monkeypatch.setattr(KNorm, "__call__", pinning)
    with pytest.raises(
        PassError, match=r"^compress.0: \S+/test_specialization.py:\d+ `return -keys.norm"
    ):
        evicting(stateful("llama"), recipe("knorm"))


def test_an_example_of_one_is_refused():
    made = program()
    with pytest.raises(
        PassError,
        match="size N: torch treats an example size of 1 as a constant; give one of at least 2",
    ):
        Editor(made, made.step.graph).symbol("N", 1)


def test_sizes_at_which_a_question_has_no_value_are_left_out():
    """A remainder by C//64, which is 0 for most of the sizes that are tried."""
    size = sympy.Symbol("C", positive=True, integer=True)
    rest = PythonMod(size, FloorDiv(size, 64), evaluate=False)
    assert _one_answer(sympy.Ge(rest, 0)) is True
    assert _one_answer(sympy.Ge(FloorDiv(size, 64), 1)) is None  # the control: sizes differ
