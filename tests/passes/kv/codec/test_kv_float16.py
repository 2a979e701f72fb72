"""kv-float16: torch's own halves, a model's cache in them however calls are cut, and numbers that are too large."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.axis import find_axes
from accel.ir.ops.codec import MOST_HALF
from accel.lowering.onnx import native
from accel.passes.kv.codec import At

from ....massive_case import SINK, TAKES, TOKENS, massive
from ....once import made_once
from ....session_ways import near, oracle, recut, variants
from .test_kv_int8 import nodes

needs_native = pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
CODEC, AT = find_axes()["kv.codec"].build("kv-float16"), At("k", 10)
MANY = np.random.default_rng(3).integers(0, 50, (2, 21))


def stored(x):
    return CODEC.decode(AT, CODEC.encode(AT, x))


@pytest.fixture(scope="module")
def made():
    def get(name, *recipe):
        asked = ["kv-float16", *recipe]
        return accel.optimize(models.make(name, 2), asked, max_context=128, max_batch=2)

    with made_once(get) as found:
        yield found


def test_halves_are_torchs():
    x = torch.randn(3, 2, 50, 10, generator=torch.Generator().manual_seed(0)) * 100
    assert torch.equal(CODEC.encode(AT, x)[""], x.half())
    assert not torch.equal(CODEC.encode(AT, x)[""], x.bfloat16().half())


def test_what_is_too_large_is_the_largest_and_what_is_no_number_none():
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e9, torch.inf, -torch.inf, torch.nan])
    back = stored(x)
    assert back[:4].tolist() == [MOST_HALF, MOST_HALF, MOST_HALF, -MOST_HALF]
    assert back[4:].isnan().all()
    assert x[2].half().isinf(), "the control: float16 itself overflows"


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
@pytest.mark.long
def test_every_way_through_a_session_is_that_of_the_oracle(made, name, recipe):
    compiled = made(name, *recipe)
    tolerance = 0.05 if recipe else 1e-3
    got, held = recut(compiled.session(batch=2), MANY)
    want, right = recut(oracle(compiled).session(batch=2), MANY)
    for a, b in zip(got, want, strict=True):
        near(a, b, tolerance)
    assert held == right


def test_memory_is_its_formula(made):
    compiled = made("llama")
    per_token = (
        8 + 2 * 2 * 2 * 10 * 2
    )  # a position; layers, keys and values, heads, channels, bytes
    assert compiled.report["kv_bytes_per_token"] == per_token
    state = {s.name: (s.dtype, s.shape) for s in compiled.artifact.state}
    assert state["kv.1.v"] == ("float16", ("B", 2, "C", 10))


@needs_native
def test_halves_are_written_and_read_in_place(made):
    found = nodes(made("llama"))
    assert found >= {"PlaceFloat16", "AttentionFloat16"}
    assert not found & {"Place", "Attention", "Cast", "EncodeFloat16", "DecodeFloat16"}


def test_a_probe_of_it_is_measured(made):
    assert made("llama").tuning.why == "measured"


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", [(), ("int4",)], ids=str)
def test_rows_are_equal_bit_for_bit_under_batch_invariant(made, weights):
    compiled = made("llama", "batch-invariant", *weights)
    for _, model in variants(compiled, None):
        with model.session() as session:
            whole = session.run(MANY[:1])
            session.rewind(0)
            apart = [session.run(MANY[:1, i : i + 1]) for i in range(MANY.shape[1])]
            np.testing.assert_array_equal(whole, np.concatenate(apart, 1))


@pytest.mark.long
@needs_native
@pytest.mark.parametrize(
    "recipe", ["knorm", "quest", "tokenselect", "paged-prefix", "h2o", "unified-skip"]
)
def test_it_goes_with_what_moves_slots(recipe):
    """As near to the same without it as halves are, and no other operator reads its slots."""
    found, model = [], models.PlainSdpa(layers=4)
    for asked in ([recipe], [recipe, "kv-float16"]):
        with accel.optimize(model, asked, max_context=64) as compiled:
            if len(asked) > 1:
                made = nodes(compiled)
                assert made & {"AttentionFloat16", "DrawnAttentionFloat16"}
                assert "DecodeFloat16" not in made
            with compiled.session() as session:
                found.append(
                    np.concatenate([session.run(MANY[:1, :15]), session.run(MANY[:1, 15:18])], 1)
                )
    near(found[1], found[0], 5e-3)
    assert not np.array_equal(found[1], found[0])


@pytest.fixture(scope="module")
def large():
    """A massive activation that a layer has in its values, beyond what float16 holds, and makes little of."""
    model = massive()
    attention = model.model.layers[TAKES].self_attn
    with torch.no_grad():
        attention.v_proj.weight[0, SINK] = 3e4
        attention.o_proj.weight[:, : 2 * attention.head_dim] *= 1e-7  # of the heads that read them
    return model


@pytest.mark.parametrize("target", ["eager", pytest.param("onnx", marks=pytest.mark.long)])
@pytest.mark.few(1)
def test_values_of_a_massive_activation_are_cut_off(large, target):
    found = []
    values = large.model.layers[TAKES].self_attn.v_proj
    hook = values.register_forward_hook(lambda m, args, out: found.append(float(out.abs().max())))
    with torch.no_grad():
        want = large(TOKENS[:1]).logits.numpy()
    hook.remove()
    assert found[0] > 1.2 * MOST_HALF
    with accel.optimize(large, "kv-float16", max_context=64, target=target) as compiled:
        with compiled.session() as session:
            got = session.run(TOKENS[:1].numpy())
    assert np.isfinite(got).all()
    near(got, want, 0.05)
