"""ort-gqa-kv: the codes of onnxruntime's GroupQueryAttention, and that operator reading and writing them in place."""

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from reference_data import REFERENCE
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import accel
from accel.ir.axis import find_axes
from accel.ir.errors import RecipeError
from accel.ir.facts import Facts
from accel.ir.ops.attention import Operands, attention
from accel.ir.ops.codec import decode_static, encode_static
from accel.ir.ops.kv import kv_append
from accel.ir.program import Editor, Program
from accel.ir.region import Entry
from accel.ir.tables import Observed, Rows
from accel.ir.weights import Weights
from accel.lowering.onnx import native
from accel.lowering.onnx.export import export

from ....op_case import TRACE
from ....session_ways import oracle, variants
from ....test_ops import symbolic

needs_native = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
AXIS = find_axes()["kv.codec"]
HEADS, GROUPS, SLOTS = 4, 2, 11
KINDS = [(bits, channels) for bits in (8, 4) for channels in (False, True)]


def steps(channels, bits, width=16, seed=0):
    """[G,D] or [1,1], of keys and of values."""
    rng = np.random.default_rng(seed)
    sizes = (2, GROUPS, width) if channels else (2, 1, 1)
    found = (rng.random(sizes) * 0.02 + 0.02) * (1 if bits == 8 else 16)
    return [torch.from_numpy(one.astype(np.float32)) for one in found]


def formula(x, scale, bits):
    """Whole numbers of x [B,G,T,D], as numpy rounds them."""
    parts = (np.float32(1) / scale.numpy())[:, None]
    ends = (-128, 127) if bits == 8 else (-8, 7)
    return np.clip(np.rint(x.numpy() * parts), *ends)


def whole(codes, bits):
    """Stored codes as whole numbers."""
    if bits == 8:
        return codes.astype(np.float32)
    return (
        np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1).astype(np.float32) - 8
    )


@pytest.mark.parametrize(("bits", "channels"), KINDS)
def test_codes_are_those_of_the_formula(bits, channels):
    """Exactly; and those of x / s but where that lies between two codes. The control: half a step away from zero."""
    scale = steps(channels, bits)[0]
    x = torch.randn(2, GROUPS, 50, 16, generator=torch.Generator().manual_seed(0)) * 4
    codes = whole(encode_static(x, scale, bits).numpy(), bits)
    np.testing.assert_array_equal(codes, formula(x, scale, bits))
    exact = x.numpy().astype(np.float64) / scale.numpy().astype(np.float64)[:, None]
    apart = np.abs(np.abs(exact - np.trunc(exact)) - 0.5) > 1e-4
    ends = (-128, 127) if bits == 8 else (-8, 7)
    assert (codes == np.clip(np.rint(exact), *ends))[apart].all() and apart.mean() > 0.99
    halves = (torch.arange(-6, 6) + 0.5).reshape(1, 1, -1, 1).expand(-1, -1, -1, 2)
    found = whole(encode_static(halves, torch.ones(1, 1), bits).numpy(), bits)
    away = halves + torch.copysign(torch.tensor(0.5), halves)
    assert (found % 2 == 0).all() and (away % 2 != 0).any()


def traced(bits, channels, width=16, heads=HEADS, **more):
    """A program of one layer: what a call appends is encoded, all is decoded, attention reads it."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()
    program = Program(Weights(), {"step": Entry(graph, [])}, Facts("one", 1, 64))
    start = graph.placeholder("unused")
    start.meta["val"] = mode.from_tensor(torch.zeros(2, 3), static_shapes=True)
    editor = Editor(program, graph)
    b, t, c = TRACE
    given = operands(b, t, c, bits, width, heads=heads)
    x = {name: symbolic(mode, graph.placeholder(name), value) for name, value in given.items()}
    scales = steps(channels, bits, width)
    params = [editor.param(f"{n}_scale", s) for n, s in zip("kv", scales, strict=True)]
    held = []
    for name, scale in zip("kv", params, strict=True):
        codes = editor.call(encode_static.default, x[f"new_{name}"], scale, bits)
        held.append(editor.call(kv_append.default, x[name], codes, x["slots"]))
    read = [
        editor.call(decode_static.default, codes, scale, bits, width)
        for codes, scale in zip(held, params, strict=True)
    ]
    sink = editor.param("sink", torch.zeros(heads)) if more.pop("sink", False) else None
    form = {"softcap": 0.0, "mask": "causal", "window": 0} | more
    asked = (x["q"], *read, x["q_pos"], x["k_pos"], None, width**-0.5, *form.values(), sink)
    outs = [editor.call(attention.default, *asked), *held]
    graph.output(tuple(outs))
    graph.erase_node(start)
    program.entries["step"].outputs = ["out", "k.after", "v.after"]
    for node in graph.find_nodes(op="placeholder"):
        for size in node.meta["val"].shape:
            program.dims.setdefault(str(size), f"n{len(program.dims)}")
    return program, scales, form


def operands(b, t, c, bits, width=16, seed=0, heads=HEADS):
    """Rows of unlike lengths; slots behind them hold codes of what was there before, at positions that nobody sees."""
    r = torch.Generator().manual_seed(seed)
    kind, stored = (torch.int8, width) if bits == 8 else (torch.uint8, (width + 1) // 2)
    ends = torch.iinfo(kind)
    slots = (c - t - torch.arange(b)).clamp(min=0)
    found = {"q": torch.randn(b, heads, t, width, generator=r)}
    for name in "kv":
        found[f"new_{name}"] = torch.randn(b, GROUPS, t, width, generator=r) * 2
        sizes = (b, GROUPS, c, stored)
        found[name] = torch.randint(ends.min, ends.max + 1, sizes, generator=r).to(kind)
    found["slots"] = slots
    found["q_pos"] = slots[:, None] + torch.arange(t) + 3  # a position is no slot
    where = torch.arange(c) + 3
    found["k_pos"] = torch.where(torch.arange(c) < slots[:, None] + t, where, -1)
    return found


def wanted(given, scales, bits, form):
    """Codes by the formula, and attention over what they stand for."""
    found, read = [], []
    for name, scale in zip("kv", scales, strict=True):
        codes = whole(given[name].numpy(), bits)
        new = formula(given[f"new_{name}"], scale, bits)
        for row, slot in enumerate(given["slots"].tolist()):
            codes[row, :, slot : slot + new.shape[2]] = new[row]
        found.append(codes)
        read.append(torch.from_numpy(codes) * scale[:, None])
    x = Operands(given["q"], *read, given["q_pos"], given["k_pos"], None, 0.25, *form.values())
    return attention.reference(*(getattr(x, n) for n in x.__dataclass_fields__)).numpy(), found


def opened(folder, variant="gqa"):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if variant == "native":
        native.register(options)
    return onnxruntime.InferenceSession(str(folder / f"step.{variant}.onnx"), options)


def in_place(session, given):
    """Outputs where what is appended to is bound as input and as output."""
    binding, held = session.io_binding(), {}
    for name, value in given.items():
        held[name] = onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy().copy())
        binding.bind_ortvalue_input(name, held[name])
    for name in "kv":
        binding.bind_ortvalue_output(f"{name}.after", held[name])
    binding.bind_output("out")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[-1].numpy().copy(), [held[name].numpy().copy() for name in "kv"]


@pytest.mark.parametrize(
    ("bits", "channels", "more"),
    [
        (8, False, {}),
        (4, True, {"softcap": 5.0, "mask": "window", "window": 4}),
        pytest.param(8, True, {"softcap": 5.0}, marks=pytest.mark.long),
        pytest.param(4, False, {"mask": "full"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_operator_reads_and_writes_the_codes(bits, channels, more, tmp_path):
    """Of one token in rows of unlike lengths, and of several, which go the portable way: attention over what the codes
    stand for; codes by the formula; in place as apart, and no slot that nobody wrote to is changed. The control: the
    scales of keys for values.
    """
    program, scales, form = traced(bits, channels, **more)
    entries = export(program, tmp_path)
    assert "gqa" in entries["step"]["variants"] and not program.facts.notes
    session = opened(tmp_path)
    for batch, tokens in ((1, 1), (3, 1), (1, 4), (2, 3)):
        given = operands(batch, tokens, SLOTS, bits, seed=batch)
        want, codes = wanted(given, scales, bits, form)
        out, *apart = session.run(
            ["out", "k.after", "v.after"], {n: v.numpy() for n, v in given.items()}
        )
        again, held = in_place(session, given)
        np.testing.assert_array_equal(out, again)
        assert np.abs(out - want).max() <= 1e-6 * max(1, np.abs(want).max())
        for name, mine, bound, right in zip("kv", apart, held, codes, strict=True):
            np.testing.assert_array_equal(whole(bound, bits), right)
            assert not np.array_equal(bound, given[name].numpy())
            for row, slot in enumerate(given["slots"].tolist()):
                end = slot + tokens
                np.testing.assert_array_equal(mine[row, :, :end], bound[row, :, :end])
        wrong = wanted(given, scales[::-1], bits, form)[0]
        assert np.abs(out - wrong).max() > 1e-4


def every(graph):
    """The operators of a graph, and of its branches."""
    found = set()
    for node in graph.node:
        found.add(node.op_type)
        for one in node.attribute:
            found |= every(one.g)
    return found


@needs_native
@pytest.mark.parametrize(
    ("bits", "channels", "heads", "kinds"),
    [
        (8, True, 4, {"AttentionInt8"}),
        (4, True, 4, {"GroupQueryAttention", "Attention"}),
        pytest.param(8, False, 4, {"AttentionInt8"}, marks=pytest.mark.long),
        pytest.param(8, True, 2, {"GroupQueryAttention", "AttentionInt8"}, marks=pytest.mark.long),
    ],
)
def test_native_attention_reads_codes_as_they_lie(bits, channels, heads, kinds, tmp_path):
    """8 bits of query heads that share keys, with the scales before the queries and behind what comes out; one token of
    others goes by onnxruntime's operator.
    """
    program, scales, form = traced(bits, channels, heads=heads)
    export(program, tmp_path)
    session = opened(tmp_path, "native")
    for batch, tokens in ((3, 1), (2, 3)):
        given = operands(batch, tokens, SLOTS, bits, seed=batch, heads=heads)
        want, codes = wanted(given, scales, bits, form)
        out, held = in_place(session, given)
        assert np.abs(out - want).max() <= 2e-6 * max(1, np.abs(want).max())
        for mine, right in zip(held, codes, strict=True):
            np.testing.assert_array_equal(whole(mine, bits), right)
        wrong = wanted(given, scales[::-1], bits, form)[0]
        assert np.abs(out - wrong).max() > 1e-4
    graph = onnx.load(tmp_path / "step.native.onnx", load_external_data=False).graph
    found = every(graph)
    assert {n for n in found if "Attention" in n} == kinds and "Decode" not in found


def drive(session):
    """Logits of a ragged prompt, of single tokens, of several, of a rewound and other way, of a fork; and the bytes."""
    tokens, found = np.random.default_rng(0).integers(3, 4000, (2, 40)), []
    with session:
        found.append(session.run(tokens[:, :20], np.array([20, 17])))
        found += [session.run(tokens[:, i : i + 1]) for i in range(20, 25)]
        found.append(session.run(tokens[:, 25:29], np.array([4, 2])))
        session.rewind(21)
        found.append(session.run(tokens[:, 30:31]))
        other = session.fork()
        found += [session.run(tokens[:, 31:32]), other.run(tokens[:, 32:33])]
        other.close()
        return found, session.stats["kv_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"bits": 4, "channels": False}], ids=str)
def test_a_session_of_every_graph_is_that_of_the_oracle(options):
    """The bundled model with its table; the bytes are those that the report says. The control: without a codec."""
    recipe = {"kv": {"codec": {"use": "ort-gqa-kv", **options}}}
    with accel.optimize(REFERENCE, recipe, max_context=64, max_batch=2) as model:
        want, bytes_ = drive(oracle(model).session(batch=2))
        assert "gqa" in model.artifact.entries["step"].graphs
        per_token = model.report["kv_bytes_per_token"]
        assert per_token == 8 + 8 * 2 * 2 * 64 * options.get("bits", 8) // 8
        for _, loaded in variants(model, None):
            got, taken = drive(loaded.session(batch=2))
            assert taken == bytes_ == 2 * 256 * per_token
            apart = [np.abs(a - b).max() for a, b in zip(got, want, strict=True)]
            # where sums round otherwise, some number lies on the other side of half a step
            assert max(apart) < (0.05 if options == {} else 1.0)
    with accel.optimize(REFERENCE, "base", max_context=64, max_batch=2, target="eager") as base:
        plain, _ = drive(base.session(batch=2))
    lost = [np.abs(a - b).max() for a, b in zip(plain, want, strict=True)]
    assert max(lost) > 3 * max(apart)


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "kernels"),
    [
        ({"depth": {"use": "unified-skip"}}, {"gqa", "native"}),
        (
            {"kv.score": {"use": "snapkv"}, "kv.budget": {"use": "uniform", "tokens_kept": 12}},
            {"native"},
        ),
    ],
    ids=["conditions", "evicted"],
)
def test_layers_may_be_left_out_and_tokens_evicted(more, kernels):
    """A branch within a branch writes in place, too; what is kept is in codes, and goes to native attention alone."""
    recipe = {"kv.codec": {"use": "ort-gqa-kv"}, **more}
    tokens = np.random.default_rng(0).integers(3, 4000, (2, 30))
    cuts = [0, 20, 21, 22, 25, 26]

    def logits(model):
        with model, model.session(batch=2) as session:
            return [session.run(tokens[:, a:b]) for a, b in itertools.pairwise(cuts)]

    with accel.optimize(REFERENCE, recipe, max_context=64, max_batch=2) as model:
        want = logits(oracle(model))
        graphs = model.artifact.entries["step"].graphs
        assert set(graphs) & {"gqa", "native"} == kernels
        for name in kernels:
            got = logits(accel.load(model.artifact.path, kernels=name))
            assert max(np.abs(a - b).max() for a, b in zip(got, want, strict=True)) < 0.05
            assert np.abs(got[-1] - want[-2]).max() > 1


def branches(folder):
    """The operators of either branch."""
    graph = onnx.load(folder / "step.gqa.onnx", load_external_data=False).graph
    found = next(n for n in graph.node if n.op_type == "If")
    outside = {n.op_type for n in graph.node}
    return outside, *({n.op_type for n in a.g.node} for a in found.attribute)


def test_no_call_does_the_work_of_the_other_branch(tmp_path):
    export(traced(8, False)[0], tmp_path)
    outside, one, other = branches(tmp_path)
    if "GroupQueryAttention" in other:
        one, other = other, one
    assert "GroupQueryAttention" in one and not one & {"TensorScatter", "Softmax", "Round"}
    assert other >= {"TensorScatter", "Softmax", "Round"}
    assert not outside & {"TensorScatter", "Softmax", "Round", "GroupQueryAttention"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"width": 10}, "a multiple of 8; here they have 10 and 10"), ({"sink": True}, "a sink")],
)
def test_what_the_operator_does_not_take_is_said_and_goes_the_portable_way(
    options, reason, tmp_path
):
    program = traced(8, False, **options)[0]
    assert "gqa" not in export(program, tmp_path)["step"].get("variants", {})
    assert [note for note in program.facts.notes if "variant 'gqa'" in note and reason in note]


def test_codes_that_another_node_reads_too_stay_with_the_portable_rules(tmp_path):
    """It reads what the append gives, which the operator would have to make first."""
    program = traced(8, False)[0]
    graph = program.step.graph
    read = graph.find_nodes(op="call_function", target=decode_static.default)[0]
    last = graph.find_nodes(op="output")[0]
    with graph.inserting_before(last):
        twice = Editor(program, graph).call(torch.ops.aten.neg.default, read)
    last.args = ((*last.args[0], twice),)
    program.step.outputs.append("negative")
    assert "gqa" not in export(program, tmp_path)["step"].get("variants", {})


def test_scales_are_the_largest_numbers_of_a_text():
    r = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, GROUPS, 30, 16, generator=r) * n for n in (1, 3)]
    seen = [
        Rows(torch.zeros(2, 31), torch.ones(2, 30), {0: Observed(x, x, -2 * x, 1.0)}) for x in rows
    ]
    most = torch.cat(rows, 2).abs().amax((0, 2))
    for bits, channels in KINDS:
        method = AXIS.build("ort-gqa-kv", bits=bits, channels=channels)
        found = method.constants(method.measure(seen))[0]
        want = (most if channels else most.max().reshape(1, 1)) / (127 if bits == 8 else 7)
        torch.testing.assert_close(found["key_scale"], want)
        torch.testing.assert_close(found["value_scale"], 2 * want)


@pytest.mark.parametrize("bits", [2, 3, 16])
def test_bits_that_the_operator_lacks_are_named_with_those_it_has(bits):
    with pytest.raises(RecipeError, match=rf"bits is {bits}.*4 or 8"):
        AXIS.build("ort-gqa-kv", bits=bits)
