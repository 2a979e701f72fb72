"""Writes one ONNX graph node by node; values are names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, statically_known_true

from accel.ir.errors import LoweringError
from accel.ir.weights import Factored, Offsets, Stored, composed
from accel.lowering import Table

OPSET = 24
_IR_VERSION = 10
MICROSOFT = "com.microsoft"
DTYPES: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}
_INLINE = 1 << 10  # parameters up to this many elements are written into the graph itself

Size = int | str  # a number, or the name of a rank-0 int64 value


class Param(str):
    """The name of a parameter, with what is stored; it enters the graph when a node first uses it."""

    stored: Stored

    def __new__(cls, name: str, value: torch.Tensor | Stored) -> Param:
        made = super().__new__(cls, name)
        made.stored = Stored.of(value)
        return made


@dataclass(frozen=True)
class Call:
    """A node of the program, and its operands with names in place of nodes."""

    node: fx.Node
    operands: Sequence[Any]


class Builder:
    """One ONNX graph under construction.

    A value is a name (`str`). `meta[name]` is the fake tensor, symbolic size or number that the
    traced program gave to it, where it has one: lowerings read rank, dtype and static sizes there.
    `out` is the same for the node being lowered, and `shared_params` are the parameters that
    several nodes use, which therefore stay in the layout that the model gave them.
    """

    def __init__(
        self,
        weights: Callable[[str, Stored], TensorProto],
        variant: Table | None = None,
        *,
        batch_invariant: bool = False,
    ):
        """`variant`: rules that come before the portable ones; `varied` counts the nodes they took.
        `batch_invariant`: a token's row must not depend on how many tokens share its call.
        """
        self.variant = variant
        self.batch_invariant = batch_invariant
        self.varied = 0
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.meta: dict[str, Any] = {}
        self.out: Any = None
        self.shared_params: set[str] = set()
        self.scope = ""
        self.common: set[str] = set()  # values that every layer reads alike: see branch.py
        self.above: tuple[list[onnx.NodeProto], dict[tuple[Any, ...], tuple[str, ...]]] | None = (
            None
        )
        self.lowered: dict[str, list[Call]] = {}  # the calls that a value is the result of
        self.composed: dict[str, Param] = {}  # what nodes make of a parameter's parts
        self.instead: dict[str, str] = {}  # result -> the same, written elsewhere (a variant's)
        self.refused: dict[str, None] = {}  # why a variant takes no node that it might have
        self._weights = weights
        self._constants: dict[tuple[Any, ...], str] = {}
        self._names: dict[str, int] = {}
        self.reused: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # of values that no traced node stands for
        self.counts: Collection[Any] | None = None  # symbols of sizes that are never 0; None: all
        self.vectors: dict[str, str] = {}  # rank-0 size -> the [1] value that it was taken from

    # Writing

    def name(self, stem: str) -> str:
        """A fresh value name."""
        stem = f"{self.scope}{stem}"
        count = self._names.get(stem, 0)
        self._names[stem] = count + 1
        return stem if count == 0 else f"{stem}~{count}"

    def node(
        self, op: str, *inputs: str | None, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> Any:
        """Add a node; returns its output's name, or a tuple of names where `outputs` > 1.

        An equal node written before is returned instead (every operator here is pure).
        A `Param` among the inputs becomes an initializer.
        """
        operands = [self.use(i) if i else "" for i in inputs]
        while operands and not operands[-1]:  # ONNX Runtime 1.31 crashes on an empty last bias
            operands.pop()
        # str, since the repr of a graph names only its size
        given = tuple((k, str(v)) for k, v in sorted(attributes.items()))
        key = (op, domain, tuple(operands), outputs, given)
        if key not in self.reused:
            names = [self.name(op if outputs == 1 else f"{op}.{i}") for i in range(outputs)]
            made = helper.make_node(op, operands, names, name=names[0], domain=domain, **attributes)
            common = self._common(operands, attributes)
            nodes, reused = self.above if self.above and common else (self.nodes, self.reused)
            nodes.append(made)
            reused[key] = self.reused[key] = tuple(names)
            self.common.update(names if common else ())
        found = self.reused[key]
        return found[0] if outputs == 1 else found

    def _common(self, operands: Sequence[str], attributes: Mapping[str, Any]) -> bool:
        if not self.common.intersection(operands):
            return False
        graphs = any(isinstance(a, onnx.GraphProto) for a in attributes.values())
        return not graphs and self.common.union(self._constants.values(), [""]).issuperset(operands)

    def use(self, x: str) -> str:
        """The value's plain name; a parameter is written first, in the model's layout."""
        return self.weight(x) if isinstance(x, Param) else x

    def weight(self, param: Param, transpose: bool = False) -> str:
        """A parameter: a small one inline, a large one in the shared weights file.

        `transpose` stores a matrix [out, in] as [in, out], under the name `<name>.T`.
        """
        if not transpose and (whole := composed(param.stored)):
            return self._composed(param, whole)
        name = f"{param}.T" if transpose else str(param)
        key = ("weight", name)
        if key not in self._constants:
            value = param.stored.changed(torch.t) if transpose else param.stored
            inline = value.blank.numel() <= _INLINE
            made = small(name, value.read()) if inline else self._weights(name, value)
            self.initializers.append(made)
            self.meta[name] = value.blank
            self._names.setdefault(name, 1)
            self._constants[key] = name
        return self._constants[key]

    def _composed(self, param: Param, stored: Factored | Offsets) -> str:
        """A parameter that nodes make of its parts; onnxruntime does so once, when it opens the graph."""
        parts = [self.cast(self.weight(part), torch.float32) for part in self.parts(param)]
        if isinstance(stored, Factored):
            rows, few = stored.coarse.blank.shape
            coarse = self.node("Unsqueeze", parts[0], self.ints(2))
            scaled = self.node(
                "Mul", self.node("Reshape", parts[1], self.ints(rows, few, -1)), coarse
            )
            made: str = self.node("Reshape", scaled, self.ints(*stored.blank.shape))
        else:
            moved = self.node("Mul", parts[0], self.constant(stored.middle, torch.float32))
            made = self.node("Transpose", self.node("Add", parts[1], moved), perm=[1, 0])
        self.meta[made] = stored.blank
        self.composed[made] = param
        return made

    @staticmethod
    def parts(param: Param) -> tuple[Param, ...]:
        """What a parameter is composed of: of factors the coarse and the fine, of offsets the scales and the least."""
        stored = composed(param.stored)
        if isinstance(stored, Factored):
            return Param(f"{param}.coarse", stored.coarse), Param(f"{param}.fine", stored.fine)
        if isinstance(stored, Offsets):
            return Param(stored.scales_name, stored.scales), Param(f"{param}.least", stored.least)
        return ()

    def viewed(self, param: Param, shape: Sequence[int]) -> str:
        """A parameter's own bytes under another shape."""
        name = f"{param}.{len(shape)}d"
        if ("weight", name) not in self._constants:
            whole = self.weight(param)
            proto = TensorProto()
            proto.CopyFrom(next(i for i in self.initializers if i.name == whole))
            proto.name = name
            del proto.dims[:]
            proto.dims.extend(shape)
            self.initializers.append(proto)
            self.meta[name] = param.stored.blank.reshape(tuple(shape))
            self._names.setdefault(name, 1)
            self._constants["weight", name] = name
        return self._constants["weight", name]

    def entries(self, param: Param, names: Sequence[str]) -> list[TensorProto]:
        """A parameter's own bytes as one initializer per entry of its first axis, for graphs inside."""
        if param.stored.blank.numel() <= _INLINE:
            values = param.stored.read()
            return [small(name, part) for name, part in zip(names, values, strict=True)]
        whole = self._weights(str(param), param.stored)
        place = {e.key: e.value for e in whole.external_data}
        size = int(place["length"]) // len(names)
        made = []
        for i, name in enumerate(names):
            part = TensorProto(
                name=name, data_type=whole.data_type, data_location=whole.data_location
            )
            part.dims.extend(whole.dims[1:])
            where = {**place, "offset": int(place["offset"]) + i * size, "length": size}
            for key, value in where.items():
                part.external_data.add(key=key, value=str(value))
            made.append(part)
        return made

    def constant(self, value: Any, dtype: Any = None) -> str:
        """A small constant (array, tensor, list or number); equal constants are one initializer."""
        if isinstance(dtype, torch.dtype) or isinstance(value, torch.Tensor):
            tensor = torch.as_tensor(value, dtype=dtype)
        else:
            tensor = torch.from_numpy(np.array(value, dtype=dtype))
        key = ("constant", tensor.dtype, tuple(tensor.shape), _bytes(tensor))
        if key not in self._constants:
            short = str(tensor.item()) if tensor.dim() == 0 else str(tensor.dtype).split(".")[1]
            name = self.name(f"const.{short}")
            self.initializers.append(small(name, tensor))
            self._dtypes[name] = tensor.dtype
            self._constants[key] = name
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """A 1-D int64 constant, as shapes, axes and bounds are given."""
        return self.constant(np.array(values, np.int64))

    def prune(self, outputs: Iterable[str]) -> None:
        """Drop the nodes that `outputs` do not need, and initializers, which branches share with what is around."""
        needed = set(outputs)
        kept = []
        for made in reversed(self.nodes):
            if needed.intersection(made.output):
                kept.append(made)
                needed.update(reads(made))
        self.nodes = kept[::-1]
        self.initializers = [i for i in self.initializers if self.above or i.name in needed]

    # Asking

    def shape(self, name: str) -> tuple[Any, ...]:
        """Sizes of a tensor value: numbers, or `torch.SymInt` where symbolic."""
        value = name.stored.blank if isinstance(name, Param) else self.meta.get(name)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            return ()
        if not isinstance(value, torch.Tensor):
            raise LoweringError(f"onnx: the shape of '{name}' is not known")
        return tuple(value.shape)

    def rank(self, name: str) -> int:
        """Number of axes of a value."""
        return len(self.shape(name))

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a value; symbolic sizes are int64, symbolic floats float64."""
        found = self._dtype(name)
        if found is None:
            raise LoweringError(f"onnx: the dtype of '{name}' is not known")
        return found

    def _dtype(self, name: str) -> torch.dtype | None:
        value = name.stored.blank if isinstance(name, Param) else self.meta.get(name)
        if isinstance(value, torch.Tensor):
            return value.dtype
        if isinstance(value, (bool, torch.SymBool)):
            return torch.bool
        if isinstance(value, (int, torch.SymInt)):
            return torch.int64
        if isinstance(value, (float, torch.SymFloat)):
            return torch.float64
        return self._dtypes.get(name)

    # Idioms

    def cast(self, x: str, dtype: torch.dtype) -> str:
        """Cast, or the value itself where its dtype is already that."""
        if self._dtype(x) == dtype:
            return x
        out: str = self.node("Cast", x, to=DTYPES[dtype])
        self._dtypes[out] = dtype
        return out

    def operand(self, x: Any, dtype: torch.dtype) -> str:
        """A value cast to `dtype`, or a number as a constant of it."""
        return self.cast(x, dtype) if isinstance(x, str) else self.constant(x, dtype)

    def promoted(self, *operands: Any) -> torch.dtype:
        """The dtype that torch computes in for these operands (values and numbers)."""
        stand_ins = [self._stand_in(x) for x in operands]
        found = stand_ins[0].dtype if len(stand_ins) == 1 else torch.result_type(*stand_ins[:2])
        for other in stand_ins[2:]:
            found = torch.result_type(torch.empty(1, dtype=found), other)
        return found

    def _stand_in(self, x: Any) -> Any:
        value = self.meta.get(x) if isinstance(x, str) else x
        if isinstance(value, (bool, torch.SymBool)):
            return True
        if isinstance(value, (int, torch.SymInt)):
            return 1
        if isinstance(value, (float, torch.SymFloat)):
            return 1.0
        return torch.empty((1,) * min(self.rank(x), 1), dtype=self.dtype(x))

    def size(self, x: str, axis: int) -> str:
        """The rank-0 int64 size of an axis that is counted from the front."""
        vector = self.node("Shape", x, start=axis, end=axis + 1)
        scalar: str = self.node("Squeeze", vector)
        self.vectors[scalar] = vector
        self._dtypes[scalar] = torch.int64
        return scalar

    def vector(self, size: Size) -> str:
        """A size as a value of shape [1]."""
        if isinstance(size, int):
            return self.ints(size)
        if size not in self.vectors:
            self.vectors[size] = self.node("Reshape", self.cast(size, torch.int64), self.ints(1))
        return self.vectors[size]

    def concat_ints(self, values: Sequence[Size]) -> str:
        """A 1-D int64 value out of numbers and rank-0 int64 values (symbolic sizes)."""
        parts: list[str] = []
        run: list[int] = []
        for value in [*values, None]:
            if isinstance(value, int):
                run.append(value)
                continue
            if run:
                parts.append(self.ints(*run))
                run = []
            if value is not None:
                parts.append(self.vector(value))
        if len(parts) <= 1:
            return parts[0] if parts else self.ints()
        out: str = self.node("Concat", *parts, axis=0)
        return out

    def reshape(
        self,
        x: str,
        sizes: Sequence[Size],
        shape: Sequence[Any] | None = None,
        source: Sequence[Any] | None = None,
    ) -> str:
        """Reshape to `sizes`; where the target `shape` is known too, in the constant form.

        A size equal to the input's of the same axis is copied (0) and one other may be inferred
        (-1), so a traced view seldom needs its symbolic sizes computed. `source` is the shape of
        x, for a value that no traced node stands for.
        """
        target = list(sizes)
        if shape is not None:
            source = self.shape(x) if source is None else source
            if same_shape(source, shape):
                return x
            target = self._settle(source, target, shape)
        out: str = self.node("Reshape", x, self.concat_ints(target))
        return out

    def inferred(self, shape: Sequence[Any], axis: int) -> bool:
        """Whether ONNX finds this size of a shape by the others: none of them may be 0."""
        others = [size for i, size in enumerate(shape) if i != axis]
        symbols = set[Any]().union(*(free_symbols(n) for n in others if not isinstance(n, int)))
        return 0 not in (n for n in others if isinstance(n, int)) and (
            self.counts is None or symbols <= set(self.counts)
        )

    def _settle(self, source: Sequence[Any], sizes: list[Size], shape: Sequence[Any]) -> list[Size]:
        """Numbers, 0 = copied, -1 = inferred, and only then the names in `sizes`."""
        target: list[Size] = []
        unknown = []
        for i, size in enumerate(shape):
            if isinstance(size, int):
                target.append(size)
            elif i < len(source) and same(source[i], size):
                target.append(0)
            else:
                unknown.append(i)
                target.append(sizes[i])
        if unknown and -1 not in target and self.inferred(shape, unknown[-1]):
            target[unknown[-1]] = -1
        return target

    def linear_weight(self, weight: str) -> tuple[str, bool]:
        """The right operand of x @ weight.T, and whether it still has to be transposed."""
        if isinstance(weight, Param) and weight not in self.shared_params:
            return self.weight(weight, transpose=True), False
        return self.use(weight), True


def finished(
    b: Builder, name: str, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    """The builder's graph as a model, which names the domain of every node in it. Raises LoweringError where a node
    reads a value that nothing makes.
    """
    graph = helper.make_graph(b.nodes, name, inputs, outputs, initializer=b.initializers)
    _check_reads(graph, {""})
    domains = sorted({MICROSOFT, *(n.domain for n in b.nodes)} - {""})
    opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="accel"
    )


def _check_reads(graph: onnx.GraphProto, made: set[str]) -> None:
    """Raise LoweringError where a node reads what was not made before it. `made`: names so far, to which these are
    added; those of inner graphs too.
    """
    made.update(x.name for x in (*graph.input, *graph.initializer))
    for node in graph.node:
        for lost in (x for x in node.input if x not in made):
            raise LoweringError(
                f"onnx: node {node.name} ({node.op_type}) of {graph.name} reads '{lost}', which nothing makes; the "
                "rule that wrote it lost a parameter (pass a Param on as it is, not as str)"
            )
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _check_reads(attribute.g, made)
        made.update(node.output)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node reads, those inside its own graphs included."""
    yield from node.input
    for attribute in node.attribute:
        yield from (o.name for o in attribute.g.output)
        for inner in attribute.g.node:
            yield from reads(inner)


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal; asks without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(map(same, a, b))


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def small(name: str, tensor: torch.Tensor) -> TensorProto:
    """A tensor whose bytes stand in the graph itself."""
    proto = TensorProto(name=name, data_type=DTYPES[tensor.dtype], raw_data=_bytes(tensor))
    proto.dims.extend(tensor.shape)
    return proto
