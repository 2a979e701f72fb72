"""Programs -> step.onnx, its variants, and the weights.bin that they share."""

from __future__ import annotations

import importlib
import operator
import pkgutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_arg

from accel.ir.entries import kind_of
from accel.ir.entries.step import STEP
from accel.ir.ops.attention import attention, operands_of
from accel.ir.ops.quantized import quantized_linear
from accel.ir.program import Program
from accel.ir.region import Conditional, Entry, Region, graphs_of
from accel.ir.state import state_of
from accel.ir.weights import Stored, composed
from accel.lowering import Table
from accel.lowering.onnx import rules
from accel.lowering.onnx.probe import attention_probe, products_probe
from accel.lowering.onnx.variants import PORTABLE, variants
from accel.lowering.onnx.writer.branch import SEEDS, either
from accel.lowering.onnx.writer.builder import DTYPES, Builder, Param, finished, small
from accel.lowering.onnx.writer.fallback import lower_node
from accel.lowering.onnx.writer.outputs import name_outputs

WEIGHTS = "weights.bin"
_PAGE, _LINE = 4096, 64  # large weights begin on a page, to be mapped; small ones on a cache line
_BLOCK = 1 << 22  # elements copied at a time


def load_rules() -> None:
    """Import every file of lowering rules."""
    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")


@dataclass
class WeightsFile:
    """Streams parameters into one file, each once, and gives ONNX the place where it lies."""

    file: BinaryIO

    def __post_init__(self) -> None:
        self._places: dict[str, TensorProto] = {}

    def add(self, name: str, stored: Stored) -> TensorProto:
        """Write a parameter; a second entry that uses it is given the same place."""
        if name not in self._places:
            tensor = stored.read()
            large = tensor.numel() * tensor.element_size() >= 16 * _PAGE
            self.file.write(b"\0" * (-self.file.tell() % (_PAGE if large else _LINE)))
            start = self.file.tell()
            _write(self.file, tensor)
            proto = TensorProto(
                name=name, data_type=DTYPES[tensor.dtype], data_location=TensorProto.EXTERNAL
            )
            proto.dims.extend(tensor.shape)
            where = {"location": WEIGHTS, "offset": start, "length": self.file.tell() - start}
            for key, value in where.items():
                proto.external_data.add(key=key, value=str(value))
            self._places[name] = proto
        return self._places[name]

    def offset(self, name: str) -> int | None:
        """Where a parameter begins; none where it was not written here."""
        if name not in self._places:
            return None
        return next(int(e.value) for e in self._places[name].external_data if e.key == "offset")


def _write(file: BinaryIO, tensor: Tensor) -> None:
    """Append a tensor's bytes in row order, a block of rows at a time."""
    rows = tensor.detach().cpu()
    step = max(1, _BLOCK // max(1, rows[0].numel())) if rows.dim() > 1 else _BLOCK
    for part in rows.split(step) if rows.dim() else [rows]:
        bits = part.contiguous()
        if bits.numel():
            file.write(bits.flatten().view(torch.uint8).numpy().data)


def export(program: Program, folder: Path, *, batch_invariant: bool = False) -> dict[str, Any]:
    """`export_all` of one program."""
    return export_all({"": program}, folder, batch_invariant=batch_invariant)[""]


def export_all(
    programs: Mapping[str, Program], folder: Path, *, batch_invariant: bool = False
) -> dict[str, dict[str, Any]]:
    """Write every entry of programs, by what the names of their files begin with, and the weights that they share: a
    name is one parameter, whichever program reads it. Returns `entries` for the manifest of each.

    The step has a file more for each variant that takes any of its nodes, and then small probes by
    which the variants are compared. `batch_invariant` leaves out those that do not promise it, of the first program;
    nobody relies on it of others.

    Raises:
        LoweringError: an operator has no ONNX form.
    """
    load_rules()
    found: dict[str, dict[str, Any]] = {}
    with (folder / WEIGHTS).open("wb") as file:
        weights = WeightsFile(file)
        for prefix, program in programs.items():
            exact = batch_invariant and not found
            found[prefix] = _entries(program, weights, folder, prefix, exact)
    for program in programs.values():
        _map_params(program, weights, folder / WEIGHTS)
    return found


def _entries(
    program: Program, weights: WeightsFile, folder: Path, prefix: str, batch_invariant: bool
) -> dict[str, Any]:
    """Write every entry of a program; what its manifest says of them."""
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in program.entries.items():
        builder = Builder(weights.add, batch_invariant=batch_invariant and name == STEP.name)
        file = f"{prefix}{name}.onnx"
        onnx.save_model(lower_entry(program, entry, weights, builder), folder / file)
        state = {s.name for s in program.state}
        entries[name] = {
            "file": file,
            "inputs": [i for i in entry.inputs if i not in state],
            "outputs": [o for o in entry.outputs if state_of(o) not in state],
        }
    tables = [t for t in variants() if t.batch_invariant or not batch_invariant]
    for table in tables:
        if reason := table.missing():
            program.facts.notes.append(f"without the variant '{table.target}': {reason}")
    tables = [t for t in tables if not t.missing()]
    for name in entries:
        if (kind := kind_of(name)) is not None and kind.variants:
            entries[name].update(
                _variants(program, name, tables, weights, folder, prefix, batch_invariant)
            )
    return entries


def _variants(
    program: Program,
    entry: str,
    tables: list[Table],
    weights: WeightsFile,
    folder: Path,
    prefix: str,
    batch_invariant: bool,
) -> dict[str, dict[str, str]]:
    """Write an entry's variants, and the step's probes; what the manifest says of them."""
    files: dict[str, str] = {}
    portable = onnx.load_model(folder / f"{prefix}{entry}.onnx", load_external_data=False)
    nodes = {PORTABLE: len(portable.graph.node)}
    for table in tables:
        builder = Builder(weights.add, table, batch_invariant=batch_invariant)
        model = lower_entry(program, program.entries[entry], weights, builder)
        if builder.varied:
            nodes[table.target] = len(model.graph.node)
            files[table.target] = f"{prefix}{entry}.{table.target}.onnx"
            onnx.save_model(model, folder / files[table.target])
        for reason in builder.refused:
            program.facts.notes.append(f"variant '{table.target}' of {entry}: {reason}")
    if not files:
        return {}
    if entry != STEP.name:
        return {"variants": files}
    found: dict[str, dict[str, str]] = {"variants": files, "probes": {}, "products": {}}
    for variant in (None, *(t for t in tables if t.target in files)):
        name = PORTABLE if variant is None else variant.target
        if program.nodes(attention.default, entry=program.step):
            found["probes"][name] = f"{prefix}probe.{name}.onnx"
            probe = attention_probe(program, variant, nodes[name], batch_invariant)
            onnx.save_model(probe, folder / found["probes"][name])
        own = variant is None or quantized_linear.default in variant.rules
        if own and program.nodes(quantized_linear.default, entry=program.step):
            found["products"][name] = f"{prefix}products.{name}.onnx"
            probe = products_probe(program, variant, nodes[name], weights.add)
            onnx.save_model(probe, folder / found["products"][name])
    return found


def _map_params(program: Program, weights: WeightsFile, file: Path) -> None:
    """Let the program read its parameters out of the file, so that the model's memory can go."""
    storage: Any = torch.UntypedStorage.from_file(str(file), False, file.stat().st_size)
    for name in list(program.params):
        if composed(program.params.stored(name)):
            continue  # its parts lie in files of their own
        blank = program.params.blank(name)
        for stored, flipped in ((name, False), (f"{name}.T", True)):
            offset = weights.offset(stored)
            if offset is not None:
                wanted = blank.t() if flipped else blank
                mapped = torch.empty(0, dtype=blank.dtype).set_(
                    storage, offset // blank.element_size(), wanted.shape, _row_major(wanted.shape)
                )
                program.params[name] = mapped.t() if flipped else mapped
                break
        else:  # written into the graph itself; a view would keep the whole checkpoint mapped
            program.params[name] = program.params[name].clone()


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def lower_entry(
    program: Program, entry: Entry, weights: WeightsFile, builder: Builder | None = None
) -> onnx.ModelProto:
    """One entry as an ONNX model whose large weights lie in the weights file."""
    b = builder or Builder(weights.add)
    b.shared_params = shared(program, entry)
    if "tokens" in program.step.inputs:
        b.counts = free_symbols(program.step.input("tokens").meta["val"].shape)
    paged = any(operands_of(n).pages for n in program.nodes(attention.default, entry=entry))
    if paged or any(isinstance(node.target, Conditional) for node in entry.graph.nodes):
        where = (s.name for s in program.state if s.positions)
        b.common.update(set(entry.inputs).intersection({*SEEDS, *where}))
    b.initializers += [small(name, value) for name, value in entry.defaults.items()]
    inputs = {n: n for n in entry.inputs}
    values = _graph(b, program, entry.graph, inputs)
    outputs = dict(zip(entry.outputs, values, strict=True))
    name_outputs(b, outputs)
    if b.variant is not None:
        b.variant.join(b, outputs)
    b.prune(outputs)
    nodes = entry.output_nodes()
    return finished(
        b,
        "step",
        [_info(program, n, entry.input(n)) for n in entry.inputs],
        [_info(program, n, nodes[n]) for n in outputs],
    )


def shared(program: Program, entry: Entry) -> set[str]:
    """Parameters that several nodes of an entry read, which therefore keep the model's layout."""
    uses: Counter[str] = Counter()
    for graph in program.graphs(entry):
        for node in graph.find_nodes(op="get_attr"):
            uses[str(node.target)] += len(node.users)
    return {name for name, count in uses.items() if count > 1}


def _graph(b: Builder, program: Program, graph: fx.Graph, inputs: Mapping[str, str]) -> list[str]:
    """Lower a graph, regions in line; returns the names of what it returns."""
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            found: list[str] = list(map_arg(node.args[0], env.__getitem__))
            return [b.instead.get(value, value) for value in found]
        env[node] = _node(b, program, node, env, inputs)
        if isinstance(env[node], str):
            b.meta.setdefault(env[node], node.meta.get("val"))
    raise ValueError("a graph without an output")


def _node(
    b: Builder,
    program: Program,
    node: fx.Node,
    env: Mapping[fx.Node, Any],
    inputs: Mapping[str, str],
) -> Any:
    if node.op == "placeholder":
        return inputs[str(node.target)]
    if node.op == "get_attr":
        return Param(str(node.target), program.params.stored(str(node.target)))
    args: Any = map_arg(node.args, env.__getitem__)
    kwargs: Any = map_arg(node.kwargs, env.__getitem__)
    if isinstance(node.target, Region):
        outer, b.scope = b.scope, f"{b.scope}{node.target.name}/"
        first, *other = (partial(_region, b, program, g, args) for g in graphs_of(node.target))
        values = either(b, args[0], first, other[0], node.meta["val"]) if other else tuple(first())
        b.scope = outer
        return values
    if node.target is operator.getitem:
        return args[0][args[1]]
    return lower_node(b, node, args, kwargs)


def _region(b: Builder, program: Program, graph: fx.Graph, args: Sequence[str]) -> list[str]:
    names = [str(p.target) for p in graph.find_nodes(op="placeholder")]
    return _graph(b, program, graph, dict(zip(names, args, strict=True)))


def _info(program: Program, name: str, node: fx.Node) -> onnx.ValueInfoProto:
    value = node.meta["val"]
    sizes = [d if isinstance(d, int) else program.dims.get(str(d), str(d)) for d in value.shape]
    return helper.make_tensor_value_info(name, DTYPES[value.dtype], sizes)
