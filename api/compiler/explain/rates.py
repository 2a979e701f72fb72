"""How fast this machine reads what a decode step reads: weights by their bits, caches by their form.

Measured on graphs of the operators that a step has, once per machine, in a few seconds, and remembered.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from accel.lowering.onnx.native import DOMAIN, library
from accel.lowering.onnx.ort import ort
from accel.runtime.backends.onnx.machine import machine, recall, remember
from accel.runtime.backends.onnx.open import open_session

WIDTH, BLOCK = 512, 64  # of the products that are measured
HEADS, GROUPS, SIZE, SLOTS = 8, 4, 64, 1024  # of the attention
SETS = (
    8 << 20,
    96 << 20,
)  # bytes that a call reads: what a cache of the processor may hold, and what not
KINDS = ("float32", "int8", "int4")  # of weights
CACHES = ("float32", "int8")  # of keys and values
ROUNDS, SECONDS = 12, 0.35  # of one measurement, at most
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Rates:
    """Bytes per second. weights, caches: by kind, for calls that read SETS[0] and SETS[1] in all.

    node: seconds of a node that computes little. native: whether by accel's own operators, else by
    onnxruntime's.
    """

    weights: dict[str, tuple[float, float]]
    caches: dict[str, tuple[float, float]]
    node: float
    native: bool

    def weight(self, kind: str, total: float) -> float:
        """The rate in a call that reads `total` bytes."""
        return _between(self.weights[kind], total)

    def cache(self, kind: str, total: float) -> float:
        """The same of keys and values."""
        return _between(self.caches[kind], total)


def _between(pair: tuple[float, float], total: float) -> float:
    """Between the measured ones by the logarithm of the bytes."""
    share = np.interp(np.log(max(total, 1)), np.log(SETS), (0, 1))
    return float(pair[0] + (pair[1] - pair[0]) * share)


def rates(threads: int, progress: Progress = lambda *_: None) -> Rates:
    """Those of this machine; measured where they are not known yet, in some seconds."""
    native = library()[0] is not None
    key = {**machine(threads), "native": str(library()[0]), "sizes": [*SETS, WIDTH, SLOTS]}
    try:
        value = recall("rates", key)
        pairs = [
            {k: (float(value[part][k][0]), float(value[part][k][1])) for k in kinds}
            for part, kinds in (("weights", KINDS), ("caches", CACHES))
        ]
        found = Rates(pairs[0], pairs[1], float(value["node"]), native)
        if min(found.node, *(r for part in pairs for pair in part.values() for r in pair)) > 0:
            return found
    except (KeyError, TypeError, ValueError, IndexError):
        pass
    with tempfile.TemporaryDirectory(prefix="accel-rates-") as folder:
        found = _measured(Path(folder), threads, native, progress)
    remember("rates", key, asdict(found))
    return found


def _measured(folder: Path, threads: int, native: bool, progress: Progress) -> Rates:
    weights: dict[str, tuple[float, float]] = {}
    for done, kind in enumerate(KINDS):
        progress(f"measuring this machine: {kind} weights", done / 5)
        small, large = (_products(folder, kind, size, threads, native) for size in SETS)
        weights[kind] = small, large
    caches: dict[str, tuple[float, float]] = {}
    for done, kind in enumerate(CACHES):
        progress(f"measuring this machine: {kind} keys and values", (3 + done) / 5)
        small, large = (_attention(folder, kind, size, threads, native) for size in SETS)
        caches[kind] = small, large
    return Rates(weights, caches, _node(folder, threads), native)


def _products(folder: Path, kind: str, size: int, threads: int, native: bool) -> float:
    """Bytes per second of as many products of one row as read `size` bytes."""
    rng = np.random.default_rng(0)
    bits = {"float32": 32, "int8": 8, "int4": 4}[kind]
    one = WIDTH * WIDTH * bits // 8 + (0 if bits == 32 else 4 * WIDTH * WIDTH // BLOCK)
    count = max(1, size // one)
    nodes, weights, x = [], [], "x"
    for i in range(count):
        if bits == 32:
            weights.append(_array(f"w{i}", rng.standard_normal((WIDTH, WIDTH), np.float32) * 0.03))
            nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"y{i}"]))
        else:
            shape = (WIDTH, WIDTH // BLOCK, BLOCK * bits // 8)
            weights.append(_array(f"w{i}", rng.integers(0, 255, shape, np.uint8)))
            weights.append(_array(f"s{i}", np.full((WIDTH, WIDTH // BLOCK), 0.003, np.float32)))
            nodes.append(_few_bits([x, f"w{i}", f"s{i}"], f"y{i}", bits, native))
        x = f"y{i}"
    info = [_info("x", np.float32, (1, 1, WIDTH))]
    session = _open(folder, nodes, info, x, weights, threads, native and bits < 32)
    seconds = _least(session, {"x": rng.standard_normal((1, 1, WIDTH), np.float32)}, x)
    return count * one / seconds


def _few_bits(inputs: list[str], output: str, bits: int, native: bool) -> Any:
    if native:
        return helper.make_node(
            "Linear",
            inputs,
            [output],
            domain=DOMAIN,
            bits=bits,
            block=BLOCK,
            gate=0,
            epsilon=0.0,
            exact=0,
        )
    return helper.make_node(
        "MatMulNBits", inputs, [output], domain="com.microsoft",
        K=WIDTH, N=WIDTH, bits=bits, block_size=BLOCK, accuracy_level=4,
    )  # fmt: skip


def _attention(folder: Path, kind: str, size: int, threads: int, native: bool) -> float:
    """Bytes per second of as many caches as hold `size` bytes, each read by one query."""
    rng = np.random.default_rng(1)
    one = 2 * GROUPS * SLOTS * (4 * SIZE if kind == "float32" else SIZE + 4)
    count = max(1, size // one)
    shape = (1, GROUPS, SLOTS, SIZE)
    given: dict[str, npt.NDArray[Any]] = {
        "q": rng.standard_normal((1, HEADS, 1, SIZE), np.float32),
        "at": np.array([[SLOTS - 1]]),
        "held": np.arange(SLOTS)[None],
    }
    nodes, q = [], "q"
    for i in range(count):
        for part in "kv":
            if kind == "float32":
                given[f"{part}{i}"] = rng.standard_normal(shape, np.float32)
            else:
                given[f"{part}{i}"] = rng.integers(-127, 127, shape, np.int8)
                given[f"{part}s{i}"] = np.full(shape[:3], 0.01, np.float32)
        nodes += _reads(i, q, kind, native)
        q = f"y{i}"
    info = [_info(n, a.dtype, a.shape) for n, a in given.items()]
    session = _open(folder, nodes, info, q, [], threads, native)
    return count * one / _least(session, given, q)


def _reads(i: int, q: str, kind: str, native: bool) -> list[Any]:
    """Attention of one layer, by accel's operator or as grouped products of onnxruntime."""
    k, v = f"k{i}", f"v{i}"
    if native:
        parts = [k, v] if kind == "float32" else [k, v, f"ks{i}", f"vs{i}"]
        inputs = [q, *parts[:2], "at", "held", "", "", "", "", "", "", *parts[2:]]
        while not inputs[-1]:
            inputs.pop()
        return [helper.make_node(
            "Attention" if kind == "float32" else "AttentionInt8", inputs, [f"y{i}"], domain=DOMAIN,
            scale=0.1, softcap=0.0, mask=0, window=0, exact=0, packed=0, page=0, partial=0,
        )]  # fmt: skip
    nodes = []
    for part, scale in ((k, f"ks{i}"), (v, f"vs{i}")) if kind == "int8" else ():
        axes = helper.make_node("Constant", [], [f"{part}a"], value_ints=[-1])
        cast = helper.make_node("Cast", [part], [f"{part}f"], to=TensorProto.FLOAT)
        wide = helper.make_node("Unsqueeze", [scale, f"{part}a"], [f"{part}u"])
        nodes += [axes, cast, wide, helper.make_node("Mul", [f"{part}f", f"{part}u"], [f"{part}d"])]
    if kind == "int8":
        k, v = f"{k}d", f"{v}d"
    rows = helper.make_node(
        "Constant", [], [f"r{i}"], value_ints=[1, GROUPS, HEADS // GROUPS, SIZE]
    )
    back = helper.make_node("Constant", [], [f"b{i}"], value_ints=[1, HEADS, 1, SIZE])
    return [
        *nodes, rows, back, helper.make_node("Reshape", [q, f"r{i}"], [f"q{i}"]),
        helper.make_node("Transpose", [k], [f"t{i}"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", [f"q{i}", f"t{i}"], [f"s{i}"]),
        helper.make_node("Softmax", [f"s{i}"], [f"p{i}"], axis=-1),
        helper.make_node("MatMul", [f"p{i}", v], [f"o{i}"]),
        helper.make_node("Reshape", [f"o{i}", f"b{i}"], [f"y{i}"]),
    ]  # fmt: skip


def _node(folder: Path, threads: int) -> float:
    """Seconds of a node over a few numbers."""
    count = 200
    nodes = [helper.make_node("Sin", [f"y{i - 1}" if i else "x"], [f"y{i}"]) for i in range(count)]
    info = [_info("x", np.float32, (1, 1, WIDTH))]
    session = _open(folder, nodes, info, f"y{count - 1}", [], threads, False)
    return _least(session, {"x": np.ones((1, 1, WIDTH), np.float32)}, f"y{count - 1}") / count


def _array(name: str, array: npt.NDArray[Any]) -> TensorProto:
    return onnx.numpy_helper.from_array(array, name)


def _info(name: str, kind: Any, shape: tuple[int, ...]) -> Any:
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape
    )


def _open(
    folder: Path,
    nodes: list[Any],
    inputs: list[Any],
    output: str,
    weights: list[Any],
    threads: int,
    native: bool,
) -> Any:
    """A session over a chain of nodes; weights lie in a file, as an artifact's do."""
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "rates", inputs, [result], weights)
    domains = ("", "com.microsoft", DOMAIN)
    opsets = [helper.make_opsetid(d, {"": 24}.get(d, 1)) for d in domains]
    path = folder / ("rates.native.onnx" if native else "rates.onnx")
    (folder / "rates.bin").unlink(missing_ok=True)
    onnx.save_model(
        helper.make_model(graph, opset_imports=opsets, ir_version=10), path,
        save_as_external_data=bool(weights), location="rates.bin", size_threshold=1024,
    )  # fmt: skip
    return open_session(path, threads, resting=True)


def _least(session: Any, inputs: dict[str, npt.NDArray[Any]], output: str) -> float:
    """The least seconds of some calls: whatever else the machine does only adds to them."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output(output, "cpu")
    best, end = float("inf"), time.perf_counter() + SECONDS
    for done in range(ROUNDS + 1):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        spent = time.perf_counter() - start
        best = min(best, spent) if done else best
        if done > 2 and time.perf_counter() > end:
            break
    return best
