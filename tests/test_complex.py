"""Complex numbers become pairs of real ones, whatever a model does with them on the way."""

import math

import pytest
import torch
from torch import nn

from accel import PassError
from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.ir.ops.rope import rope
from accel.passes import run
from accel.passes.check import NumericCheck
from accel.passes.clean import real
from accel.passes.clean.clean import Clean
from accel.passes.clean.real import Reals


class Turning(nn.Module):
    """A decoder of one attention whose queries and keys [B,T,H,D] pass through `turn`."""

    def __init__(self, turn, vocab=41, heads=3, width=8):
        super().__init__()
        self.turn, self.heads, self.width = turn, heads, width
        self.embed = nn.Embedding(vocab, heads * width)
        self.qkv = nn.Linear(heads * width, 3 * heads * width)
        self.head = nn.Linear(heads * width, vocab)
        speed = 50.0 ** -torch.linspace(0, 1, width // 2)
        angles = torch.arange(64)[:, None] * speed
        self.register_buffer("speed", speed)
        self.register_buffer("spin", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.width).unbind(2)
        q, k = (self.turn(self, t, positions).transpose(1, 2) for t in (q, k))
        out = nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.head(x + out.transpose(1, 2).flatten(2))


def pairs(x):
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def flat(z):
    return torch.view_as_real(z).flatten(-2)


def stored(m, x, positions):
    """A complex buffer, cut to the length."""
    return flat(pairs(x) * m.spin[: x.shape[1]][:, None])


def polar(m, x, positions):
    angle = positions[..., None] * m.speed
    return flat(pairs(x) * torch.polar(torch.ones_like(angle), angle)[:, :, None])


def exponent(m, x, positions):
    return flat(pairs(x) * torch.exp(1j * (positions[..., None] * m.speed))[:, :, None])


def of_halves(m, x, positions):
    """Halves as real and imaginary parts, and parts taken by name."""
    z = torch.complex(*x.chunk(2, -1)) * m.spin[positions].unsqueeze(2)
    return torch.cat([z.real, z.imag], -1)


def conjugated(m, x, positions):
    """z·conj(w), scaled by a real table, negated twice, moved about."""
    z = pairs(x).transpose(1, 2) * torch.conj(m.spin[positions])[:, None].expand(
        -1, m.heads, -1, -1
    )
    return flat(-(z.neg() / 2.0 - z * 0.5)).permute(0, 2, 1, 3)


def quarter_more(m, x, positions):
    """A quarter turn more, which is no turn by position but changes nothing between q and k."""
    return flat(pairs(x) * m.spin[positions].unsqueeze(2) * 1j)


def laid_out(m, x, positions):
    """Halves that are laid out as neighbours before they are viewed as complex."""
    z = torch.view_as_complex(x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())
    z = z * m.spin[positions].unsqueeze(2)
    return torch.cat([z.real, z.imag], -1)


FORMS = [stored, polar, exponent, of_halves, conjugated, quarter_more, laid_out]


def program_of(turn):
    torch.manual_seed(0)
    return capture(Turning(turn).eval(), max_context=48)


def complex_nodes(program):
    values = (n.meta.get("val") for n in program.nodes())
    params = [t for t in program.params.values() if t.is_complex()]
    return params + [v for v in values if isinstance(v, torch.Tensor) and v.is_complex()]


@pytest.mark.few(3)
@pytest.mark.parametrize("turn", FORMS, ids=lambda f: f.__name__)
def test_no_complex_number_is_left_and_nothing_changes(turn):
    program = program_of(turn)
    check = NumericCheck(program)
    assert complex_nodes(program)
    steps = run(program, pipeline(), check)
    assert not complex_nodes(program)
    assert max(s.error for s in steps if s.error is not None) < 1e-6
    if turn is not quarter_more:
        assert len(program.nodes(rope.default)) == 2


def test_a_wrong_product_is_caught(monkeypatch):
    """Negative control: the imaginary parts' product is added, not subtracted."""
    monkeypatch.setattr(real, "_sub", lambda e, a, b: e.call(torch.ops.aten.add.Tensor, a, b))
    program = program_of(polar)
    with pytest.raises(PassError, match="^Reals changed what the program computes"):
        run(program, [Clean(), Reals()], NumericCheck(program))


def test_what_has_no_real_form_is_named():
    def magnitude(m, x, positions):
        return x * (pairs(x) * m.spin[positions].unsqueeze(2)).abs().mean(-1, True) / math.pi

    with pytest.raises(PassError, match=r"abs.* uses complex numbers.*cos and sin"):
        run(program_of(magnitude), [Clean(), Reals()])
