"""The operators of a model's step, each alone: how far from the reference, and what share of the machine's limit.

    python tools/bench/bench_operators.py ARTIFACT --rows 1,8,512 --depths 512,4096

Cases are the artifact's own: each product of another form in its step, with the weights that it has there, and its
attention as its probes hold it. A product's reference is computed by numpy in float64 from the stored codes; `portable`
and `native` are what a step runs in these variants. Attention's reference is the portable graph, which is also timed;
beside it `triton`, which runs where a GPU is or TRITON_INTERPRET is set (then for the difference alone). Rates count
bytes of weights or of keys and values (GB/s), or products (GMAC/s); a share is of this machine's read bandwidth or of
its peak of the type that is multiplied, whichever limits the operator more.

In a step of a few tokens nothing lies in a cache when it is read. So a product of few rows is run over copies of its
weights, of more bytes than caches hold, and before attention of few rows other memory is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnx
import typer
from onnx import TensorProto, helper, numpy_helper
from turns import head, in_turns, median_range, row, seconds

from accel.commands.conditions import Conditions
from accel.commands.shares import limit_text, percent
from accel.ir.ops.quantized import pack, unpack, unpack_blocks, zero_bits
from accel.ir.state import writes_state
from accel.lowering.onnx.native import DOMAIN, library
from accel.lowering.onnx.variants import NATIVE, PORTABLE
from accel.runtime.artifact.artifact import Artifact, open_artifact
from accel.runtime.backends.onnx.open import open_session
from accel.runtime.backends.onnx.peaks import Peaks, peaks
from accel.runtime.backends.onnx.work import FLOAT32, Product, work_of

ACTIVATED: dict[int, Callable[[Any], Any]] = {  # the gates of native/linear.cc
    1: lambda x: x / (1 + np.exp(-x)),
    2: lambda x: x * (1 + np.vectorize(__import__("math").erf)(x / 2**0.5)) / 2,
    3: lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
}
PASSES = 3  # calls of a turn, of which the least counts
FEW = 16  # rows up to which memory limits
COLD = 1 << 27  # bytes, several times what caches hold
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is run: ways by name, and what each should give; what all of them read and multiply."""

    name: str
    shape: str
    ways: dict[str, Callable[[], Any] | None]
    wanted: Arrays
    bytes: float
    products: float
    kind: str
    copies: int = 1  # that a call computes; all else is of one
    cold: bool = False  # whether other memory is read before a call

    def limit(self, peak: Peaks) -> tuple[float, bool]:
        """Seconds at the machine's limit, and whether memory is what limits."""
        rate = {"int8": peak.int8, FLOAT32: peak.float32}[self.kind] or float("inf")
        reading, multiplying = self.bytes / peak.read, self.products / rate
        return max(reading, multiplying), reading > multiplying


def difference(wanted: Any, got: Any) -> float:
    """The largest, as a share of the largest number that is wanted."""
    return float(np.abs(got - wanted).max() / max(float(np.abs(wanted).max()), 1e-30))


def forms(products: list[Product]) -> list[tuple[Product, int]]:
    """One product of each form, and how many there are."""
    same: dict[Any, list[Product]] = {}
    for one in products:
        same.setdefault(one.form, []).append(one)
    return [(group[0], len(group)) for group in same.values()]


def normed(x: Any, weight: Any, epsilon: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


@dataclass(frozen=True)
class Weight:
    """The constants of a Linear: codes [N,blocks,block], scales [N,blocks], the codes of zero and offsets of the same
    shape or none.
    """

    codes: Any
    scales: Any
    zeros: Any
    offsets: Any
    bits: int

    @classmethod
    def of_operands(cls, arrays: list[Any], bits: int, block: int, middle: int) -> Weight:
        """`arrays`: by place, None where there is none."""
        import torch

        q, zeros, fine = arrays[1], arrays[3], arrays[8]
        scales = numbers(arrays[2], fine)
        codes = unpack_blocks(torch.tensor(q), bits, scales.shape[1], block).numpy()
        if zeros is not None:
            points = unpack(torch.tensor(zeros), zero_bits(bits))
            zeros = points[:, : scales.shape[1]].numpy()
        offsets = None if arrays[7] is None else numbers(arrays[7], arrays[9]) + middle * scales
        return cls(codes, scales, zeros, offsets, bits)

    @property
    def whole(self) -> Any:
        """In float64, [N,blocks * block]."""
        middle = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[..., None]
        weights = (self.codes.astype(np.float64) - middle) * self.scales[..., None]
        if self.offsets is not None:
            weights = weights + self.offsets[..., None]
        return weights.reshape(len(weights), -1)


def numbers(coarse: Any, fine: Any) -> Any:
    """Scales or offsets in float32, whose own of several blocks times those of each, where they lie so."""
    coarse = coarse.astype(np.float32)
    if fine is None:
        return coarse
    return coarse.repeat(fine.shape[1] // coarse.shape[1], 1) * fine


def linear(
    x: Any, weight: Weight, bias: Any, norm: Any, more: Any, gate: int, epsilon: float
) -> Any:
    """accel's Linear in float64: x [T,K] -> [T,N], half as wide with a gate."""
    x = x.astype(np.float64)
    if norm is not None:
        x = normed(x, norm, epsilon)
    out = x @ weight.whole[:, : x.shape[-1]].T
    out = out if bias is None else out + bias
    if gate:
        first, second = np.split(out, 2, -1)
        out = ACTIVATED[gate](first) * second
    return out if more is None else out + more


def weights_of(model: onnx.ModelProto, folder: Path, names: list[str]) -> Arrays:
    """Some of a graph's constants."""
    found = {}
    for one in model.graph.initializer:
        if one.name in names:
            read = onnx.TensorProto()
            read.CopyFrom(one)
            if onnx.external_data_helper.uses_external_data(read):
                onnx.external_data_helper.load_external_data_for_tensor(read, str(folder))
            value = numpy_helper.to_array(read)
            found[one.name] = value.astype(np.float32) if read.data_type == TensorProto.BFLOAT16 else value  # fmt: skip
    return found


def alone(
    nodes: list[Any], given: Arrays, held: list[Any], wanted: str, out: Path, threads: int, copies: int
) -> Callable[[], Any]:  # fmt: skip
    """A call of some nodes, as often as there are copies of the constants `held`: `given` are inputs, and `wanted` is
    what they give.
    """
    info = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in given.items()
    ]
    all_nodes, constants, results = [], [], []
    for i in range(copies):

        def renamed(name: str, i: int = i) -> str:
            return name if not name or name in given else f"{name}/{i}"

        for node in nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = [renamed(n) for n in node.input]
            copy.output[:] = [renamed(n) for n in node.output]
            copy.name = ""
            all_nodes.append(copy)
        for one in held:
            constant = onnx.TensorProto()
            constant.CopyFrom(one)
            constant.name = renamed(one.name)
            constants.append(constant)
        results.append(helper.make_tensor_value_info(renamed(wanted), TensorProto.FLOAT, None))
    graph = helper.make_graph(all_nodes, "alone", info, results, constants)
    opsets = [helper.make_opsetid(d, n) for d, n in (("", 24), (DOMAIN, 1), ("com.microsoft", 1))]
    path = out / f"alone.{NATIVE}.onnx"  # whose operators are registered
    onnx.save_model(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    session = open_session(path, threads, resting=True)
    path.unlink()
    return lambda: session.run(None, given)[0]


def product_case(
    one: Product, count: int, rows: int, model: onnx.ModelProto, folder: Path, out: Path, threads: int
) -> Case | None:  # fmt: skip
    """A product as native and as portable operators; None where it is no Linear."""
    if (one.node.domain, one.node.op) != (DOMAIN, "Linear"):
        return None
    node = next(n for n in model.graph.node if n.output[0] == one.node.outputs[0])
    names = [*node.input, *[""] * (10 - len(node.input))]
    arrays = weights_of(model, folder, names)
    held = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    rng = np.random.default_rng(0)
    settings = one.node.settings
    gate, bits, block = int(settings.get("gate", 0)), one.bits, int(settings["block"])
    wide = one.wide // 2 if gate else one.wide
    given = {names[0]: rng.standard_normal((1, rows, one.deep)).astype(np.float32)}
    if names[6]:
        given[names[6]] = rng.standard_normal((1, rows, wide)).astype(np.float32)
    x, more = given[names[0]][0], given[names[6]][0] if names[6] else None
    operands = [arrays.get(name) for name in names]
    weight = Weight.of_operands(operands, bits, block, int(settings.get("middle", 0)))
    bias, norm = operands[4], operands[5]
    epsilon = float(settings.get("epsilon", 0))
    wanted = {
        "native": linear(x, weight, bias, norm, more, gate, epsilon)[None],
        "portable": linear(x, weight, bias, None, None, 0, 0.0)[None],
    }
    copies = max(1, COLD // one.bytes) if rows <= FEW else 1
    ways = {
        "native": alone([node], given, held, node.output[0], out, threads, copies),
        "portable": portable(weight, bias, {"x": given[names[0]]}, out, threads, copies),
    }
    shape = f"{count} x [{rows},{one.deep}] [{one.deep},{one.wide}]"
    products = float(rows * one.deep * one.wide)
    kind = f"{bits} bits" + (" with offsets" if names[7] else "")
    return Case(f"product, {kind}", shape, ways, wanted, one.bytes, products, one.kind, copies)


def portable(
    weight: Weight, bias: Any, given: Arrays, out: Path, threads: int, copies: int
) -> Callable[[], Any]:
    """MatMulNBits of 4 or 8 bits, two where codes have 5 or 6, and the sums of blocks times offsets: the product alone,
    without what the native operator does beside it.
    """
    bits, codes, scales = weight.bits, weight.codes, weight.scales
    (rows, blocks, block), deep = codes.shape, given["x"].shape[-1]
    held: Arrays = {}
    nodes: list[Any] = []

    def product(codes: Any, scales: Any, zeros: Any, bits: int, bias: Any = None) -> str:
        n = str(len(nodes))
        constants = {"q": packed(codes, bits), "s": scales, "z": zeros, "b": bias}
        names = {k: k + n for k, v in constants.items() if v is not None}
        held.update({names[k]: v for k, v in constants.items() if v is not None})
        operands = ["x", names["q"], names["s"], names.get("z", ""), "", names.get("b", "")]
        while not operands[-1]:
            operands.pop()
        sizes = {"K": deep, "N": rows, "bits": bits, "block_size": block, "accuracy_level": 4}
        nodes.append(
            helper.make_node("MatMulNBits", operands, ["y" + n], domain="com.microsoft", **sizes)
        )
        return "y" + n

    def total(a: str, b: str) -> str:
        nodes.append(helper.make_node("Add", [a, b], [f"t{len(nodes)}"]))
        return str(nodes[-1].output[0])

    middle = 2 ** (bits - 1)
    if bits in (5, 6):
        none = np.zeros((rows, -(-blocks // 2)), np.uint8)
        found = product(codes & 15, scales, none, 4, bias)
        more = (codes >> 4) + np.uint8(8 - middle // 16)
        found = total(found, product(more, scales * 16, None, 4))
    else:
        wide = max(4, bits)
        points = weight.zeros
        if points is None and bits < wide:
            codes = codes + np.uint8(8 - middle)
        zeros = None if points is None else packed(points, wide)
        found = product(codes, scales, zeros, wide, bias)
    if weight.offsets is not None:
        held |= {
            "shape": np.array([0, 0, -1, block]),
            "last": np.array([-1]),
            "o": weight.offsets.T.copy(),
        }
        nodes += [
            helper.make_node("Reshape", ["x", "shape"], ["blocks"]),
            helper.make_node("ReduceSum", ["blocks", "last"], ["sums"], keepdims=0),
            helper.make_node("MatMul", ["sums", "o"], ["offset"]),
        ]
        found = total(found, "offset")
    constants = [numpy_helper.from_array(a, n) for n, a in held.items()]
    return alone(nodes, given, constants, found, out, threads, copies)


def packed(codes: Any, bits: int) -> Any:
    """Codes [..., n] in bytes, the first in the lowest bits."""
    import torch

    return pack(torch.from_numpy(np.ascontiguousarray(codes)), bits).numpy()


def attention_case(artifact: Artifact, rows: int, depth: int, threads: int) -> Case | None:
    """The attention of a few layers, as the probes hold it: the newest `rows` tokens ask after `depth` tokens."""
    probes = artifact.entries["step"].probes
    if not {PORTABLE, NATIVE} <= probes.keys():
        return None
    rng = np.random.default_rng(0)
    paths = {name: artifact.path / probes[name] for name in (PORTABLE, NATIVE)}
    sessions = {n: open_session(p, threads, resting=True) for n, p in paths.items()}
    given = {i.name: _operand(i, rows, depth, rng) for i in sessions[PORTABLE].get_inputs()}
    model = onnx.load(artifact.path / probes[NATIVE])
    calls = {
        name: (lambda s=s: s.run(None, {i.name: given[i.name] for i in s.get_inputs()})[0])
        for name, s in sessions.items()
    }
    layers = len([o for o in model.graph.output if not writes_state(o.name)])
    state = [i for i in sessions[PORTABLE].get_inputs() if "C" in i.shape and i.name[0] in "kv"]
    heads, width = sessions[PORTABLE].get_inputs()[0].shape[1], given["q.0"].shape[-1]
    before = depth - rows
    pairs = rows * before + rows * (rows + 1) // 2
    node = next((n for n in model.graph.node if n.op_type == "Attention"), None)
    wanted = calls[PORTABLE]()
    ways = {"native": calls[NATIVE], "portable": calls[PORTABLE]}
    if node is not None and given["k.0"].dtype == np.float32 and rows * depth <= 1 << 16:
        ways["triton"] = triton(
            given, {a.name: helper.get_attribute_value(a) for a in node.attribute}
        )
    shape = f"{layers} layers, {heads} heads over {given['k.0'].shape[1]}, {rows} after {before}"
    read = float(sum(given[i.name].nbytes for i in state))
    every = dict.fromkeys(ways, wanted)
    products = 2.0 * layers * heads * width * pairs
    return Case("attention", shape, ways, every, read, products, FLOAT32, cold=rows <= FEW)


def _operand(info: Any, rows: int, depth: int, rng: Any) -> Any:
    letters = {"B": 1, "T": rows, "C": depth, "W": 1}
    shape = [letters[d] if isinstance(d, str) else d for d in info.shape]
    if info.name == "positions":
        return np.arange(depth - rows, depth)[None]
    if info.name == "slots":
        return np.full(shape, depth - rows)
    if info.name.startswith("held"):
        return np.where(np.arange(shape[1]) < depth, np.arange(shape[1]), -1)[None]
    if info.type in ("tensor(int8)", "tensor(uint8)"):
        return rng.integers(1, 99, shape).astype(info.type[7:-1])
    if info.type in ("tensor(int64)", "tensor(bool)"):
        return np.ones(shape, info.type[7:-1])
    values = rng.standard_normal(shape)
    return (np.abs(values) if "scale" in info.name else values).astype(np.float32)


def triton(given: Arrays, settings: Arrays) -> Callable[[], Any] | None:
    """The Triton target's attention over the same operands; None where nothing runs it."""
    import torch

    if not torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
        return None
    from torch import fx
    from torch._subclasses import FakeTensorMode

    from accel.ir.facts import Facts
    from accel.ir.ops.attention import attention
    from accel.ir.program import Editor, Program
    from accel.ir.region import Entry
    from accel.ir.weights import Weights
    from accel.lowering.triton import device
    from accel.lowering.triton.lowered import lower_program

    names = ["q.0", "k.0", "v.0", "positions", "held"]
    operands = [torch.from_numpy(given[n]).to(device()) for n in names]
    graph, mode = fx.Graph(), FakeTensorMode()
    program = Program(Weights(), {"step": Entry(graph, ["out"])}, Facts("attention", 1, 1 << 20))
    nodes = []
    for i, value in enumerate(operands):
        nodes.append(graph.placeholder(f"x{i}"))
        nodes[-1].meta["val"] = mode.from_tensor(value, static_shapes=True)
    masks = ("causal", "window", "chunk", "full")  # as native/slots.h numbers them
    more = (None, settings["scale"], settings["softcap"], masks[settings["mask"]], settings["window"])  # fmt: skip
    out = Editor(program, graph).call(attention.default, *nodes, *more)
    graph.output((out,))
    lowered = lower_program(program)
    inputs = {f"x{i}": value for i, value in enumerate(operands)}

    def call() -> Any:
        found = lowered.run("step", inputs)["out"].cpu()
        return found.numpy()

    return call


def cases(
    artifact: Artifact, rows: list[int], depths: list[int], out: Path, threads: int
) -> list[Case]:
    """Of every form of product with so many rows, and of attention after so many tokens."""
    work = work_of(artifact, NATIVE)
    model = onnx.load(
        artifact.path / artifact.entries["step"].graphs[NATIVE], load_external_data=False
    )
    found = []
    for one, count in forms(work.products):
        for n in rows:
            if not one.asked or n <= FEW:  # the head answers few rows
                given = (one, count, n, model, artifact.path, out, threads)
                found.append(product_case(*given))
    for depth in depths:
        found += [attention_case(artifact, n, depth, threads) for n in rows if n <= depth]
    return [case for case in found if case is not None]


def main(
    path: Annotated[Path, typer.Argument(metavar="ARTIFACT")],
    rows: Annotated[str, typer.Option(help="tokens of a call")] = "1,8,512",
    depths: Annotated[str, typer.Option(help="tokens in the cache, the call's among them")] = "512,4096",
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:  # fmt: skip
    """Print a Markdown table, a row for each case and way of running it."""
    import tempfile

    if (reason := library()[1]) or NATIVE not in open_artifact(path).entries["step"].graphs:
        raise typer.BadParameter(f"{path}: no native graph runs here{reason and ': ' + reason}")
    conditions = Conditions.now()
    if conditions.warning:
        typer.echo(conditions.warning, err=True)
    peak = peaks(threads)
    head(
        "operator", "shape", "kernel", ">largest difference", ">ms (least .. most)", ">GB/s",
        ">GMAC/s", ">share", "limit",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        numbers = ([int(n) for n in text.split(",")] for text in (rows, depths))
        for case in cases(open_artifact(path), *numbers, Path(folder), threads):
            _rows(case, peak, rounds)
    facts = "; ".join(f"{name} {fact}" for name, fact in conditions.ended().text())
    print(f"\n{facts}; {rounds} rounds; {threads} threads: {limit_text(vars(peak))}.")
    if conditions.warning:
        print(f"\n{conditions.warning.capitalize()}.")


def _rows(case: Case, peak: Peaks, rounds: int) -> None:
    import torch

    ways = {name: call for name, call in case.ways.items() if call is not None}
    errors = {name: difference(case.wanted[name], call()) for name, call in ways.items()}
    timed = {n: c for n, c in ways.items() if n != "triton" or torch.cuda.is_available()}

    other = np.ones(COLD // 8 if case.cold else 1)

    def once(call: Callable[[], Any]) -> float:
        other.max()
        return seconds(call) / case.copies

    def turn(call: Callable[[], Any]) -> Callable[[], float]:
        return lambda: min(once(call) for _ in range(PASSES))

    took = in_turns({name: turn(call) for name, call in timed.items()}, rounds, warm=1)
    limit, memory = case.limit(peak)
    for name in ways:
        error = f"{errors[name]:.1e}"
        if name not in took:
            row(case.name, case.shape, name, error, "interpreted", "-", "-", "-", "-")
            continue
        middle = median(took[name])
        row(
            case.name, case.shape, name, error, median_range(took[name], 3, 1e3),
            f"{case.bytes / middle / 1e9:.1f}", f"{case.products / middle / 1e9:.1f}",
            percent(limit / middle), "memory" if memory else f"{case.kind} products",
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
