"""kv-int8: its formula, and a model's cache in it: whole calls and split ones, rewound, forked, ragged, composed."""

import models
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import accel
from accel.compiler.smoke.tiny_models import randomise, small_config, small_model
from accel.ir.axis import find_axes
from accel.ir.errors import PassError
from accel.ir.ops.codec import decode_rows, encode_rows
from accel.lowering.onnx import native
from accel.passes.kv.codec import At

from ....once import made_once
from ....session_ways import near, oracle, recut, variants

needs_native = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, 50, (2, 21))


def test_codes_are_those_of_the_formula():
    x = RNG.standard_normal((2, 3, 5, 33)).astype(np.float32) * 9
    q, scale = encode_rows(torch.from_numpy(x))
    want = np.abs(x).max(-1) / np.float32(127)
    np.testing.assert_array_equal(scale.numpy(), want)
    np.testing.assert_array_equal(q.numpy(), np.rint(x / want[..., None]).astype(np.int8))
    np.testing.assert_array_equal(decode_rows(q, scale).numpy(), q.numpy() * want[..., None])


def test_codes_are_those_of_onnxruntimes_quantised_cache():
    """Its scales are of a whole tensor: one token of one head then is one."""
    size = 16
    x = RNG.standard_normal((1, 1, size)).astype(np.float32)
    q, scale = encode_rows(torch.from_numpy(x))
    names = ["q", "k", "v", "past_k", "past_v", "last", "total", *[""] * 5, "scale", "scale"]
    node = helper.make_node(
        "GroupQueryAttention", names, ["out", "k_out", "v_out"], domain="com.microsoft", num_heads=1,
        kv_num_heads=1, k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR", kv_cache_bit_width=8,
    )  # fmt: skip
    given = {
        **{n: x for n in "qkv"},
        "past_k": np.zeros((1, 1, 4, size), np.int8), "past_v": np.zeros((1, 1, 4, size), np.int8),
        "last": np.zeros(1, np.int32), "total": np.ones(1, np.int32), "scale": scale.numpy().reshape(1),
    }  # fmt: skip
    kinds = {"f": TensorProto.FLOAT, "i": TensorProto.INT32}
    info = [
        helper.make_tensor_value_info(
            n, TensorProto.INT8 if a.dtype == np.int8 else kinds[a.dtype.kind], a.shape
        )
        for n, a in given.items()
    ]
    outs = [
        helper.make_tensor_value_info(n, kind, None)
        for n, kind in (("out", 1), ("k_out", TensorProto.INT8), ("v_out", TensorProto.INT8))
    ]
    graph = helper.make_graph([node], "one", info, outs)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    out, k_out, _ = session.run(None, given)
    np.testing.assert_array_equal(k_out[0, 0, :1], q[0].numpy())
    np.testing.assert_allclose(out, decode_rows(q, scale).numpy(), rtol=1e-6)


@pytest.fixture(scope="module")
def made():
    """made(architecture, recipe, ...) -> its artifact, two layers, built once."""

    def get(name, *recipe):
        model = models.make(name, 2)
        asked = ["kv-int8", *recipe]
        return accel.optimize(model, asked, max_context=128, max_batch=2)

    with made_once(get) as found:
        yield found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", ()),
        ("gemma2", ()),
        ("plain_latent", ()),
        ("llama", ("int4",)),
        ("gpt2", ("int8",)),
    ],
    ids=lambda v: v if isinstance(v, str) else "+".join(v),
)
def test_every_way_through_a_session_is_that_of_the_oracle(made, name, recipe):
    compiled = made(name, *recipe)
    tolerance = (
        0.1 if recipe else 2e-3
    )  # products that round their inputs turn a last place into a step
    got, held = recut(compiled.session(batch=2), TOKENS[:2])
    want, right = recut(oracle(compiled).session(batch=2), TOKENS[:2])
    for a, b in zip(got, want, strict=True):
        near(a, b, tolerance)
    assert held == right
    for a, b in (
        (want[1], want[0][:, 5:6]),
        (want[2], want[0][:, 6:14]),
        (want[3], want[0][:, 6:10]),
    ):
        near(
            a, b, tolerance
        )  # however a call is cut, its own tokens are read back as they are stored


def test_memory_is_its_formula(made):
    compiled = made("llama")
    per_token = 8 + 2 * 2 * 2 * (
        10 + 4
    )  # a position; layers, keys and values, heads, codes and scale
    assert compiled.report["kv_bytes_per_token"] == per_token
    with compiled.session(batch=2) as session:
        session.run(TOKENS)
        assert session.stats["kv_bytes"] == 2 * 256 * per_token
    state = {s.name: (s.dtype, s.shape) for s in compiled.artifact.state}
    assert state["kv.1.v"] == ("int8", ("B", 2, "C", 10))
    assert state["kv.1.v.scale"] == ("float32", ("B", 2, "C"))
    assert compiled.report["grade"] == "approximate"


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", [(), ("int4",)], ids=str)
def test_rows_are_equal_bit_for_bit_under_batch_invariant(made, weights):
    compiled = made("llama", "batch-invariant", *weights)
    for _, model in variants(compiled, None):
        with model.session() as session:
            whole = session.run(TOKENS[:1])
            session.rewind(0)
            apart = [session.run(TOKENS[:1, i : i + 1]) for i in range(TOKENS.shape[1])]
            np.testing.assert_array_equal(whole, np.concatenate(apart, 1))


def nodes(compiled):
    """Operators of the native step, those of branches included."""
    found = set()
    todo = list(
        onnx.load(compiled.artifact.path / "step.native.onnx", load_external_data=False).graph.node
    )
    while todo:
        node = todo.pop()
        found.add(node.op_type)
        todo += [n for a in node.attribute for n in a.g.node]
    return found


@pytest.mark.long
@needs_native
def test_layers_under_conditions_read_codes_in_place():
    model = randomise(models.PlainSdpa(layers=4), "skip")
    with accel.optimize(model, ["kv-int8", "unified-skip"], max_context=64) as compiled:
        assert nodes(compiled) >= {"If", "AttentionInt8"} and "Decode" not in nodes(compiled)


@pytest.mark.long
@needs_native
def test_what_eviction_keeps_is_in_codes_too():
    model = models.ARCHITECTURES["plain_sdpa"]()
    evict = {"kv": {"score": {"use": "knorm"}, "budget": {"use": "uniform", "tokens_kept": 8}}}
    both = {"kv": {**evict["kv"], "codec": {"use": "kv-int8"}}}
    found = []
    for recipe, target in ((evict, "eager"), (both, "onnx")):
        with accel.optimize(model, recipe, max_context=64, target=target) as compiled:
            kept = {s.role: s.dtype for s in compiled.program.state if s.written_between_steps}
            with compiled.session() as session:
                first, then = session.run(TOKENS[:1, :15]), session.run(TOKENS[:1, 15:18])
                found.append(np.concatenate([first, then], 1))
            if target == "onnx":
                assert nodes(compiled) >= {"AttentionInt8"}
    assert kept["kept.k"] == kept["kept.v"] == "int8" and kept["kept.k.scale"] == "float32"
    near(found[1], found[0], 0.2)
    assert not np.array_equal(found[1], found[0])


def test_a_plain_cache_is_what_onnxruntime_genai_needs(made):
    compiled = made("llama")
    assert "genai" not in compiled.artifact.entries
    concat = next(s for s in compiled.report["steps"] if s["name"] == "Concat")
    assert concat["refused"] == ["onnxruntime-genai supports a dense cache only"]


@pytest.mark.long
def test_cross_attention_stays_as_it_is():
    from transformers import AutoModelForSeq2SeqLM

    model = randomise(AutoModelForSeq2SeqLM.from_config(small_config("t5")), "t5").eval()
    with accel.optimize(model, "kv-int8", max_context=32) as compiled:
        state = {s.name: s.dtype for s in compiled.artifact.state}
        assert state["kv.0.k"] == "int8" and state["cross.0.k"] == "float32"
        step = next(s for s in compiled.report["steps"] if s["name"] == "KvInt8")
        assert "cross.0.k: the encode entry writes it once, uncompressed" in step["refused"]


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(PassError, match="no cache of keys and values"):
        accel.optimize(small_model("mamba"), "kv-int8", max_context=32)


@pytest.mark.parametrize("value", [0.0, 1.0, -7.5, 1e-38, 1e30])
def test_a_constant_row_comes_back(value):
    codec = find_axes()["kv.codec"].build("kv-int8")
    x = torch.full((1, 2, 3, 10), value)
    back = codec.decode(At("k", 10), codec.encode(At("k", 10), x))
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-30)


def test_what_is_no_number_spoils_the_whole_row():
    codec, at = find_axes()["kv.codec"].build("kv-int8"), At("k", 10)
    x = torch.randn(2, 3, 5, 10, generator=torch.Generator().manual_seed(0))
    for value in (float("nan"), float("inf"), -float("inf")):
        x[1, 0, 4, 3] = value
        spoilt = ~codec.decode(at, codec.encode(at, x)).isfinite()
        assert spoilt[1, 0, 4].all() and int(spoilt.sum()) == 10


def test_a_hundredth_too_small_is_too_far():
    codec = find_axes()["kv.codec"].build("kv-int8")
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    at = At("k", 64)
    assert not codec.within(at, x, codec.decode(at, codec.encode(at, 0.99 * x))).all()
