"""KV-AdaQuant: more bits for keys, single tokens, and codes that attention reads in place."""

import math

import models
import onnx
import pytest
import torch

import accel
from accel.ir.axis import find_axes
from accel.lowering.onnx import native
from accel.passes.kv.codec import At

from ....refused import refuses

AXIS = find_axes()["kv.codec"]
CODEC = AXIS.build("kv-adaquant")


def read(x, **options):
    method = AXIS.build("kv-adaquant", **options)
    places = [At(role, x.shape[-1]) for role in "kv"]
    return {at.role: method.decode(at, method.encode(at, x)) for at in places}


def lost(key_bits, value_bits, keys_larger):
    """The squared error of attention whose keys are so many times larger than the values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 96, 32, generator=generator) for _ in range(3))
    k = k * keys_larger
    want = torch.softmax(q @ k.mT / math.sqrt(32), -1) @ v
    options = {"key_bits": key_bits, "value_bits": value_bits}
    got = (
        torch.softmax(q @ read(k, **options)["k"].mT / math.sqrt(32), -1) @ read(v, **options)["v"]
    )
    return float((got - want).square().mean())


def test_keys_that_are_larger_want_more_bits():
    """Section 4: at the same bytes, 4 bits for keys and 2 for values lose less. The control: keys that hardly count."""
    assert lost(4, 2, 3.0) < lost(2, 4, 3.0) / 2
    assert lost(4, 2, 0.05) > lost(2, 4, 0.05)


def test_equal_bits_treat_keys_and_values_alike():
    x = torch.randn(1, 2, 5, 24, generator=torch.Generator().manual_seed(0))
    same = read(x, key_bits=4, value_bits=4)
    assert torch.equal(same["k"], same["v"])
    assert not torch.equal(read(x)["k"], read(x)["v"])  # the control: 4 and 2


def test_the_bits_are_those_of_the_page():
    """(b_K + b_V) / 2, and a scale and a minimum of 16 bits for each 64 channels."""
    assert [CODEC.bits_of(At(role, 128)) for role in "kv"] == [4.5, 2.5]


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.kv-adaquant", {"key_bits": 3}, {"value_bits": 0}, {"group": 0}
)


@pytest.mark.long
@pytest.mark.parametrize("score", [None, "snapkv"])
@pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
def test_the_compiled_attention_reads_codes_in_place(score):
    tables = {"kv.codec": {"use": "kv-adaquant", "group": 4}}
    if score:
        tables["kv.score"] = {"use": score, **find_axes()["kv.score"].small(score)}
    with accel.optimize(models.ARCHITECTURES["llama"](), tables, max_context=64) as compiled:
        path = compiled.artifact.path / "step.native.onnx"
        nodes = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    assert "AttentionCodes" in nodes and not {"Attention", "DecodeGroups"} & nodes
