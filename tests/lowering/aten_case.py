"""One aten operator as a graph with symbolic sizes, lowered and run beside torch."""

from __future__ import annotations

import contextlib
import importlib
import math
import operator
import pkgutil
from typing import Any

import onnx
import onnxruntime as ort
import torch
from onnx import helper
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.value_ranges import ValueRanges

import accel.lowering.onnx.rules as package
from accel.ir.weights import Stored
from accel.lowering.onnx.writer.builder import DTYPES, OPSET, Builder, Param
from accel.lowering.onnx.writer.fallback import lower_graph

for _module in pkgutil.iter_modules(package.__path__):
    if _module.name.startswith("aten_"):
        importlib.import_module(f"{package.__name__}.{_module.name}")

aten = torch.ops.aten
B, T = "B", "T"  # symbolic sizes of a case
SIZES = ({B: 3, T: 5}, {B: 1, T: 1}, {B: 2, T: 13})  # the first is traced
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3}


class In:
    """An input tensor of a case: sizes (numbers or letters) and how it is filled."""

    def __init__(
        self, *shape: Any, dtype: torch.dtype = torch.float32, low: float = -3, high: float = 3
    ):
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


MODE = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # costly to warm up
PADDING = (aten.constant_pad_nd.default, aten.pad.default)  # in C++ these fix symbolic sizes
_FAKES: dict[In, torch.Tensor] = {}


class Trace:
    """A case as an FX graph with fake values, as torch.export would leave it."""

    def __init__(self, case: Call):
        self.graph = fx.Graph()
        self.inputs: dict[In, fx.Node] = {}
        self.sizes: dict[str, fx.Node] = {}
        torch.manual_seed(0)
        for spec in [*_inputs(case), SOURCE]:
            if spec not in self.inputs:
                node = self.graph.placeholder(f"x{len(self.inputs)}")
                node.meta["val"] = self.fake(spec)
                self.inputs[spec] = node
        self.graph.output(self.build(case))
        self.module = fx.GraphModule({}, self.graph)
        MODE.shape_env.pending_fresh_unbacked_symbols.clear()  # no tracer collects them here
        assert not MODE.shape_env.replacements, "the case holds for one size only"

    def fake(self, spec: In) -> torch.Tensor:
        if spec not in _FAKES:
            _FAKES[spec] = self.make(spec)
        return _FAKES[spec]

    def make(self, spec: In) -> torch.Tensor:
        dims = [DimDynamic.DUCK if isinstance(n, str) else DimDynamic.STATIC for n in spec.shape]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        value = MODE.from_tensor(spec.tensor(SIZES[0]), symbolic_context=context)
        env = MODE.shape_env
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
            x.op,
            tuple(self.build(a) for a in x.args),
            {k: self.build(v) for k, v in x.kwargs.items()},
        )
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        python = enable_python_dispatcher() if x.op in PADDING else contextlib.nullcontext()
        with MODE, python:
            node.meta["val"] = x.op(*args, **kwargs)
        return node

    def size(self, letter: str) -> fx.Node:
        if letter not in self.sizes:
            spec = next(s for s in self.inputs if letter in s.shape)
            axis = spec.shape.index(letter)
            self.sizes[letter] = self.graph.call_function(
                aten.sym_size.int, (self.inputs[spec], axis)
            )
            self.sizes[letter].meta["val"] = self.inputs[spec].meta["val"].shape[axis]
        return self.sizes[letter]


def _inputs(x: Any) -> list[In]:
    if isinstance(x, In):
        return [x]
    if isinstance(x, Call):
        return _inputs([*x.args, *x.kwargs.values()])
    return [i for y in x for i in _inputs(y)] if isinstance(x, (list, tuple)) else []


def inline(name: str, stored: Stored) -> onnx.TensorProto:
    """A parameter written into the graph itself."""
    return onnx.numpy_helper.from_array(stored.read().detach().contiguous().numpy(), name)


def open_session(b: Builder, inputs: list[Any], outputs: list[Any]) -> ort.InferenceSession:
    """The builder's graph in ONNX Runtime on one thread."""
    graph = helper.make_graph(b.nodes, "case", inputs, outputs, b.initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class Exported:
    """An exported program of one input and one output in ONNX Runtime."""

    def __init__(self, program: torch.export.ExportedProgram):
        signature, b = program.graph_signature, Builder(inline)
        held = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        tensors = {**program.constants, **program.state_dict}
        names: list[str] = []
        for node in list(program.graph.nodes):
            if "_assert" in str(node.target):
                program.graph.erase_node(node)
            elif node.op == "placeholder" and node.name in held:
                name = held[node.name]
                names.append(Param(name, tensors[name]))
                if len(node.users) > 1:
                    b.shared_params.add(name)
            elif node.op == "placeholder":
                self.input = node.name
                b.meta[node.name] = node.meta["val"]
                names.append(node.name)
        (out,) = lower_graph(b, program.graph_module, names)
        b.prune([out])
        given = helper.make_tensor_value_info(self.input, DTYPES[torch.int64], ["B", "T"])
        made = helper.make_tensor_value_info(out, DTYPES[torch.float32], None)
        self.session = open_session(b, [given], [made])

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.session.run(None, {self.input: ids.numpy()})[0])


class Lowered:
    """A traced case in ONNX Runtime."""

    def __init__(self, case: Call, shared: bool = False):
        torch.manual_seed(0)
        self.trace = Trace(case)
        self.fixed = {s: s.tensor(SIZES[0]) for s in self.trace.inputs if isinstance(s, Weight)}
        b = Builder(inline)
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
        self.initializers = list(b.initializers)
        self.session = open_session(b, inputs, outputs)

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
                assert actual.shape == () and math.isclose(actual.item(), wanted, rel_tol=1e-6)
                continue
            assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
            if wanted.dtype.is_floating_point:
                bound = TOLERANCE[wanted.dtype]
                torch.testing.assert_close(actual, wanted, rtol=bound, atol=bound, equal_nan=True)
            else:
                assert torch.equal(actual, wanted)
