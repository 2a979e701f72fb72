"""Each aten lowering against torch: one small graph with symbolic sizes, run at several sizes."""

from __future__ import annotations

import builtins
import importlib
import math
import operator
import pkgutil
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._sympy.value_ranges import ValueRanges

import accel.lowering.onnx as package
from accel.ir.errors import LoweringError
from accel.lowering.onnx.builder import DTYPES, Builder, Param
from accel.lowering.onnx.fallback import lower_graph
from accel.lowering.onnx.table import lower

for _module in pkgutil.iter_modules(package.__path__):
    if _module.name.startswith("aten_"):
        importlib.import_module(f"{package.__name__}.{_module.name}")

aten = torch.ops.aten
B, T = "B", "T"  # symbolic sizes of a case
SIZES = ({B: 3, T: 5}, {B: 1, T: 1}, {B: 2, T: 13})  # the first is traced
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3}
ENDLESS = 2**63 - 1


class In:
    """An input tensor of a case: sizes (numbers or letters) and how it is filled."""

    def __init__(self, *shape: Any, dtype: torch.dtype = torch.float32, low: float = -3, high: float = 3):
        self.shape, self.dtype, self.low, self.high = shape, dtype, low, high

    def tensor(self, sizes: dict[str, int]) -> torch.Tensor:
        shape = [sizes.get(n, n) for n in self.shape]
        if self.dtype == torch.bool:
            return torch.rand(shape) < 0.5
        if self.dtype.is_floating_point:
            return torch.empty(shape).uniform_(self.low, self.high).to(self.dtype)
        return torch.randint(int(self.low), int(self.high) + 1, shape).to(self.dtype)


class Weight(In):
    """A parameter: its name carries its value."""


SOURCE = In(B, T)  # an input of every case, for its sizes


class Distinct(In):
    """Indices below `pool`, none twice along the last axis."""

    def __init__(self, *shape: Any, pool: int):
        super().__init__(*shape, dtype=torch.int64)
        self.pool = pool

    def tensor(self, sizes: dict[str, int]) -> torch.Tensor:
        shape = [sizes.get(n, n) for n in self.shape]
        return torch.rand(*shape[:-1], self.pool).argsort(-1)[..., : shape[-1]].contiguous()


class Call:
    """One operator applied to inputs, sizes, numbers and other calls."""

    def __init__(self, op: Any, *args: Any, **kwargs: Any):
        self.op, self.args, self.kwargs = op, args, kwargs


def ints(*shape: Any, low: int = -7, high: int = 7, dtype: torch.dtype = torch.int64) -> In:
    return In(*shape, dtype=dtype, low=low, high=high)


def bools(*shape: Any) -> In:
    return In(*shape, dtype=torch.bool)


def floor(x: Any, y: Any) -> Call:
    return Call(operator.floordiv, x, y)


class Trace:
    """A case as an FX graph with fake values, as torch.export would leave it."""

    def __init__(self, case: Call):
        self.graph = fx.Graph()
        self.inputs: dict[In, fx.Node] = {}
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.sizes: dict[str, fx.Node] = {}
        torch.manual_seed(0)
        for spec in [*_inputs(case), SOURCE]:
            if spec not in self.inputs:
                node = self.graph.placeholder(f"x{len(self.inputs)}")
                node.meta["val"] = self.fake(spec)
                self.inputs[spec] = node
        self.graph.output(self.build(case))
        self.module = fx.GraphModule({}, self.graph)

    def fake(self, spec: In) -> torch.Tensor:
        dims = [DimDynamic.DUCK if isinstance(n, str) else DimDynamic.STATIC for n in spec.shape]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        value = self.mode.from_tensor(spec.tensor(SIZES[0]), symbolic_context=context)
        env = self.mode.shape_env
        for symbol in env.var_to_range:
            env.var_to_range[symbol] = ValueRanges(1, 512)
        return value

    def build(self, x: Any) -> Any:
        if isinstance(x, In):
            return self.inputs[x]
        if isinstance(x, (list, tuple)):
            return type(x)(self.build(i) for i in x)
        if isinstance(x, str) and x in SIZES[0]:
            return self.size(x)
        if not isinstance(x, Call):
            return x
        node = self.graph.call_function(
            x.op, tuple(self.build(a) for a in x.args), {k: self.build(v) for k, v in x.kwargs.items()}
        )
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = x.op(*args, **kwargs)
        return node

    def size(self, letter: str) -> fx.Node:
        if letter not in self.sizes:
            spec = next(s for s in self.inputs if letter in s.shape)
            axis = spec.shape.index(letter)
            self.sizes[letter] = self.graph.call_function(aten.sym_size.int, (self.inputs[spec], axis))
            self.sizes[letter].meta["val"] = self.inputs[spec].meta["val"].shape[axis]
        return self.sizes[letter]


def _inputs(x: Any) -> list[In]:
    if isinstance(x, In):
        return [x]
    if isinstance(x, Call):
        return _inputs([*x.args, *x.kwargs.values()])
    return [i for y in x for i in _inputs(y)] if isinstance(x, (list, tuple)) else []


class Lowered:
    """A traced case in ONNX Runtime."""

    def __init__(self, case: Call, shared: bool = False):
        torch.manual_seed(0)
        self.trace = Trace(case)
        self.fixed = {s: s.tensor(SIZES[0]) for s in self.trace.inputs if isinstance(s, Weight)}
        b = Builder(self.weights)
        names: list[str] = []
        inputs = []
        self.kinds: dict[str, int] = {}
        for spec, node in self.trace.inputs.items():
            if spec in self.fixed:
                names.append(Param(f"weight.{node.name}", self.fixed[spec]))
                if shared:
                    b.shared_params.add(names[-1])
                continue
            b.meta[node.name] = node.meta["val"]
            inputs.append(helper.make_tensor_value_info(node.name, DTYPES[spec.dtype], spec.shape))
            names.append(node.name)
        found = lower_graph(b, self.trace.module, names)
        values = self.trace.graph.output_node().args[0].meta["val"]
        single = not isinstance(values, (tuple, list))
        self.names = []
        for name, value in zip(*([found], [values]) if single else (found, values), strict=True):
            dtype = value.dtype if isinstance(value, torch.Tensor) else b.dtype(name)
            self.names.append(b.node("Identity", name))
            self.kinds[self.names[-1]] = DTYPES[dtype]
        outputs = [helper.make_tensor_value_info(n, k, None) for n, k in self.kinds.items()]
        b.prune([o.name for o in outputs])
        self.nodes = [n.op_type for n in b.nodes if n.op_type != "Identity"]
        self.initializers = [i.name for i in b.initializers]
        graph = helper.make_graph(b.nodes, "case", inputs, outputs, b.initializers)
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def weights(self, name: str, tensor: torch.Tensor) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(tensor.contiguous().numpy(), name)

    def check(self, sizes: dict[str, int]) -> None:
        torch.manual_seed(1)
        tensors = [self.fixed.get(s, s.tensor(sizes)) for s in self.trace.inputs]
        expected = self.trace.module(*tensors)
        single = not isinstance(expected, (tuple, list))
        feeds = {
            node.name: tensor.numpy()
            for (spec, node), tensor in zip(self.trace.inputs.items(), tensors, strict=True)
            if spec not in self.fixed
        }
        found = dict(zip(self.kinds, self.session.run(list(self.kinds), feeds), strict=True))
        got = [found[name] for name in self.names]
        for actual, wanted in zip(got, [expected] if single else expected, strict=True):
            actual = torch.from_numpy(actual) if hasattr(actual, "shape") else torch.tensor(actual)
            if not isinstance(wanted, torch.Tensor):
                assert actual.shape == () and actual.item() == wanted, (actual, wanted)
                continue
            assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
            if wanted.dtype.is_floating_point:
                bound = TOLERANCE[wanted.dtype]
                torch.testing.assert_close(actual, wanted, rtol=bound, atol=bound, equal_nan=True)
            else:
                assert torch.equal(actual, wanted)


X, Y = In(B, T, 8), In(B, T, 8)
HEADS = In(B, 4, T, 8)  # [B,H,T,D]
N, M = ints(B, T), ints(B, T, low=1)
F, G = bools(B, T), bools(B, T)
MASK, SCORES = bools(B, 1, T, T), In(B, 2, T, T)
HALF, DOUBLE, SMALL = In(B, T, dtype=torch.float16), In(B, T, dtype=torch.float64), ints(B, T, dtype=torch.int32)
POSITIVE = In(B, T, low=0.1)
LINE = In(T)
IDS = ints(B, T, low=0, high=10)
ROWS = ints(B, 2, low=0, high=0)
CPU = torch.device("cpu")


def elementwise() -> Any:
    for name in ("neg", "abs", "exp", "tanh", "sigmoid", "relu", "erf", "sin", "cos", "sign", "floor", "ceil",
                 "round", "trunc", "expm1", "exp2", "square", "silu", "softplus", "leaky_relu", "elu", "gelu",
                 "hardtanh", "isnan", "isinf", "reciprocal"):  # fmt: skip
        yield Call(getattr(aten, name).default, X)
    for name in ("sqrt", "log", "log1p", "log2", "rsqrt"):
        yield Call(getattr(aten, name).default, POSITIVE)
    for name in ("exp", "tanh", "rsqrt", "sigmoid"):
        yield Call(getattr(aten, name).default, M)
    for x in (N, SMALL, HALF, DOUBLE):
        yield from (Call(op.default, x) for op in (aten.neg, aten.abs, aten.relu, aten.floor, aten.trunc))
    yield from (Call(aten.log1p.default, In(B, T, low=-1e-4, high=1e-4)), Call(aten.expm1.default, POSITIVE))
    yield Call(aten.softplus.default, In(B, T, low=-40, high=40), 2.0, 10.0)
    yield Call(aten.elu.default, X, 1.5, 2.0)
    yield Call(aten.gelu.default, X, approximate="tanh")
    yield Call(aten.silu.default, DOUBLE)
    for op in (aten.add, aten.sub, aten.mul, aten.div):
        yield from (Call(op.Tensor, X, Y), Call(op.Tensor, X, In(8)), Call(op.Tensor, M, 2), Call(op.Tensor, M, 2.5))
        yield from (Call(op.Tensor, HALF, 0.5), Call(op.Tensor, N, POSITIVE), Call(op.Tensor, HALF, DOUBLE))
        yield from (Call(op.Scalar, X, 3), Call(op.Tensor, SMALL, M), Call(op.Tensor, LINE, T))
        yield Call(op.Tensor, LINE, In(dtype=torch.float64, low=1))
    for op in (aten.add, aten.sub, aten.rsub):
        yield from (Call(op.Tensor, X, Y, alpha=2), Call(op.Tensor, N, M, alpha=-1), Call(op.Scalar, X, 3, 2))
    yield from (Call(aten.add.Tensor, F, G), Call(aten.mul.Tensor, F, G), Call(aten.mul.Tensor, F, X_BT))
    yield from (Call(aten.add.Tensor, F, 1), Call(aten.true_divide.Tensor, N, M), Call(aten.rsub.Scalar, N, 1.5))
    for y in (M, POSITIVE):
        for op in (aten.remainder, aten.fmod):
            yield from (Call(op.Tensor, X_BT, y), Call(op.Tensor, N, y))
        yield from (Call(aten.div.Tensor_mode, N, y, rounding_mode=m) for m in ("floor", "trunc", None))
        yield Call(aten.floor_divide.default, N, y)
    for y in (3, -3, 2.5, -2.5):
        yield from (Call(op.Scalar, N, y) for op in (aten.remainder, aten.fmod, aten.floor_divide))
        yield from (Call(aten.div.Scalar_mode, x, y, rounding_mode="trunc") for x in (N, X))
        yield from (Call(aten.remainder.Scalar, X, y), Call(aten.remainder.Scalar_Tensor, y, M))
    yield from (Call(aten.pow.Tensor_Scalar, POSITIVE, e) for e in (0.5, 1, 2, 3, -0.5, 2.7))
    yield from (Call(aten.pow.Tensor_Scalar, N, 2), Call(aten.pow.Tensor_Scalar, N, 3), Call(aten.pow.Tensor_Scalar, M, 0.5))
    yield from (Call(aten.pow.Scalar, 10000.0, X), Call(aten.pow.Scalar, 2, M), Call(aten.pow.Tensor_Tensor, POSITIVE, N))
    for low, high in ((-1, 1), (None, 0.5), (0, None), (-2.5, 1)):
        yield from (Call(aten.clamp.default, x, low, high) for x in (X, N))
    yield from (Call(aten.clamp.Tensor, X, Y, None), Call(aten.clamp.Tensor, X, In(8), In(T, 1, low=3, high=4)))
    yield from (Call(aten.clamp_min.default, N, 0), Call(aten.clamp_min.Tensor, X, Y), Call(aten.clamp_max.default, X, 0.5))
    yield from (Call(aten.clamp_max.Tensor, X, Y), Call(aten.clamp_min.default, SMALL, 2))
    for op in (aten.minimum, aten.maximum):
        yield from (Call(op.default, X, Y), Call(op.default, N, POSITIVE), Call(op.default, F, G))
    yield from (Call(aten.lerp.Scalar, X, Y, 0.3), Call(aten.lerp.Tensor, X, Y, Y))
    yield from (Call(aten.addcmul.default, X, Y, X, value=2), Call(aten.addcmul.default, X, Y, Y))


X_BT = In(B, T)


def logic() -> Any:
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        op = getattr(aten, name)
        yield from (Call(op.Tensor, N, M), Call(op.Tensor, N, POSITIVE), Call(op.Tensor, F, G), Call(op.Scalar, N, T))
        yield from (Call(op.Scalar, N, 2), Call(op.Scalar, N, 1.5), Call(op.Scalar, X, 0), Call(op.Scalar, F, True))
    for name in ("logical_and", "logical_or", "logical_xor"):
        yield from (Call(getattr(aten, name).default, F, G), Call(getattr(aten, name).default, N, X_BT))
    yield from (Call(aten.logical_not.default, x) for x in (F, N, X))
    yield from (Call(aten.bitwise_not.default, x) for x in (F, N, SMALL))
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"):
        op = getattr(aten, name)
        yield from (Call(op.Tensor, F, G), Call(op.Tensor, N, M), Call(op.Tensor, F, M))
        yield from (Call(op.Scalar, N, 3), Call(op.Scalar, F, True))
    yield from (Call(aten.where.self, F, x, y) for x, y in ((N, M), (X_BT, POSITIVE), (F, G), (N, X_BT), (HALF, HALF)))
    yield from (Call(aten.where.ScalarOther, F, X_BT, 1.5), Call(aten.where.ScalarSelf, F, 0, X_BT), Call(aten.where.Scalar, F, 1.0, 0.0))
    yield from (Call(aten.masked_fill.Scalar, SCORES, MASK, v) for v in (-math.inf, -1e9, 0))
    yield from (Call(aten.masked_fill.Scalar, N, F, 5), Call(aten.masked_fill.Scalar, F, G, False))
    yield Call(aten.masked_fill.Tensor, SCORES, MASK, In())
    for dtype in (torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool):
        for x in (X, N, F, HALF):
            yield from (Call(aten._to_copy.default, x, dtype=dtype), Call(aten.to.dtype, x, dtype))
    yield from (Call(aten.to.dtype_layout, X, dtype=torch.float16, layout=torch.strided), Call(aten.to.device, X, CPU, torch.float64))
    yield from (Call(aten.to.other, X, HALF), Call(aten.type_as.default, N, X))
    for op in (aten.clone, aten.contiguous, aten.alias, aten.detach, aten.lift_fresh_copy, aten.positive):
        yield Call(op.default, X)
    yield from (Call(aten.dropout.default, X, 0.1, False), Call(aten.native_dropout.default, X, 0.1, False))
    yield from (Call(aten.copy.default, X, In(8)), Call(aten.copy.default, N, X_BT))


def shape() -> Any:
    for op in (aten.view, aten.reshape, aten._unsafe_view, aten._reshape_alias):
        strides = [[Call(operator.mul, T, 8), 8, 4, 1]] if op is aten._reshape_alias else []
        yield Call(op.default, X, [B, T, 2, 4], *strides)
    yield from (Call(aten.view.default, X, s) for s in ([B, -1], [-1, 8], [Call(operator.mul, B, T), 8], [T, B, 8]))
    yield from (Call(aten.view.default, X, [B, Call(operator.mul, T, 2), 4]), Call(aten.view.default, X, [B, T, 8]))
    yield from (Call(aten.flatten.using_ints, X, 1), Call(aten.flatten.using_ints, X), Call(aten.unflatten.int, X, -1, [2, 4]))
    yield from (Call(aten.permute.default, HEADS, [0, 2, 1, -1]), Call(aten.permute.default, HEADS, [0, 1, 2, 3]))
    yield from (Call(aten.transpose.int, HEADS, 1, -2), Call(aten.transpose.int, X, 1, 1), Call(aten.t.default, N))
    yield from (Call(aten.movedim.int, HEADS, 1, -1), Call(aten.movedim.int, HEADS, -1, 0))
    yield from (Call(aten.unsqueeze.default, X, d) for d in (0, 2, -1, -3))
    yield from (Call(aten.squeeze.dim, In(B, 1, T), d) for d in (1, -2))
    yield from (Call(aten.squeeze.dims, In(1, T, 1), [0, 2]), Call(aten.squeeze.default, In(1, 4, 1)))
    yield from (Call(aten.expand.default, In(B, 1, T), s) for s in ([B, 4, T], [-1, 4, -1], [B, 1, T], [2, B, T, T]))
    yield from (Call(aten.expand.default, In(1, T), [B, T]), Call(aten.expand_as.default, In(1, T), X_BT))
    yield from (Call(aten.repeat.default, X_BT, r) for r in ([1, 3], [2, 1, B], [1, 1]))
    yield from (Call(aten.repeat_interleave.self_int, x, 3, d) for x, d in ((HEADS, 1), (HEADS, 2), (X, -1), (X, 0), (X, None)))
    yield from (Call(aten.slice.Tensor, X, 1, *a) for a in ((0, ENDLESS), (1, ENDLESS), (-1, ENDLESS), (0, -1), (0, T), (None, 1), (-3, -1)))
    yield from (Call(aten.slice.Tensor, X, -1, *a) for a in ((0, 4), (1, 8, 2), (4, ENDLESS), (0, 8)))
    yield from (Call(aten.slice.Tensor, X, 1, floor(T, 2), ENDLESS), Call(aten.slice.Tensor, X, 1, 0, floor(T, 2)))
    yield from (Call(aten.narrow.default, X, 2, 1, 3), Call(aten.narrow.default, X, 1, 0, T), Call(aten.narrow.default, X, 2, -3, 2))
    yield from (Call(aten.select.int, X, 1, -1), Call(aten.select.int, X, 2, 3), Call(aten.select.int, X, 1, Call(operator.sub, T, 1)))
    yield from (Call(aten.unbind.int, In(B, T, 3), 2), Call(aten.unbind.int, In(2, T)), Call(aten.unbind.int, In(1, T)))
    yield from (Call(aten.split.Tensor, X, 4, -1), Call(aten.split.Tensor, X, 3, 2), Call(aten.split.Tensor, X, 8, 2))
    yield from (Call(aten.split_with_sizes.default, X, [2, 5, 1], 2), Call(aten.chunk.default, X, 2, -1), Call(aten.chunk.default, X, 1, 1))
    yield from (Call(aten.cat.default, [X, Y], -1), Call(aten.cat.default, [X, X_DOUBLE, Y], 1), Call(aten.cat.default, [In(0), X], 1))
    yield from (Call(aten.stack.default, [X, Y], -1), Call(aten.stack.default, [X, X_DOUBLE]), Call(aten.stack.default, [X]))
    yield from (Call(aten.select_scatter.default, X, X_BT, 2, i) for i in (0, 3, -1))
    yield from (Call(aten.slice_scatter.default, X, In(B, T, 3), 2, *a) for a in ((0, 3), (5, ENDLESS), (-4, -1), (2, 5)))
    yield Call(aten.slice_scatter.default, X, Y, 1, 0, ENDLESS)
    yield from (Call(aten.constant_pad_nd.default, x, p, v) for x, p, v in ((X, [1, 2], 0.5), (X, [0, 0, 3, 0], 0), (N, [2, 0], 7), (F, [1, 0], True), (X, [0, 0], 0)))
    yield from (Call(aten.pad.default, X, [0, 0, 2, 0], "constant", None), Call(aten.pad.default, X, [1, 0], value=2.0))
    yield from (Call(aten.flip.default, X, [1]), Call(aten.flip.default, X, [0, -1]), Call(aten.roll.default, X, [1], [1]))
    yield from (Call(aten.roll.default, X, [-3, 2], [2, 1]), Call(aten.roll.default, X, [9], [2]))


X_DOUBLE = In(B, T, 8, dtype=torch.float64)
TABLE = Weight(16, 8)
AT = ints(2, 3, low=-4, high=3)


def index() -> Any:
    yield from (Call(aten.embedding.default, TABLE, IDS), Call(aten.embedding.default, In(11, 8), SMALL_IDS, 0))
    yield from (Call(aten.index_select.default, X, 2, ints(5, low=0)), Call(aten.index_select.default, X, 1, ints(3, low=0, high=0)))
    yield from (Call(aten.gather.default, X, 2, ints(B, T, 3, low=0)), Call(aten.gather.default, X, 1, ints(B, 2, 8, low=0, high=0)))
    yield Call(aten.take_along_dim.default, X, ints(B, T, 3, low=0), 2)
    mixed = In(B, 4, T, 5)
    yield from (Call(aten.index.Tensor, X, [None, None, AT]), Call(aten.index.Tensor, In(16, T), [IDS]))
    yield from (Call(aten.index.Tensor, mixed, [None, AT, None, AT]), Call(aten.index.Tensor, mixed, [None, AT, None, ints(3, low=0, high=4)]))
    yield from (Call(aten.index.Tensor, In(B, T, 4, 5), [None, None, AT, ints(3, low=-5, high=4)]), Call(aten.index.Tensor, In(4, 5, T), [AT, ints(2, 1, low=0, high=4)]))
    yield from (Call(aten.index.Tensor, X, [Call(aten.unsqueeze.default, Call(aten.arange.default, B), 1), ROWS]), Call(aten.index.Tensor, In(3, 4, B, T), [AT2, AT]))
    yield from (Call(aten.index.Tensor, In(B, 4, 5, T), [None, AT, ints(3, low=0, high=4)]), Call(aten.index.Tensor, MASK, [None, None, None, ROWS]))
    for add in (False, True):
        yield from (Call(aten.index_put.default, In(4, T), [ints(2, low=0, high=1)], In(2, T), add) for _ in range(1 - add))
        yield Call(aten.index_put.default, In(B, 3, 4, 8), [None, None, ONCE], In(B, 3, 2, 8), add)
        yield from (Call(aten.index_put.default, In(B, 4, T), [None, ONCE], In(2, T), add), Call(aten.index_put.default, In(4, 4), [ONCE, ONCE], In(), add))
        yield Call(aten.index_put.default, In(B, 4, 4, T), [None, ONCE, ONCE], In(2, 1), add)
    yield from (Call(aten.index_put.default, X_BT, [F], In()), Call(aten.index_put.default, X, [F], In()), Call(aten.index_put.default, N, [F], ints()))
    yield from (Call(aten.index_copy.default, In(B, 4, T), 1, ONCE, In(B, 2, T)), Call(aten.index_add.default, In(4, T), 0, ints(9, low=0, high=3), In(9, T)))
    yield from (Call(aten.scatter.src, X, 2, WHERE, In(B, T, 8)), Call(aten.scatter.value, X, 2, WHERE, 1.5), Call(aten.scatter.value, Call(aten.full.default, [B, T, 8], 0.0), -1, WHERE, 1))
    yield Call(aten.scatter_add.default, X, 2, ints(B, T, 3, low=0), In(B, T, 3))
    for name in ("topk", "sort", "argsort"):
        yield from (Call(getattr(aten, name).default, X, *a) for a in ({"topk": [(3,), (2, -1, False)]}.get(name, [(), (2, True), (1,)])))
    yield from (Call(aten.topk.default, In(B, 2, T), 1, 1), Call(aten.topk.default, In(B, 64, dtype=torch.float16), 4))
    yield from (Call(op.stable, N, stable=True, dim=-1, descending=d) for op in (aten.sort, aten.argsort) for d in (False, True))
    yield from (Call(op.default, X, *a) for op in (aten.argmax, aten.argmin) for a in ((), (-1,), (1, True)))
    yield from (Call(aten.nonzero.default, F), Call(aten.masked_select.default, X_BT, F), Call(aten.one_hot.default, IDS, 11))
    yield Call(aten.index.Tensor, X, [F])
    yield Call(aten.index_put.default, X, [F], In(8))


SMALL_IDS = ints(B, T, low=0, high=10, dtype=torch.int32)
AT2, ONCE, WHERE = ints(2, 3, low=0, high=2), Distinct(2, pool=4), Distinct(B, T, 3, pool=8)


def create() -> Any:
    yield from (Call(aten.full.default, s, v) for s, v in (([B, T], 1.5), ([2, 3], True), ([], -math.inf), ([100, 100], 2), ([T], T)))
    yield from (Call(aten.full.default, [B, T], 0, dtype=torch.int32), Call(aten.zeros.default, [B, T]), Call(aten.ones.default, [T], dtype=torch.bool))
    for op in (aten.new_zeros, aten.new_ones):
        yield from (Call(op.default, X, [T, 2]), Call(op.default, N, [3]), Call(op.default, X, [B], dtype=torch.int64))
    yield from (Call(aten.new_full.default, X, [T, 2], 3), Call(aten.full_like.default, N, 2), Call(aten.full_like.default, In(3), 2, dtype=torch.bool))
    yield from (Call(op.default, x) for op in (aten.zeros_like, aten.ones_like) for x in (X, F, In(3)))
    yield from (Call(aten.fill.Scalar, X, 2), Call(aten.fill.Tensor, N, In()), Call(aten.scalar_tensor.default, 2.5), Call(aten.scalar_tensor.default, T, dtype=torch.float32))
    yield from (Call(aten.mul.Tensor, Call(op, *a), 0) for op, a in ((aten.empty.memory_format, ([B, T],)), (aten.empty_like.default, (N,)), (aten.new_empty.default, (X, [T]))))
    yield from (Call(aten.arange.default, T), Call(aten.arange.default, 7, dtype=torch.float32), Call(aten.arange.default, T, dtype=torch.float32))
    yield from (Call(aten.arange.start, B, Call(operator.add, B, T)), Call(aten.arange.start, -3, 4), Call(aten.arange.start_step, 0, T, 2), Call(aten.arange.start_step, 0.0, 3.0, 0.25), Call(aten.arange.start_step, 9, 0, -2))
    yield from (Call(op.default, x, d) for op in (aten.tril, aten.triu) for x in (SCORES, MASK, ints(T, T, dtype=torch.int32), In(T, 4)) for d in (0, 1, -1))
    yield Call(aten.triu.default, SCORES, T)


def nn() -> Any:
    w, bias, square = Weight(16, 8), Weight(16), In(B, 8, T)
    yield from (Call(aten.linear.default, X, w), Call(aten.linear.default, X, w, bias), Call(aten.linear.default, X, In(16, 8)), Call(aten.linear.default, X_DOUBLE, In(16, 8, dtype=torch.float64)))
    yield from (Call(aten.matmul.default, X, square), Call(aten.matmul.default, HEADS, In(8, 3)), Call(aten.matmul.default, In(8), square), Call(aten.bmm.default, X, square))
    yield from (Call(aten.mm.default, In(T, 8), In(8, B)), Call(aten.mv.default, In(T, 8), In(8)), Call(aten.dot.default, In(8), In(8)), Call(aten.outer.default, LINE, In(3)))
    yield from (Call(aten.addmm.default, In(4), In(T, 8), In(8, 4), **k) for k in ({}, {"beta": 2, "alpha": 0.5}, {"beta": 0}))
    yield Call(aten.baddbmm.default, In(B, T, T), X, square, beta=0.5)
    yield from (Call(aten.einsum.default, e, [HEADS, o]) for e, o in (("bhtd,bhsd->bhts", HEADS), ("b h t d, d e -> b t h e", In(8, 3))))
    for op in (aten.softmax, aten.log_softmax):
        yield from (Call(op.int, SCORES, -1), Call(op.int, HALF, 1, torch.float32), Call(op.int, SCORES, 1))
    yield from (Call(op.default, SCORES, -1, False) for op in (aten._softmax, aten._log_softmax))
    scale, shift = Weight(8), Weight(8)
    yield from (Call(aten.layer_norm.default, X, [8], *a) for a in ((scale, shift, 1e-6), (), (scale,)))
    yield from (Call(aten.native_layer_norm.default, X, [8], scale, shift, 1e-5), Call(aten.native_layer_norm.default, X, [8], None, None, 1e-5))
    yield from (Call(aten.rms_norm.default, X, [8], *a) for a in ((scale, 1e-6), ()))
    yield from (Call(aten._fused_rms_norm.default, X, [8], scale, 1e-6), Call(aten.glu.default, X, -1))
    taps = Weight(8, 1, 4)
    yield from (Call(aten.conv1d.default, square, taps, None, [1], [3], [1], 8), Call(aten.conv1d.default, square, In(6, 4, 3), In(6), [2], [2], [1], 2), Call(aten.conv1d.padding, square, In(6, 8, 3), None, [1], "same"))
    yield from (Call(aten.convolution.default, square, taps, Weight(8), [1], [3], [1], False, [0], 8), Call(aten.conv1d.default, In(8, T), taps, None, [1], [3], [1], 8))
    yield from (Call(aten.conv2d.default, HEADS, In(3, 4, 3, 3), None, [1], [1]), Call(aten.conv2d.padding, HEADS, In(3, 4, 3, 3), None, [1], "same"))
    sdpa, kv = aten.scaled_dot_product_attention.default, In(B, 4, 7, 8)
    yield from (Call(sdpa, HEADS, HEADS, HEADS), Call(sdpa, HEADS, HEADS, HEADS, is_causal=True), Call(sdpa, HEADS, kv, kv, scale=0.3), Call(sdpa, HEADS, kv, kv, In(B, 1, T, 7)))
    yield from (Call(sdpa, HEADS, kv, kv, bools(B, 1, T, 7)), Call(sdpa, HEADS, kv, kv, bools(T, 7)), Call(sdpa, X, X, X, is_causal=True))
    few = In(B, 2, T, 8)
    yield from (Call(sdpa, HEADS, few, few, is_causal=True, enable_gqa=True), Call(sdpa, HEADS, few, In(B, 2, T, 6), enable_gqa=True), Call(sdpa, HEADS, few, few, MASK, enable_gqa=True))


def reduce() -> Any:
    yield from (Call(op, x, *a) for op in (aten.sum.dim_IntList, aten.mean.dim) for x, a in ((X, ([-1], True)), (X, ([1, 2],)), (X, (None,))))
    yield from (Call(op.default, X) for op in (aten.sum, aten.mean, aten.max, aten.min, aten.amax, aten.amin, aten.prod))
    yield from (Call(aten.sum.dim_IntList, F, [1]), Call(aten.sum.default, SMALL), Call(aten.mean.dim, N, [1], dtype=torch.float32), Call(aten.sum.dim_IntList, HALF, [1], dtype=torch.float32))
    yield from (Call(op.default, x, [1], True) for op in (aten.amax, aten.amin) for x in (X, N, F))
    yield from (Call(op.dim, x, 1, *k) for op in (aten.max, aten.min) for x in (X, POSITIVE) for k in ((), (True,)))
    yield from (Call(aten.prod.dim_int, In(B, T, 3), 2), Call(aten.logsumexp.default, X, [-1]), Call(aten.logsumexp.default, X, [1], True))
    for op in (aten.any, aten.all):
        yield from (Call(op.default, F), Call(op.dim, F, 1), Call(op.dim, N, -1, True), Call(op.dims, F, [0, 1]))
    yield from (Call(aten.var.dim, X, [-1], u, k) for u, k in ((True, False), (False, True)))
    yield from (Call(aten.var.dim, X, [1, 2], False), Call(aten.var.correction, X, [-1], correction=0, keepdim=True), Call(aten.var.correction, X, [2]), Call(aten.std.correction, X, [2], correction=1))
    yield from (Call(aten.linalg_vector_norm.default, X, o, [-1], k) for o, k in ((2, True), (1, False), (math.inf, False)))
    yield from (Call(aten.cumsum.default, x, d) for x, d in ((X, 1), (N, -1), (F, 1), (SMALL, 1), (HALF, 0)))


def sym() -> Any:
    both = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, torch.sym_max, torch.sym_min)
    compare = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    yield from (Call(aten.mul.Tensor, X, Call(op, T, y)) for op in both for y in (2, B))
    yield from (Call(op, Call(operator.sub, B, T), 3) for op in both)
    yield from (Call(op, T, y) for op in compare for y in (B, 3))
    yield from (Call(op, Call(op2, T, 3), Call(operator.eq, B, 1)) for op in (operator.and_, operator.or_) for op2 in (operator.lt,))
    yield from (Call(torch.sym_ite, Call(operator.lt, B, T), B, T), Call(torch.sym_not, Call(operator.lt, B, T)), Call(torch.sym_sum, [B, T, 3]))
    yield from (Call(operator.neg, T), Call(operator.pow, T, 2), Call(torch.sym_float, T), Call(operator.mul, T, 0.5), Call(math.sqrt, T))
    half = Call(operator.truediv, T, 2)
    yield from (Call(op, half) for op in (math.floor, math.ceil, math.trunc, torch.sym_int, builtins.round))
    yield from (Call(math.ceil, T), Call(aten.sym_size.int, X, -2), Call(aten.sym_numel.default, X))
    yield from (Call(op, IDS) for op in ())


FAMILIES = (elementwise, logic, shape, index, create, nn, reduce, sym)
CASES = [case for family in FAMILIES for case in family()]


def identifier(case: Call) -> str:
    return getattr(case.op, "__name__", "") if "." not in str(case.op) else str(case.op)


@pytest.mark.parametrize("case", CASES, ids=identifier)
def test_same_as_torch(case: Call) -> None:
    lowered = Lowered(case)
    for sizes in SIZES:
        lowered.check(sizes)


def operators(x: Any) -> set[Any]:
    """Every operator in a case."""
    if isinstance(x, Call):
        return {x.op}.union(*map(operators, [*x.args, *x.kwargs.values()]))
    return set().union(*map(operators, x)) if isinstance(x, (list, tuple)) else set()


def test_every_lowering_has_a_case() -> None:
    def ours(op: Any) -> bool:
        return not isinstance(op, torch._ops.OpOverload) or op.namespace == "aten"

    untested = [str(op) for op in lower.rules if ours(op)]
    covered = {str(op) for op in set().union(*map(operators, CASES))}
    assert sorted(set(untested) - covered) == []


def test_a_wrong_lowering_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lower.rules, aten.silu.default, lambda b, x: b.node("Sigmoid", x))
    with pytest.raises(AssertionError, match="not close"):
        test_same_as_torch(Call(aten.silu.default, X))
