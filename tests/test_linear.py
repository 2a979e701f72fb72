"""accel::Linear: products of few bits with what stands around them, as the reference has them, row by row."""

import itertools
import platform
import subprocess
from functools import cache
from pathlib import Path

import models
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import accel
from accel.ir.ops.quantized import dequantize, pack, pack_blocks, round_activations
from accel.ir.weights import multiplied
from accel.lowering.onnx import native
from accel.lowering.onnx.native import join
from accel.lowering.onnx.native.compile import compile_library, find_compiler
from accel.lowering.onnx.writer.builder import DTYPES
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.session.session import Session

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
SIZES = [(1024, 96), (80, 33), (16, 3), (2816, 40), (200, 130)]
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 23, 24, 25, 100)  # fewer and more than are multiplied together


def weight(bits, block, k, n, zeros=False, seed=0):
    rng = torch.Generator().manual_seed(seed)
    blocks = -(-k // block)
    codes = torch.randint(0, 2**bits, (n, blocks, block), generator=rng)
    scales = torch.rand(n, blocks, generator=rng) * 0.02
    points = (
        pack(torch.randint(0, 2 ** min(bits, 4), (n, blocks), generator=rng), 4) if zeros else None
    )
    return pack_blocks(codes, bits), scales, points


def external(name, tensor, folder):
    """An initializer in a file of its own, followed there by what is not a number."""
    path = folder / f"{name}.bin"
    array = tensor.contiguous().view(torch.uint8).numpy()
    path.write_bytes(array.tobytes() + np.full(64, np.nan, np.float32).tobytes())
    made = TensorProto(name=name, data_type=DTYPES[tensor.dtype], dims=tensor.shape)
    made.data_location = TensorProto.EXTERNAL
    for key, value in (("location", path.name), ("offset", "0"), ("length", str(array.nbytes))):
        made.external_data.add(key=key, value=value)
    return made


def linear(folder, given, threads=1, **settings):
    """run(x, …) of one node; `given`: by place, an array that is a parameter, or an input's name."""
    inputs = [i or "" if isinstance(i, str) or i is None else f"p{n}" for n, i in enumerate(given)]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(
        "Linear",
        inputs,
        ["y"],
        domain=native.DOMAIN,
        **{"gate": 0, "epsilon": 0.0, "exact": 0} | settings,
    )
    graph = helper.make_graph(
        [node],
        "linear",
        [
            helper.make_tensor_value_info(i, TensorProto.FLOAT, None)
            for i in inputs
            if i in ("x", "more")
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [external(f"p{n}", a, folder) for n, a in enumerate(given) if torch.is_tensor(a)],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(native.DOMAIN, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "linear.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.intra_op_num_threads = threads
    native.register(options)
    session = onnxruntime.InferenceSession(str(folder / "linear.onnx"), options)
    return lambda **feeds: torch.from_numpy(
        session.run(None, {k: v.numpy() for k, v in feeds.items()})[0]
    )


def reference(x, q, scales, zeros, bits, block):
    """In float64, from the rounded input on."""
    rows = dequantize(q, scales, zeros, bits, block)[:, : x.shape[-1]].double()
    return round_activations(x, block).double() @ rows.T


def of_offsets(x, offsets, block):
    """What offsets [N,blocks] add, in float64."""
    wide = torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).double()
    return wide.unflatten(-1, (-1, block)).sum(-1) @ offsets.double().t()


FORMS = [
    (bits, block, zeros)
    for bits, block, zeros in itertools.product(
        (2, 3, 4, 5, 6, 8), (16, 32, 64, 128, 256), (False, True)
    )
    if bits <= 4 or not zeros
]


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_equals_the_reference(form, dtype, tmp_path):
    bits, block, zeros = form
    for k, n in SIZES:
        q, scales, points = weight(bits, block, k, n, zeros)
        scales = scales.to(dtype)
        run = linear(tmp_path, ["x", q, scales, points], bits=bits, block=block)
        for rows in ROWS:
            x = torch.randn(1, rows, k, generator=torch.Generator().manual_seed(rows))
            want = reference(x, q, scales, points, bits, block)
            torch.testing.assert_close(
                run(x=x).double(), want, atol=2e-6 * float(want.abs().max()), rtol=0
            )


@pytest.mark.few(10)
@pytest.mark.parametrize("exact", [0, 1])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_may_have_offsets(form, exact, tmp_path):
    """Of the exact sums of the input's blocks. The control: those of the rounded input are others."""
    bits, block, zeros = form
    for k, n in SIZES:
        q, scales, points = weight(bits, block, k, n, zeros)
        offsets = torch.randn(scales.shape, generator=torch.Generator().manual_seed(1)) * 0.05
        given = ["x", q, scales, points, None, None, None, offsets]
        run = linear(tmp_path, given, bits=bits, block=block, exact=exact)
        for rows in ROWS:
            x = torch.randn(1, rows, k, generator=torch.Generator().manual_seed(rows))
            products = reference(x, q, scales, points, bits, block)

            want = products + of_offsets(x, offsets, block)
            near = 2e-6 * float(want.abs().max())
            found = run(x=x).double()
            torch.testing.assert_close(found, want, atol=near, rtol=0)
            other = products + of_offsets(round_activations(x, block), offsets, block)
            assert (found - other).abs().max() > near


def levels(n, blocks, dtype, seed):
    """coarse [n,few], fine [n,blocks], and their products; `dtype` of the fine ones, or none for one level."""
    rng = torch.Generator().manual_seed(seed)
    if dtype is None:
        coarse = (torch.randn(n, blocks, generator=rng) * 0.02).half()
        coarse[0, :3] = torch.tensor([6e-8, -3e-5, 0.0])  # without an exponent of their own
        return coarse, None, coarse.float()
    each = 8 if dtype == torch.uint8 else 16
    coarse = (torch.randn(n, blocks // each, generator=rng) * 1e-3).half()
    low, high = (0, 64) if dtype == torch.uint8 else (-128, 128)
    fine = torch.randint(low, high, (n, blocks), generator=rng).to(dtype)
    return coarse, fine, multiplied(coarse, fine)


@pytest.mark.few(10)
@pytest.mark.parametrize("exact", [0, 1])
@pytest.mark.parametrize("least", ["none", None, torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.uint8, torch.int8], ids=str)
def test_scales_and_offsets_are_read_as_they_lie(dtype, least, exact, tmp_path):
    """In float16, or in two levels. The control: without the middle that offsets are moved by it is another result."""
    for bits, block, k, n in [
        (4, 32, 1024, 33),
        (8, 16, 512, 40),
        (4, 16, 256, 3),
        (8, 32, 512, 130),
        (6, 16, 512, 40),
        (2, 16, 256, 33),
    ]:
        q, _, _ = weight(bits, block, k, n)
        coarse, fine, scales = levels(n, k // block, dtype, 1)
        given, middle = ["x", q, coarse, *[None] * 5, fine], 2 ** (bits - 1)
        if least != "none":
            given[7], fine_least, offsets = levels(n, k // block, least, 2)
            given.append(fine_least)
            offsets = offsets + middle * scales
        run = linear(tmp_path, given, bits=bits, block=block, exact=exact, middle=middle)
        for rows in (1, 2, 3, 4, 9, 27):
            x = torch.randn(1, rows, k, generator=torch.Generator().manual_seed(rows))
            want = reference(x, q, scales, None, bits, block)
            if least != "none":
                want = want + of_offsets(x, offsets, block)
            near = 2e-6 * float(want.abs().max())
            torch.testing.assert_close(run(x=x).double(), want, atol=near, rtol=0)
            if least != "none":
                wrong = want - middle * of_offsets(x, scales, block)
                assert (run(x=x).double() - wrong).abs().max() > near


@pytest.mark.parametrize("exact", [0, 1])
def test_a_block_of_more_products_than_32_bits_hold(exact, tmp_path):
    k = 2**17
    q = torch.full((3, 1, k), 255, dtype=torch.uint8)
    run = linear(tmp_path, ["x", q, torch.ones(3, 1)], bits=8, block=k, exact=exact)
    for rows in (1, 2, 9, 30):
        want = torch.full((1, rows, 3), 127.0 * k)
        torch.testing.assert_close(run(x=torch.ones(1, rows, k)), want, rtol=1e-5, atol=0)


# A compiler's flag after those for this processor: strips of 8 weight rows, not 16; no VNNI; no vectors of 32 bytes.
PROCESSORS = {
    "avx512-vnni-256": "-mno-avx512bw",
    "avx2": "-march=haswell",
    "sse2": "-march=x86-64",
}


@pytest.fixture(scope="module")
def compiled_for(tmp_path_factory):
    """The operators for another processor."""
    compiler = find_compiler()
    assert compiler is not None

    @cache
    def compiled(processor):
        folder = tmp_path_factory.mktemp(processor)
        return compile_library(compiler, folder, lambda *_: None, [PROCESSORS[processor]])

    return compiled


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_processor_passes_these_tests(processor, compiled_for, tmp_path, monkeypatch):
    if processor != "sse2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("without AVX2")
    own = native.library()[0]
    made = compiled_for(processor)
    assert made.read_bytes() != own.read_bytes()
    monkeypatch.setattr(native, "library", lambda: (made, ""))
    for form in FORMS:
        for dtype in (torch.float32, torch.bfloat16):
            test_every_form_equals_the_reference(form, dtype, tmp_path)
        for exact in (0, 1):
            test_every_form_may_have_offsets(form, exact, tmp_path)
    for form in EXACT:
        test_rows_are_equal_bit_for_bit(form, tmp_path)
    for dtype, least, exact in itertools.product(
        (None, torch.uint8, torch.int8), ("none", None, torch.uint8), (0, 1)
    ):
        test_scales_and_offsets_are_read_as_they_lie(dtype, least, exact, tmp_path)
    for gate, form in itertools.product((0, *GATES), AROUND):
        test_what_stands_around_it(gate, form, tmp_path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of AVX2")
def test_it_is_compiled_where_nothing_is_unrolled(tmp_path):
    """Numbers that instructions hold are constants as they are written, as clang demands at every level."""
    compiler = find_compiler()
    assert compiler is not None
    source, made = Path(native.__file__).parent / "linear.cc", tmp_path / "linear.o"
    command = [compiler, "-std=c++17", "-O0", "-march=haswell", "-c", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_an_input_that_is_not_rounded_is_another_result(tmp_path):
    q, scales, _ = weight(4, 64, 1024, 96)
    x = torch.randn(1, 2, 1024)
    got = linear(tmp_path, ["x", q, scales], bits=4, block=64)(x=x).double()
    exact = x.double() @ dequantize(q, scales, None, 4, 64).double().T
    assert (got - exact).abs().max() > 1e-3 * exact.abs().max()


EXACT = [(4, 64), (4, 16), (8, 16), (8, 128), (2, 16), (3, 64), (5, 32), (6, 16), (6, 128)]


@pytest.mark.parametrize("form", EXACT, ids=str)
def test_rows_are_equal_bit_for_bit(form, tmp_path):
    """However many rows and threads there are."""
    assert not differing(form, 1, tmp_path)


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="rows go one way"
)
@pytest.mark.parametrize("form", EXACT, ids=str)
def test_a_row_alone_is_computed_another_way(form, tmp_path):
    """The control: where bits may differ, they do."""
    assert 1 in differing(form, 0, tmp_path)


def differing(form, exact, folder):
    """The numbers of rows in a call that get other bits than 33 rows do."""
    bits, block = form
    q, scales, _ = weight(bits, block, 704, 300)
    more, norm = torch.randn(1, 33, 300), torch.rand(704)
    offsets = torch.randn(scales.shape) * 0.05
    given = ["x", q, scales, None, None, norm, "more", offsets]
    x, found = torch.randn(1, 33, 704), set()
    for threads in (1, 2, 16):
        run = linear(folder, given, threads, bits=bits, block=block, epsilon=1e-5, exact=exact)
        whole = run(x=x, more=more)
        for rows in (1, 2, 3, 5, 8, 9, 27):
            for start in range(0, 33 - rows + 1, rows):
                part = slice(start, start + rows)
                if not torch.equal(run(x=x[:, part], more=more[:, part]), whole[:, part]):
                    found.add(rows)
    return found


GATES = {
    1: torch.nn.functional.silu,
    2: torch.nn.functional.gelu,
    3: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


AROUND = [(4, 16), (4, 32), (4, 128), (8, 16), (8, 32), (8, 256), (3, 16), (5, 32), (6, 16)]


@pytest.mark.parametrize("form", AROUND, ids=str)
@pytest.mark.parametrize("gate", [0, *GATES])
def test_what_stands_around_it(gate, form, tmp_path):
    """Norm, bias, gate and sum, as PyTorch has them; a tiny, a huge and a zero row among others."""
    bits, block = form
    k, n = 96, 2 * 37
    q, scales, _ = weight(bits, block, k, n)
    scales = scales * 2.0 ** (4 - bits)
    bias, norm = torch.randn(n), torch.rand(k)
    for offsets in (None, torch.randn(n, -(-k // block)) * 0.05):
        given = ["x", q, scales, None, bias, norm, "more", offsets]
        run = linear(tmp_path, given, bits=bits, block=block, gate=gate, epsilon=1e-3)
        for repeat in (1, 3):  # 10 rows, and 30
            around(run, form, repeat, q, scales, bias, norm, gate, offsets)


def around(run, form, repeat, q, scales, bias, norm, gate, offsets):
    bits, block = form
    k, n = norm.numel(), bias.numel()
    x = torch.randn(2, 5, k) * torch.tensor([1e-20, 1.0, 1e4, 0.0, 30.0])[:, None]
    x = x.repeat(1, repeat, 1)
    normed = torch.nn.functional.rms_norm(x, (k,), norm, 1e-3)
    want = reference(normed, q, scales, None, bits, block) + bias
    if offsets is not None:
        want = want + of_offsets(normed, offsets, block)
    if gate:
        want = GATES[gate](want[..., : n // 2]) * want[..., n // 2 :]
    more = torch.randn(want.shape)
    torch.testing.assert_close(run(x=x, more=more).double(), want + more, atol=2e-4, rtol=1e-4)


def test_sizes_that_do_not_fit_are_an_error_not_a_crash(tmp_path):
    q, scales, _ = weight(4, 32, 64, 8)
    run = linear(tmp_path, ["x", q, scales], bits=4, block=32)
    for x in (torch.zeros(1, 2, 63 + 32), torch.zeros(())):
        with pytest.raises(Exception, match="Linear: "):
            run(x=x)
    assert run(x=torch.zeros(1, 0, 64)).shape == (1, 0, 8)
    short = [(torch.zeros(8, 1, dtype=torch.uint8)[:7], None), (None, torch.zeros(7))]
    for zeros, bias in short:
        run = linear(tmp_path, ["x", q, scales, zeros, bias], bits=4, block=32)
        with pytest.raises(Exception, match="Linear: "):
            run(x=torch.zeros(1, 2, 64))
    run = linear(tmp_path, ["x", q, scales, None, None, None, "more"], bits=4, block=32)
    with pytest.raises(Exception, match="Linear: "):
        run(x=torch.zeros(1, 2, 64), more=torch.zeros(1, 1, 8))
    for offsets in (torch.zeros(2, 8), torch.zeros(8, 3)):
        run = linear(tmp_path, ["x", q, scales, *[None] * 4, offsets], bits=4, block=32)
        with pytest.raises(Exception, match="Linear: "):
            run(x=torch.zeros(1, 2, 64))


# Whole steps: with the nodes around put inside, and without.


def logits(compiled):
    engine = OrtBackend(compiled.artifact, threads=1, kernels="native")
    facts = compiled.facts
    with Session(
        engine.open_session(2), 2, vocab_size=facts.vocab_size, max_context=facts.max_context
    ) as session:
        rng = np.random.default_rng(0)
        parts = [
            session.run(rng.integers(0, 90, (2, w)), n)
            for w, n in [(9, [9, 4]), (1, None), (5, [5, 2])]
        ]
        session.rewind([3, 2])
        parts.append(session.run(rng.integers(0, 90, (2, 2))))
    return np.concatenate([p.ravel() for p in parts])


def ops(compiled):
    graph = onnx.load(compiled.artifact.path / "step.native.onnx", load_external_data=False).graph
    return [node.op_type for node in graph.node]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gpt2"])
def test_heads_are_placed_by_one_node(build, name):
    """With and without norms, biases and rope; the build has compared each with the model."""
    found = ops(build(name).compiled)
    assert found.count("Place") == 3 and found.count("TensorScatter") == 1
    assert not {"Transpose", "Reshape", "RotaryEmbedding"} & set(found)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_joined_steps_compute_the_same(name, monkeypatch):

    def build():
        return accel.optimize(models.ARCHITECTURES[name](), "int4", max_context=64, max_batch=4)

    with build() as compiled:
        got, few = logits(compiled), ops(compiled)
    monkeypatch.setattr(native_table(), "join", lambda *_: None)
    with build() as compiled:
        want, many = logits(compiled), ops(compiled)
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()  # an input may round the other way
    assert np.median(np.abs(got - want)) < 1e-4 * np.abs(want).max()
    assert len(few) < len(many)


def native_table():
    from accel.lowering.onnx.variants.native import lower

    return lower


def test_a_llama_layer_is_six_nodes():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with accel.optimize(model, "int4", max_context=64) as compiled:
        layer = ["Linear", "PlaceFloat16", "AttentionFloat16", "Linear", "Linear", "Linear"]
        found = [op for op in ops(compiled) if op in layer]
        assert found == 2 * layer + ["Linear"]
        layers = ops(compiled)[ops(compiled).index("Linear") :]  # behind the embedding
        assert not {"RMSNormalization", "Add", "Mul", "Split", "Reshape"} & set(layers)


def test_a_wrong_join_is_refused(monkeypatch):
    """A build compares every variant with the model."""
    monkeypatch.setattr(join, "_placed_alike", lambda *_: True)
    right = join._side
    monkeypatch.setattr(join, "_side", lambda g, value: swapped(right(g, value)))
    with pytest.raises(accel.ir.errors.Miscompiled, match=r"step\.native\.onnx"):
        accel.optimize(models.llama(), "base", max_context=64)


def swapped(side):
    """Sine for cosine."""
    if side.rope is not None:
        side.rope.input[1], side.rope.input[2] = side.rope.input[2], side.rope.input[1]
    return side
