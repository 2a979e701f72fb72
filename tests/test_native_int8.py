"""The operators of a cache in 8 bits: codes as the reference makes them, attention as over what they stand for."""

import itertools

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from accel.ir.ops.codec import decode_rows, encode_rows
from accel.lowering.onnx import native

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
KINDS = {
    "float32": TensorProto.FLOAT, "int8": TensorProto.INT8, "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8, "float16": TensorProto.FLOAT16,
}  # fmt: skip
SHAPES = [(4, 4, 64), (4, 1, 64), (14, 2, 64), (6, 2, 24), (3, 3, 10), (2, 1, 7)]
SLOTS = 300


def run(op, operands, outputs, threads=0, **attributes):
    """What one node of accel's gives for numpy operands (None: not given)."""
    given = {f"x{i}": a for i, a in enumerate(operands) if a is not None}
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(operands)]
    outs = [f"y{i}" for i in range(len(outputs))]
    node = helper.make_node(op, names, outs, domain=native.DOMAIN, **attributes)
    info = [
        helper.make_tensor_value_info(n, KINDS[a.dtype.name], a.shape) for n, a in given.items()
    ]
    made = [
        helper.make_tensor_value_info(n, KINDS[k], None) for n, k in zip(outs, outputs, strict=True)
    ]
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(native.DOMAIN, 1)]
    model = helper.make_model(
        helper.make_graph([node], "one", info, made), opset_imports=opsets, ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    native.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, given)


def keys(rng, groups, size, slots=SLOTS):
    """Codes and scales of random keys or values, and what they stand for."""
    x = torch.from_numpy(rng.standard_normal((2, groups, slots, size)).astype(np.float32))
    x[0, 0, 1], x[1, 0, 2] = 0, 1e-42
    q, scale = encode_rows(x)
    return x, q.numpy(), scale.numpy(), decode_rows(q, scale).numpy()


@pytest.mark.parametrize("size", [1, 7, 8, 10, 24, 64, 129])
def test_codes_are_the_references(size):
    rng = np.random.default_rng(size)
    x, q, scale, back = keys(rng, 3, size)
    x[1, 1, 4, 0] = float("nan")
    codes, scales = run("Encode", [x.numpy()], ["int8", "float32"])
    want, steps = (t.numpy() for t in encode_rows(x))
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(scales, steps)
    np.testing.assert_array_equal(run("Decode", [q, scale], ["float32"])[0], back)


def attention(rng, shape, tokens, exact, mask):
    """Operands of Attention over codes, and over what they stand for."""
    heads, groups, size = shape
    q = rng.standard_normal((2, heads, tokens, size)).astype(np.float32)
    _, k, k_scale, k_back = keys(rng, groups, size)
    _, v, v_scale, v_back = keys(rng, groups, size + 3)
    held = np.tile(np.arange(SLOTS), (2, 1))
    held[0, -30:], held[1, 5:9] = -1, -1
    q_pos = np.stack([np.arange(tokens) + SLOTS - 30 - tokens, np.arange(tokens) + 100])
    if tokens > 1:
        q_pos[0, -1] = -1
    kept = [keys(rng, groups, size, 40), keys(rng, groups, size + 3, 40)]
    places = np.where(rng.random((2, groups, 40)) < 0.8, np.arange(40), -1)
    settings = dict(
        scale=0.3,
        softcap=0.0,
        mask=mask,
        window=90 if mask else 0,
        exact=exact,
        packed=0,
        page=0,
        partial=0,
    )
    coded = [
        q,
        k,
        v,
        q_pos,
        held,
        None,
        None,
        kept[0][1],
        kept[1][1],
        places,
        None,
        k_scale,
        v_scale,
        kept[0][2],
        kept[1][2],
    ]
    plain = [q, k_back, v_back, q_pos, held, None, None, kept[0][3], kept[1][3], places]
    return coded, plain, settings


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_that_over_the_decoded_bit_for_bit(shape):
    rng = np.random.default_rng(sum(shape))
    for tokens, exact, mask in itertools.product((1, 3, 8, 33), (0, 1), (0, 1)):
        coded, plain, settings = attention(rng, shape, tokens, exact, mask)
        (got,) = run("AttentionInt8", coded, ["float32"], **settings)
        (want,) = run("Attention", plain, ["float32"], **settings)
        np.testing.assert_array_equal(got, want)
        bare = [*coded[:7], None, None, None, None, *coded[11:13]]  # without what was kept
        (got,) = run("AttentionInt8", bare, ["float32"], **settings)
        np.testing.assert_array_equal(got, run("Attention", plain[:7], ["float32"], **settings)[0])


def test_a_scale_of_another_slot_is_noticed():
    coded, plain, settings = attention(np.random.default_rng(0), SHAPES[0], 3, 0, 0)
    coded[11] = np.roll(coded[11], 1, axis=2)
    (got,) = run("AttentionInt8", coded, ["float32"], **settings)
    (want,) = run("Attention", plain, ["float32"], **settings)
    assert np.abs(got - want).max() > 1e-3


@pytest.mark.parametrize("index", [11, 12, 13])
def test_scales_that_do_not_fit_are_an_error(index):
    coded, _, settings = attention(np.random.default_rng(0), SHAPES[0], 2, 0, 0)
    coded[index] = coded[index][:, :, :-1].copy()
    with pytest.raises(Exception, match="do not fit"):
        run("AttentionInt8", coded, ["float32"], **settings)


def test_place_writes_the_codes_of_what_it_would_write():
    rng = np.random.default_rng(5)
    heads, groups, size, tokens = 4, 2, 24, 3
    x = rng.standard_normal((2, tokens, (heads + 2 * groups) * size)).astype(np.float32)
    angle = np.arange(SLOTS)[:, None] * 0.3 ** np.arange(size // 2)
    tables = [np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)]
    slots, positions = (
        np.array([7, 250]),
        np.stack([np.arange(tokens) + 7, np.arange(tokens) + 250]),
    )
    norms = [rng.random(size).astype(np.float32) for _ in "qk"]
    more = [*tables, positions, *norms]
    settings = dict(heads=heads, interleaved=0, turned=0, q_epsilon=1e-5, k_epsilon=1e-5)
    blank = np.zeros((2, groups, SLOTS, size), np.float32)
    q, k, v = run("Place", [x, slots, blank, blank, *more], ["float32"] * 3, **settings)
    empty, steps = blank.astype(np.int8), np.zeros(blank.shape[:3], np.float32)
    kinds = ["float32", "int8", "int8", "float32", "float32"]
    found = run("PlaceInt8", [steps, steps, x, slots, empty, empty, *more], kinds, **settings)
    np.testing.assert_array_equal(found[0], q)
    for codes, scales, want in ((found[1], found[3], k), (found[2], found[4], v)):
        for b, t in itertools.product(range(2), range(tokens)):
            wanted = encode_rows(torch.from_numpy(want[b, :, slots[b] + t]))
            np.testing.assert_array_equal(codes[b, :, slots[b] + t], wanted[0].numpy())
            np.testing.assert_array_equal(scales[b, :, slots[b] + t], wanted[1].numpy())
        assert (scales != 0).sum() == 2 * groups * tokens
