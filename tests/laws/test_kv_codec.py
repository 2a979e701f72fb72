"""Laws of the kv.codec axis: what is read back is as near as the codec promises, row by row or block by block, in the
bytes declared.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from accel.compiler.assemble import GRADES
from accel.compiler.facts_json import kv_bytes
from accel.ir.axis import find_axes
from accel.ir.ops.attention import Form
from accel.ir.program import DTYPES
from accel.ir.tables import Observed, Rows, Tables
from accel.lowering.onnx import export
from accel.lowering.onnx.variants import native
from accel.lowering.onnx.writer.builder import Builder
from accel.passes.kv.codec import AcrossLayers, At, Storage, _readers
from accel.passes.kv.codec._encode import Encode
from accel.passes.trained import Fitted

from ..select_case import measured_for

AXIS = find_axes()["kv.codec"]
WIDTHS = (1, 7, 10, 64, 129)
HEADS = 4
CODECS = [AXIS.build(n, **o) for n in AXIS.names() for o in ({}, *AXIS.method(n).others)]
LAYERS = 4  # of codecs that span layers
_LOST = re.compile(
    r"every stored token of (all layers|\d+ layers) first, to ([\d,]+) bytes of floats"
)


@dataclass(frozen=True)
class InLayer:
    """A codec that spans layers, in one of them. Another layer's numbers are made of its own, token by token."""

    codec: Any
    layer: int

    def __getattr__(self, name):
        return getattr(self.codec, name)

    def __str__(self):
        return f"{self.codec}@{self.layer}"


def in_layers(codec):
    """In a layer of each kind, if it makes a difference."""
    if not isinstance(codec, AcrossLayers):
        return [codec]
    kinds = {codec.place(layer, LAYERS): layer for layer in reversed(range(LAYERS))}
    return [InLayer(codec, layer) for layer in kinds.values()]


METHODS = [method for codec in CODECS for method in in_layers(codec)]
ROLES = [pytest.param(m, role, id=f"{m}-{role}") for m in METHODS for role in "kv"]


def data(method, width, count=11, seed=0):
    """[2,H,count,width], or blocks [2,H,count,R,width]: rows of very different sizes, channels that are not about 0,
    an outlier, a constant row, zeros. The H heads as one where the codec takes them together.
    """
    generator = torch.Generator().manual_seed(seed)
    block = method.storage.block
    x = torch.randn((2, HEADS, count, *([block] if block else []), width), generator=generator)
    if block:
        x *= 10.0 ** torch.randint(-2, 3, (2, HEADS, count, 1, width), generator=generator)
        x += 4 * torch.randn(2, HEADS, count, 1, width, generator=generator)
        x[0, 0, 0, 0, 0], x[0, 0, 1, :, 0], x[1, 1, 2], x[1, 0, 2, 3] = 3e4, 3.25, 0, -0.1
    else:
        x *= 10.0 ** torch.randint(-4, 4, (2, HEADS, count, 1), generator=generator)
        x[0, 0, 0, 0], x[0, 0, 1], x[1, 2, 2], x[1, 2, 3] = 1e4, 3.25, 0, -1e-7
    return joined(method, x)


def joined(method, x):
    return x.movedim(1, -2).flatten(-2)[:, None] if method.storage.together else x


@cache
def constants(method, width):
    """Those of a layer, measured of other numbers, or made of a trained part of random ones."""
    codec = method.codec if isinstance(method, InLayer) else method
    if not isinstance(codec, Tables | Fitted):
        return {}
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, HEADS, 200, width, generator=generator) for _ in "kv")
    queries = torch.randn(2, 2 * HEADS, 200, width, generator=generator)
    layer = Observed(queries, keys, values, Form("causal", scale=width**-0.5), keys)
    tokens = torch.zeros(2, 201, dtype=torch.int64)
    many = LAYERS if isinstance(method, InLayer) else 1
    rows = Rows(tokens, torch.ones(2, 200), dict.fromkeys(range(many), layer))
    if isinstance(codec, Tables):
        return method.constants(method.measure([rows]))[many - 1 and method.layer]
    parts = method.start(rows, 8, generator)
    for tensor in parts[0].values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return method.constants(parts)[0]


def told(method, x):
    """The constants for numbers x."""
    return constants(method, x.shape[-1] // HEADS if method.storage.together else x.shape[-1])


def asked(method, role, x):
    """The products of queries, in channels of very different size, where the codec asks for them."""
    if not (method.storage.queries and role == "k"):
        return {}
    generator = torch.Generator().manual_seed(2)
    width = x.shape[-1]
    queries = torch.randn(*x.shape[:2], 50, width, generator=generator)
    queries = queries * 2.0 ** torch.randint(-4, 5, (width,), generator=generator)
    return {"queries": queries.mT @ queries}


def near(method, role, x, written, **known):
    """What the functions of a codec of several layers know of others. known: numbers of these."""
    if not isinstance(method, InLayer):
        return {}
    found, other = {}, 0.7 * x + 0.3 * x.roll(1, -1)
    for name in method.near(role, method.place(method.layer, LAYERS), written):
        if name in known:
            found[name] = known[name]
        elif name == "keys":
            found[name] = read(method, "k", other)
        elif name == "read":
            found[name] = read(InLayer(method.codec, method.layer - 1), role, other, above=x)
        else:
            found[name] = other
    return found


def at(method, role, x, **context):
    place = method.place(method.layer, LAYERS) if isinstance(method, InLayer) else ""
    return At(role, x.shape[-1], place, told(method, x), context)


def written(method, role, x, **known):
    """Where numbers x are encoded, and checked."""
    return at(method, role, x, **near(method, role, x, True, **known), **asked(method, role, x))


def encode(method, role, x, **known):
    return method.encode(written(method, role, x, **known), x)


def read(method, role, x, **known):
    """What comes back, in the shape of x."""
    parts, block = encode(method, role, x, **known), method.storage.block
    back = method.decode(at(method, role, x, **near(method, role, x, False, **known)), parts)
    assert back.dtype == torch.float32
    if block:
        assert back.shape == (*x.shape[:2], x.shape[2] * block, x.shape[-1])
        back = back.unflatten(2, (-1, block))
    assert back.shape == x.shape
    return back


def within(method, role, x, back):
    return method.within(written(method, role, x), x, back).all()


@pytest.mark.parametrize(("method", "role"), ROLES)
def test_what_is_read_back_is_as_near_as_promised(method, role):
    for width in WIDTHS:
        x = data(method, width)
        assert within(method, role, x, read(method, role, x))
    for value in (0.0, 1.0, -7.5, 1e-9, 6e4):
        x = torch.full_like(data(method, 10), value)
        assert within(method, role, x, read(method, role, x))


@pytest.mark.parametrize(("method", "role"), ROLES)
def test_a_codec_that_breaks_its_promise_is_caught(method, role):
    """What it reads is 0.9 times as large, or lies in the channel beside its own."""
    x = data(method, 64)
    for broken in (0.9 * x, x.roll(1, -1)):
        assert not within(method, role, x, read(method, role, broken))


@pytest.mark.parametrize(("method", "role"), ROLES)
def test_the_parts_are_as_declared_and_take_the_bits_declared(method, role):
    assert method.grade in GRADES
    for width in WIDTHS:
        x = data(method, width)
        parts, declared = encode(method, role, x), method.parts(at(method, role, x))
        assert next(iter(declared)) == "" and list(parts) == list(declared)
        for part, (dtype, sizes) in declared.items():
            assert parts[part].dtype == DTYPES[dtype]
            assert parts[part].shape == (*x.shape[:3], *sizes)
        taken = sum(8 * p.nbytes for p in parts.values()) / x.numel()
        assert taken == pytest.approx(method.bits_of(at(method, role, x)))


@pytest.mark.parametrize(("method", "role"), [one for one in ROLES if one.values[0].storage.coarse])
def test_a_coarse_reading_takes_fewer_bytes_and_says_less(method, role):
    """It gets the parts that are declared, and does not keep the promise of the whole."""
    for width in WIDTHS[1:]:  # a channel by itself is exact
        x = data(method, width)
        parts = encode(method, role, x)
        storage = method.storage
        few = {name: parts[name] for name in parts if name in storage.coarse}
        assert list(few) == list(storage.coarse) and few.keys() < parts.keys()
        back = method.decode(at(method, role, x), few).unflatten(2, (-1, storage.block))
        assert back.shape == x.shape and back.isfinite().all()
        assert not within(method, role, x, back)
        assert (back - x).abs().mean() > (read(method, role, x) - x).abs().mean()


@pytest.mark.parametrize(("method", "role"), ROLES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_no_number_spoils_its_row_or_block_only(method, role, value):
    """It is read, if at all, by queries that see this token too: but for the token they lose nothing that they had.
    Where the method has ranges (`saturates`), nothing but the number itself is read otherwise.
    """
    if method.storage.saturates:
        return saturated(method, role, value)
    x = data(method, 10)
    want = read(method, role, x)
    place = (1, 0, 1, 5, 3) if method.storage.block else (1, 0, 4, 3)
    x[place] = value
    back = read(method, role, x)
    spoilt = ~back.isfinite()
    if value == 1e30 and back[place].isfinite():  # a row's step may be of its size
        assert within(method, role, x, back)
        spoilt[place[:3]] = True
    else:
        assert not back[place].isfinite()
    assert spoilt.flatten(3).any(3).nonzero().tolist() == [list(place[:3])]
    left_out = (want == 0) & (x != 0)  # another number of the token takes the place, or loses it
    spoilt[place[:-1]] |= left_out[place[:-1]].any()
    assert torch.equal(back[~spoilt], want[~spoilt])


def saturated(method, role, value):
    x = data(method, 10)
    want = read(method, role, x)
    place = (1, 0, 4, 3)
    x[place] = value
    back = read(method, role, x)
    ends = (
        read(method, role, torch.full_like(x, 1e30)),
        read(method, role, torch.full_like(x, -1e30)),
    )
    assert ends[1][place] <= back[place] <= ends[0][place] and ends[0].isfinite().all()
    if not math.isnan(value):
        assert back[place] == ends[value < 0][place]
    want[place] = back[place]
    assert torch.equal(back, want)


def test_a_codec_without_ranges_that_claims_them_is_caught(monkeypatch):
    method = AXIS.build("kv-int8")
    monkeypatch.setattr(type(method), "storage", Storage(saturates=True))
    with pytest.raises(AssertionError):
        test_what_is_no_number_spoils_its_row_or_block_only(method, "k", 1e30)


@pytest.mark.parametrize(("method", "role"), ROLES)
def test_a_row_or_block_does_not_depend_on_others(method, role):
    x = data(method, 24)
    whole, again = encode(method, role, x), encode(method, role, x)
    for slot in range(x.shape[2]):
        alone = encode(method, role, x[:, :, slot : slot + 1])
        for part in whole:
            assert torch.equal(whole[part], again[part])
            one, of_many = alone[part][:, :, 0], whole[part][:, :, slot]
            if hasattr(method, "table") and one.is_floating_point():  # products round by their size
                scale = of_many.abs().amax(-1, keepdim=True)
                assert ((one - of_many).abs() <= 1e-5 * scale).all()
            else:
                assert torch.equal(one, of_many)


def attentions(program, folder):
    """The kinds of attention in the native step."""
    export.load_rules()
    with (folder / "weights.bin").open("wb") as file:
        weights = export.WeightsFile(file)
        step = Builder(weights.add, native.lower)
        nodes = export.lower_entry(program, program.step, weights, step).graph.node
    return {n.op_type for n in nodes if n.op_type.startswith("Attention")}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", AXIS.names())
def test_a_build_says_whether_codes_are_read_in_place(name, stateful, tmp_path, monkeypatch):
    """Native attention reads floats where, and only where, a note says that a step decodes, with the bytes that they
    take a token; the control: a note of what is read in place.
    """
    for broken in (False, True):
        program = stateful("llama")
        dense = kv_bytes(program) - 8  # of float32 keys and values, without a position
        monkeypatch.setattr(_readers, "READ", frozenset() if broken else _readers.READ)
        method = measured_for(AXIS.build(name, **AXIS.small(name)), program, tmp_path)
        Encode(method).run(program)
        told = [note for note in program.facts.notes if "no attention reads its codes" in note]
        right = bool(told) == ("Attention" in attentions(program, tmp_path))
        assert right or broken
        if told and right:
            (decoded, some), many = _LOST.search(told[0]).groups(), len(program.facts.layers)
            layers = many if decoded == "all layers" else int(decoded.split()[0])
            assert int(some.replace(",", "")) * many == dense * layers
            return
    assert not right
