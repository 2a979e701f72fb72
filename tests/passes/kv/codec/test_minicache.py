"""minicache: layers in pairs share directions; what is alike, and what differs most, comes back as it was."""

import models
import numpy as np
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture
from accel.ir.errors import PassError
from accel.passes.kv.codec import At
from accel.passes.kv.codec._encode import Encode

from ....prefill_case import TOKENS, built
from ....refused import refuses
from ....select_case import Selecting
from ....session_ways import close

AXIS = find_axes()["kv.codec"]
R, D = 16, 12


def codec(**options):
    return AXIS.build(
        "minicache", **{"bits": 32, "group": 4, "residual": R, "retain": 0.0, **options}
    )


@pytest.fixture(scope="module")
def pair():
    """x1 and x2 [1,2,3,R,D], whose directions differ from token to token by more and by less."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(1, 2, 3, R, D, generator=generator) for _ in range(2))
    return one, 3 * (one + other * torch.linspace(0.02, 2, R)[:, None])


def read(method, one, two, role="k", change=lambda parts: parts):
    """What both layers read of x1 and x2. change: of what the lower one stores."""
    at = At(role, D, "lower", context={"above": two})
    first = method.decode(at, change(method.encode(at, one))).unflatten(2, (-1, R))
    upper = method.encode(At(role, D, "upper", context={"beneath": one}), two)
    second = method.decode(At(role, D, "upper", context={"read": first}), upper)
    second = second.unflatten(2, (-1, R))
    return first, second


def test_equal_layers_come_back_as_they_were_and_lengths_always_do(pair):
    one, two = pair
    for scale in (1.0, 7.0, 1e-6):
        first, second = read(codec(), one, scale * one)
        torch.testing.assert_close(first, one, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(second, scale * one, rtol=1e-6, atol=1e-6 * scale)
    found = read(codec(), one, two)
    for x, back in zip(pair, found, strict=True):
        torch.testing.assert_close(back.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)
    assert (found[0] - one).norm() > 0.05 * one.norm()  # the control: not what was not equal


def test_directions_are_on_the_arc_between_theirs(pair):
    one, two = pair

    def angle(a, b):
        return (torch.nn.functional.cosine_similarity(a, b, dim=-1)).clamp(-1, 1).double().acos()

    between = angle(one, two)
    for deeper in (0.0, 0.3, 0.6, 1.0):
        first, second = read(codec(deeper=deeper), one, two)
        for back in (first, second):
            assert (angle(one, back) - deeper * between).abs().max() < 2e-3
            assert (angle(two, back) - (1 - deeper) * between).abs().max() < 2e-3
    torch.testing.assert_close(
        first, first.norm(dim=-1, keepdim=True) * two / two.norm(dim=-1, keepdim=True)
    )
    assert (angle(one, read(codec(deeper=0.5), one, two)[0]) - 0.6 * between).abs().max() > 0.02


def test_what_differs_most_is_retained(pair):
    one, two = pair
    cosine = torch.nn.functional.cosine_similarity(one, two, dim=-1)
    for retain, count in ((0.0, 0), (0.25, 4), (1.0, R)):
        found = read(codec(retain=retain), one, two)
        least = cosine.argsort(-1).argsort(-1) < count
        for x, back in zip(pair, found, strict=True):
            exact = (back == x).all(-1)
            assert exact[least].all() and not exact[~least].any()


def test_rotated_directions_are_shared_as_plain_ones(pair):
    """One rotation of both layers, as of rope."""
    turn = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(1))).Q
    plain = read(codec(), *pair)
    for back, rotated in zip(plain, read(codec(), *(x @ turn for x in pair)), strict=True):
        torch.testing.assert_close(rotated, back @ turn, rtol=1e-4, atol=1e-4)


def test_zeros_and_opposite_directions_have_a_direction(pair):
    one, two = pair
    first, second = read(codec(), torch.zeros_like(one), two)
    torch.testing.assert_close(second, two)
    assert first.abs().max() < 1e-20
    first, second = read(codec(), -two, two)
    torch.testing.assert_close(second, two)
    assert first.isfinite().all()


def test_the_bits_of_a_pair(pair):
    """D + 2 numbers of a token instead of 2 D, and what is retained."""
    method = codec(bits=16, residual=64)
    both = sum(method.bits_of(At("k", 64, p)) for p in ("lower", "upper")) / 2
    assert both == pytest.approx((16 * 64 + 2 * 32) / 128)
    four = AXIS.build("minicache")
    both = sum(four.bits_of(At(role, 128, p)) for p in ("lower", "upper") for role in "kv") / 4
    assert both == pytest.approx(2 + 0.25 + 0.25 + (16 * 128 + 8) * 3 / 64 / 128)
    assert [four.place(i, 7) for i in range(7)] == ["alone"] * 3 + ["lower", "upper"] * 2
    assert [four.place(i, 5) for i in range(5)] == ["alone"] * 2 + ["lower", "upper", "alone"]


def drive(case, prompt=41):
    tokens, found = case.tokens(2, 60), []
    with case.session(2) as session:
        found.append(session.run(tokens[:, :prompt], [prompt, 20])[:, -1:])
        found += [session.run(tokens[:, [i]]) for i in range(prompt, prompt + 6)]
        session.rewind(session.lengths - 3)
        found.append(session.run(tokens[:, 50:53])[:, -1:])
    return np.concatenate(found, 1)


@pytest.fixture(scope="module")
def four():
    """A program over state, of four layers, of which the last two are a pair."""
    made = over_state(capture(models.make("llama", 4), max_context=128))
    return lambda: made.copy()


@pytest.mark.long
def test_a_model_whose_tokens_are_all_retained_is_the_model(four):
    """The control: none are retained."""
    want, whole, none = (
        drive(Selecting(four(), method))
        for method in (None, codec(residual=8, retain=1.0), codec(residual=8))
    )
    close(whole, want)
    assert np.abs(none - want).max() > 1e-2


@pytest.mark.long
def test_the_upper_layer_stores_no_directions(four, pair):
    case = Selecting(four(), codec(residual=8))
    sizes = {s.name: s.shape[3:] for s in case.program.state if s.name.startswith("kept.")}
    assert [sizes[f"kept.{i}.v"] for i in range(4)] == [sizes["kept.0.v"]] * 3 + [(8,)]
    want = read(codec(), *pair)
    turned = read(codec(), *pair, change=lambda parts: {**parts, "": parts[""].roll(1, -1)})
    assert all((a - b).abs().max() > 0.1 for a, b in zip(want, turned, strict=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("cla", "reads the cache of layer .*one of each", marks=pytest.mark.long),
        ("plain_latent", "latent"),
        pytest.param("mamba", "no cache of keys and values", marks=pytest.mark.long),
    ],
)
def test_models_that_it_cannot_serve_are_refused(stateful, name, words):
    program = (
        over_state(capture(models.cla(), max_context=128)) if name == "cla" else stateful(name)
    )
    with pytest.raises(PassError, match=words):
        Encode(codec()).run(program)


test_what_makes_no_sense_is_refused = refuses(
    "kv.codec.minicache",
    {"bits": 5},
    ({"group": 3}, "kv.codec.minicache: residual is 64; give a multiple of group = 3"),
    {"deeper": 1.5},
    {"retain": -0.1},
)


@pytest.mark.long
def test_onnx_reads_what_torch_reads():
    def logits(target, **options):
        use = {"use": "minicache", "group": 4, "residual": 8, **options}
        with built("llama:4", target, tables={"kv.codec": use}).session() as session:
            prompt = session.prompt(TOKENS[:1, :30])
            return np.concatenate([prompt, session.run(TOKENS[:1, [30]])], 1)

    for options in ({"bits": 16}, {"bits": 8, "retain": 0.25}):
        found = logits("onnx", **options)
        assert np.allclose(found, logits("eager", **options), atol=1e-3)
    assert not np.allclose(found, logits("eager", bits=4, retain=0.0), atol=1e-3)  # the control
