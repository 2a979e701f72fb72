"""Law of the kv.codec axis: native attention over what a codec stores is attention over what torch reads of it, and
codes are read in place where their operators say so.
"""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from accel.ir.facts import Facts
from accel.ir.ops.attention import attention
from accel.ir.program import Editor, Program
from accel.ir.region import Conditional, Entry
from accel.ir.trace import trace
from accel.ir.weights import Weights
from accel.lowering.onnx import export, native
from accel.lowering.onnx.variants import native as variant
from accel.lowering.onnx.writer.builder import Builder
from accel.passes.kv.codec import AcrossLayers, At
from accel.passes.kv.codec._readers import reads_in_place

from .test_kv_codec import CODECS, HEADS, data, encode

pytestmark = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
BLOCKS, RECENT, TOKENS = 3, 40, 3
READ = [
    c
    for c in CODECS
    if (s := c.storage).block and not (s.together or s.unrotated or isinstance(c, AcrossLayers))
]
READINGS = [
    pytest.param(codec, coarse, width, id=f"{codec}-{width}{'-coarse' * coarse}", marks=marks)
    for codec in READ
    for coarse in {False, bool(codec.storage.coarse)}
    for width, marks in ((64, ()), (21, pytest.mark.long))
]


class Call:
    """Attention over random blocks of a codec before slots of floats: what a step of ONNX makes of it, and torch."""

    def __init__(self, codec, coarse, width, folder):
        self.width = width
        x = {role: data(codec, width, BLOCKS, seed) for seed, role in enumerate("kv")}
        x = {
            role: some / some.abs().amax((-3, -2, -1), keepdim=True).clamp(min=1)
            for role, some in x.items()
        }
        self.codec, self.parts = codec, {role: encode(codec, role, x[role]) for role in "kv"}
        self.coarse, rng = coarse, np.random.default_rng(0)
        kept = BLOCKS * codec.storage.block
        given = [
            (2, 2 * HEADS, TOKENS, width),
            (2, HEADS, RECENT, width),
            (2, HEADS, RECENT, width),
        ]
        self.given = [
            torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in given
        ]
        ahead = torch.arange(kept + RECENT - TOKENS, kept + RECENT).expand(2, -1)
        held = torch.arange(kept, kept + RECENT).expand(2, -1)
        self.where = [
            x.contiguous() for x in (ahead, held, torch.arange(kept).expand(2, HEADS, -1))
        ]
        self.session, self.nodes, self.in_place = self._lowered(folder)

    def _inputs(self, parts):
        found = {f"x{i}": x for i, x in enumerate((*self.given, *self.where))}
        found |= {f"{role}.{name}": x for role in "kv" for name, x in parts[role].items()}
        return found | ({"coarse": torch.tensor(self.coarse)} if self.codec.storage.coarse else {})

    def torch(self, parts):
        q, k, v, q_pos, held, kept = (*self.given, *self.where)
        if self.coarse:
            parts = {
                r: {n: x for n, x in some.items() if n in self.codec.storage.coarse}
                for r, some in parts.items()
            }
        old = [self.codec.decode(At(r, self.width), parts[r]) for r in "kv"]
        return attention(
            q, k, v, q_pos, held, None, 0.3, 0.0, "causal", 0, None, *old, kept
        ).numpy()

    def onnx(self, parts):
        return self.session.run(None, {n: x.numpy() for n, x in self._inputs(parts).items()})[0]

    def _lowered(self, folder):
        mode, graph = FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()
        holders = {}
        for name, value in self._inputs(self.parts).items():
            holders[name] = graph.placeholder(name)
            holders[name].meta["val"] = mode.from_tensor(value, static_shapes=True)
        program = Program(Weights(), {"step": Entry(graph, [])}, Facts("readers", 1, 4096))
        editor = Editor(program, graph)
        old = [self._read(editor, role, holders) for role in "kv"]
        q, k, v, q_pos, held, kept = (holders[f"x{i}"] for i in range(6))
        out = editor.call(
            attention.default, q, k, v, q_pos, held, None, 0.3, 0.0, "causal", 0, None, *old, kept
        )
        graph.output((out,))
        program.entries["step"].outputs = ["out"]
        export.load_rules()
        with (folder / "weights.bin").open("wb") as file:
            weights = export.WeightsFile(file)
            model = export.lower_entry(
                program, program.step, weights, Builder(weights.add, variant.lower)
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        native.register(options)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        return session, [n.op_type for n in model.graph.node], all(reads_in_place(x) for x in old)

    def _read(self, editor, role, holders):
        """What attention gets of the parts, as `_blocks.py` puts it there."""
        names = list(self.parts[role])
        given = [holders[f"{role}.{name}"] for name in names]

        def read(some):
            wanted = self.codec.storage.coarse if some else names
            return lambda *x: self.codec.decode(
                At(role, self.width), {n: y for n, y in zip(names, x, strict=True) if n in wanted}
            )

        if not self.codec.storage.coarse:
            return trace(editor, role, read(False), *given)
        graphs = []
        for some in (True, False):
            inner = fx.Graph()
            operands = (holders["coarse"], *given)
            mine = [inner.placeholder(str(node.target)) for node in operands]
            for own, node in zip(mine, operands, strict=True):
                own.meta["val"] = node.meta["val"]
            inner.output((trace(Editor(editor.program, inner), role, read(some), *mine[1:]),))
            graphs.append(inner)
        region = Conditional(f"read.{role}", *graphs)
        call = editor.graph.call_function(region, (holders["coarse"], *given))
        call.meta["val"] = tuple(
            n.meta["val"] for n in next(iter(graphs[0].find_nodes(op="output"))).args[0]
        )
        return editor.call(fx.proxy.operator.getitem, call, 0)


@pytest.mark.parametrize(("codec", "coarse", "width"), READINGS)
def test_attention_reads_of_blocks_what_torch_reads(codec, coarse, width, tmp_path):
    """The control: any part of another block, as far as torch reads it."""
    call = Call(codec, coarse, width, tmp_path)
    np.testing.assert_allclose(call.onnx(call.parts), call.torch(call.parts), atol=1e-5, rtol=1e-4)
    assert call.in_place == ("AttentionGroups" in call.nodes)
    assert not call.in_place or len(call.nodes) < 5  # nothing is decoded before
    for role in "kv":
        for name, x in call.parts[role].items():
            other = x.roll(1, 2)
            broken = {**call.parts, role: {**call.parts[role], name: other}}
            want = call.torch(broken)
            np.testing.assert_allclose(call.onnx(broken), want, atol=1e-5, rtol=1e-4)
            unread = (coarse and name not in codec.storage.coarse) or torch.equal(other, x)
            assert unread == np.array_equal(want, call.torch(call.parts))
