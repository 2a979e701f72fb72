"""What the machine does at most, what a step reads and multiplies, and the shares of the one in the other."""

import time
from dataclasses import replace

import models
import numpy as np
import onnx
import pytest
import reference_data
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.commands import conditions
from accel.commands.conditions import Conditions
from accel.commands.shares import decode_share, percent, prefill_share, slope, spread
from accel.ir.facts import LayerFacts
from accel.lowering.onnx import native
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.artifact.nodes import read_nodes
from accel.runtime.backends.onnx import peaks as probing
from accel.runtime.backends.onnx.peaks import NATIVE, PORTABLE, Peaks, peaks
from accel.runtime.backends.onnx.work import Product, Slots, Work, _weights, work_of

PEAKS = Peaks(2, 10e9, 100e9, 50e9, NATIVE)
LAYER = LayerFacts("causal", 0, 4, 2, 8)


# What the machine does


@pytest.mark.parametrize("how", [NATIVE, PORTABLE])
def test_a_probe_finds_what_a_machine_may_do(how, monkeypatch):
    if how is PORTABLE:
        monkeypatch.setattr(probing, "library", lambda: (None, "no compiler"))
        monkeypatch.setattr(probing, "_SIDE", 256)
    elif native.library()[0] is None:
        pytest.skip(native.library()[1])
    monkeypatch.setattr(probing, "_READ", 1 << 25)
    found = peaks(1, 0.06)
    assert found.how == how and found.threads == 1
    assert 1e8 < found.read < 1e13 and 1e8 < found.float32 < 1e13
    assert 1e7 < found.int8 < 1e14


def test_the_best_round_counts():
    work = iter([1.0, 8.0, 2.0])

    def done():
        time.sleep(0.01)
        return next(work)

    assert 200 < probing._most(done, 0.0) <= 800


def test_what_a_processor_cannot_do_has_no_peak():
    assert probing._most(probing._multiplying(None, 1, lambda loops: 0), 0.0) == 0


@pytest.mark.skipif(native.library()[0] is None, reason=str(native.library()[1]))
def test_the_native_probe_reads_every_byte_and_counts_its_products():
    import ctypes

    made = ctypes.CDLL(str(native.library()[0]))
    made.accel_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    made.accel_read.restype = ctypes.c_int64
    numbers = np.random.default_rng(0).integers(-(1 << 40), 1 << 40, 1 << 14)
    assert made.accel_read(numbers.ctypes.data, numbers.nbytes) == numbers.sum()
    assert made.accel_read(numbers.ctypes.data, 32 * 8) == numbers[:32].sum()
    for name in ("accel_multiply_int8", "accel_multiply_float32"):
        multiply = getattr(made, name)
        multiply.argtypes, multiply.restype = [ctypes.c_int64], ctypes.c_int64
        assert multiply(20) == 20 * multiply(1)


# What a step reads and multiplies


def graph(*nodes, weights=(), inputs=("tokens",)):
    info = [helper.make_tensor_value_info(n, TensorProto.INT64, ["T"]) for n in inputs]
    outs = [helper.make_tensor_value_info(n.output[0], TensorProto.FLOAT, None) for n in nodes[-1:]]
    held = [numpy_helper.from_array(np.zeros(s, d), n) for n, s, d in weights]
    return helper.make_graph(list(nodes), "g", info, outs, held)


def found(tmp_path, made):
    """The work of a graph."""
    path = tmp_path / "step.onnx"
    onnx.save_model(helper.make_model(made), path)
    work = Work("x")
    _weights(read_nodes(path), work)
    return work


EMBED, HEAD = ("embed", (50, 8), np.float32), ("head", (8, 50), np.float32)
LOOKED_UP = helper.make_node("Gather", ["embed", "tokens"], ["x"])


def test_a_table_is_read_by_rows_unless_a_product_reads_it_too(tmp_path):
    head = helper.make_node("MatMul", ["x", "head"], ["y"])
    work = found(tmp_path, graph(LOOKED_UP, head, weights=[EMBED, HEAD, ("idle", (9, 9), "f4")]))
    assert (work.weights, work.rows) == (8 * 50 * 4, 8 * 4), "what no operator reads does not count"
    (product,) = work.products
    assert (product.deep, product.wide, product.kind, product.bits) == (8, 50, "float32", 32)
    tied = helper.make_node("Gemm", ["x", "embed"], ["y"], transB=1)
    work = found(tmp_path, graph(LOOKED_UP, tied, weights=[EMBED]))
    assert (work.weights, work.rows) == (8 * 50 * 4, 0)
    assert (work.products[0].deep, work.products[0].wide) == (8, 50)


def test_products_of_asked_rows_count_once(tmp_path):
    body = helper.make_node("MatMul", ["tokens", "head"], ["x"])
    picked = helper.make_node("GatherND", ["x", "rows"], ["p"])
    head = helper.make_node("MatMul", ["p", "embed"], ["y"])
    made = graph(body, picked, head, weights=[EMBED, HEAD], inputs=("tokens", "rows"))
    work = found(tmp_path, made)
    assert [p.asked for p in work.products] == [False, True]
    assert work.multiplied(10) == {"float32": 10 * 8 * 50 + 50 * 8}


def test_bits_and_types_of_products(tmp_path):
    packed = ("w", (6, 3, 16), np.uint8)
    for level, kind in ((4, "int8"), (0, "float32")):
        node = helper.make_node(
            "MatMulNBits", ["tokens", "w"], ["y"], domain="com.microsoft", bits=4, K=90, N=6,
            accuracy_level=level,
        )  # fmt: skip
        (one,) = found(tmp_path, graph(node, weights=[packed])).products
        assert (one.deep, one.wide, one.bits, one.kind, one.bytes) == (90, 6, 4, kind, 6 * 3 * 16)


def test_of_a_choice_the_larger_graph_counts_and_a_loop_is_not_known(tmp_path):
    def branch(name, wide):
        node = helper.make_node("MatMul", ["tokens", name], [f"{name}.y"])
        out = helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, None)
        held = [numpy_helper.from_array(np.zeros((8, wide), np.float32), name)]
        return helper.make_graph([node], name, [], [out], held)

    both = {"then_branch": branch("few", 3), "else_branch": branch("many", 30)}
    node = helper.make_node("If", ["tokens"], ["y"], **both)
    work = found(tmp_path, graph(node))
    assert work.weights == 8 * 30 * 4 and not work.unread and len(work.products) == 1
    loop = helper.make_node("Loop", ["tokens", ""], ["y"], body=branch("each", 3))
    assert "Loop" in found(tmp_path, graph(loop)).unread
    experts = helper.make_node("Gather", ["w", "tokens"], ["y"])
    assert "Gather" in found(tmp_path, graph(experts, weights=[("w", (4, 8, 8), "f4")])).unread


@pytest.mark.long
def test_a_step_of_the_bundled_model_reads_its_weights(tmp_path):
    out = tmp_path / "bundled"
    accel.optimize(reference_data.REFERENCE, "int4", max_context=64, out=out, verify=False).close()
    reads_its_weights_and_not_its_embedding(open_artifact(out))


def test_a_step_reads_its_weights(build):
    reads_its_weights_and_not_its_embedding(build("llama").compiled.artifact)


@pytest.mark.skipif(native.library()[0] is None, reason=str(native.library()[1]))
def test_variants_read_as_many_weights_with_a_cache_in_8_bits(tmp_path):
    """Whatever turns queries and keys, it reads a row of its tables."""
    model, out = models.make("llama", 1), tmp_path / "made"
    accel.optimize(model, "kv-int8", max_context=512, out=out, verify=False).close()
    artifact = open_artifact(out)
    read = {name: work_of(artifact, name) for name in artifact.entries["step"].graphs}
    assert "native" in read and not any(work.unread for work in read.values())
    assert max(w.weights for w in read.values()) - min(w.weights for w in read.values()) < 1000


def reads_its_weights_and_not_its_embedding(artifact):
    """Of every variant, beside what the package onnx reads."""
    for variant, file in artifact.entries["step"].graphs.items():
        model = onnx.load(artifact.path / file, load_external_data=False)
        held = {i.name: i for i in model.graph.initializer}
        tables = {
            name
            for node in model.graph.node
            for i, name in enumerate(node.input)
            if (node.op_type.startswith("Gather") and i != 1 and name in held)
            or (node.op_type in ("RotaryEmbedding", "Place") and "rope" in name)
        }
        read = {name for node in model.graph.node for name in node.input} & held.keys()
        sizes = {
            tuple(e.value for e in t.external_data if e.key == "offset") or name: nbytes(t)
            for name, t in held.items()
            if name in read - tables
        }
        work = work_of(artifact, variant)
        assert work.weights == sum(sizes.values()), variant
        assert 0 < work.rows < work.weights / 10 and not work.unread
        state = 2 * sum(2 * layer.num_kv_heads * layer.head_dim * 4 for layer in work.layers) + 16
        assert work.state(2) == state and work.read(2) == work.weights + work.rows + state
        assert {p.asked for p in work.products} == {True, False}
        assert sum(p.bytes for p in work.products) == pytest.approx(work.weights, rel=0.1)


def nbytes(tensor):
    """As the file says, or the array has."""
    told = [int(e.value) for e in tensor.external_data if e.key == "length"]
    return told[0] if told else numpy_helper.to_array(tensor).nbytes


# Shares


def test_shares_are_of_the_time_that_was_taken():
    work = Work("x", weights=900, rows=20, fixed=30, slots=[Slots(10.0, 0), Slots(5.0, 4)])
    assert work.state(6) == 30 + 60 + 20 and work.read(6) == 900 + 20 + 110
    assert decode_share(work, PEAKS, 6, 1030 / 5e9) == pytest.approx(0.5)
    assert decode_share(work, PEAKS, 6, 1030 / 10e9) == pytest.approx(1.0)
    assert decode_share(replace(work, unread="chosen"), PEAKS, 6, 1.0) is None
    assert decode_share(work, replace(PEAKS, read=0.0), 6, 1.0) is None


def test_a_prompt_is_measured_by_the_peak_of_each_type():
    product = Product(None, 10, 20, 4, "int8", 100, False)
    work = Work("x", products=[product, replace(product, kind="float32", asked=True)])
    assert work.multiplied(5) == {"int8": 1000, "float32": 200}
    assert prefill_share(work, PEAKS, 5, 2 * (1000 / 100e9 + 200 / 50e9)) == pytest.approx(0.5)
    assert prefill_share(work, replace(PEAKS, int8=0.0), 5, 1.0) is None
    assert prefill_share(Work("x"), PEAKS, 5, 1.0) is None


@pytest.mark.parametrize("window", [0, 3, 9])
def test_attention_multiplies_what_a_token_sees(window):
    work = Work("x", layers=[replace(LAYER, window=window)])
    pairs = sum(min(i + 1, window or 99) for i in range(7))
    assert work.multiplied(7) == {"float32": 2 * 4 * 8 * pairs}


def test_slope_is_between_the_least_and_the_greatest_depth():
    work = Work("x", weights=10**9, slots=[Slots(1000.0, 0)])
    found = slope(work, PEAKS, {100.0: 1.0, 600.0: 9.0, 1100.0: 1.0 + 1000 * 2e-7})
    assert found["us_per_1000_tokens"] == pytest.approx(200) and found["bytes_per_token"] == 1000
    assert found["share"] == pytest.approx(0.5)
    assert slope(work, PEAKS, {100.0: 1.0}) is None
    assert slope(work, PEAKS, {1.0: 1.0, 2.0: 0.5})["share"] is None, "noise is no share"
    assert slope(replace(work, unread="x"), PEAKS, {1.0: 1.0, 2.0: 3.0})["share"] is None


def test_words():
    assert (percent(0.456), percent(None), spread([3.0, 1.0, 2.0], 1)) == ("46%", "-", "1.0..3.0")


def test_a_busy_machine_is_told(monkeypatch):
    for load, words in ((0.4, ""), (0.6, "load average 0.60 before"), (None, "")):
        monkeypatch.setattr(conditions, "_load", lambda load=load: load)
        now = Conditions.now().ended()
        assert words in now.warning and bool(now.warning) == bool(words)
        assert now.load_after == load and dict(now.text())["machine"] and now.command
