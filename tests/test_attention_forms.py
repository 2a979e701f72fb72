"""Attention in the forms that decoders write it in: any layout, sinks, biases, soft caps; read by trying it."""

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel import AccelError, PassError, optimize
from accel.compiler.pipeline import pipeline
from accel.ir.capture.capture import capture
from accel.ir.ops.attention import attention
from accel.passes import run
from accel.passes.check import NumericCheck
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.recognise import attention as recognise
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.positions import Positions
from accel.passes.state.layers import Layers

H, G, D, VOCAB = 4, 2, 6, 23
SCALE = D**-0.5


class Form(nn.Module):
    """Two layers whose attention is `mix(module, q, k, v)`: q, k, v [B,T,H,D] -> [B,T,H,D]."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.tokens = nn.Embedding(VOCAB, H * D)
        self.qkv = nn.ModuleList(nn.Linear(H * D, 3 * H * D) for _ in range(2))
        self.sinks, self.talk = nn.Parameter(torch.zeros(H)), nn.Linear(H, H, bias=False)
        self.head = nn.Linear(H * D, VOCAB)
        models.randomise(self, "form")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.qkv:
            q, k, v = layer(x).view(*tokens.shape, 3, H, D).unbind(2)
            x = x + self.mix(self, q, k, v).reshape(*tokens.shape, -1)
        logits: Tensor = self.head(x)
        return logits


def seen(q: Tensor) -> Tensor:
    index = torch.arange(q.shape[1])
    return index[None] <= index[:, None]


def heads(*values: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in values]


def written(change, after=lambda module, p: p):
    """softmax(change(scores)) v over [B,H,T,D]; the scores come with what may be seen."""

    def mix(module, q, k, v):
        allowed = seen(q)
        q, k, v = heads(q, k, v)
        probs = change(module, q @ k.transpose(2, 3) * SCALE, allowed).softmax(-1)
        return (after(module, probs) @ v).transpose(1, 2)

    return mix


def hide(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)


def slopes() -> Tensor:
    return 2.0 ** -torch.arange(1, H + 1)


def merged(module, q, k, v):
    """[B·H,T,D] with bmm."""
    b, t = q.shape[:2]
    allowed = seen(q)
    q, k, v = (x.transpose(1, 2).reshape(b * H, t, D) for x in (q, k, v))
    probs = hide(torch.bmm(q, k.transpose(1, 2)) * SCALE, allowed).softmax(-1)
    return torch.bmm(probs, v).view(b, H, t, D).transpose(1, 2)


def bloom(module, q, k, v):
    """baddbmm onto a bias by key position, and a view before the product with v."""
    b, t = q.shape[:2]
    allowed = seen(q)
    alibi = slopes()[:, None] * torch.arange(t)  # [H,T]
    alibi = alibi.repeat(b, 1).view(b * H, 1, t)
    q, v = (x.transpose(1, 2).reshape(b * H, t, D) for x in (q, v))
    k = k.permute(0, 2, 3, 1).reshape(b * H, D, t)
    scores = alibi.baddbmm(q, k, beta=0.7, alpha=SCALE).view(b, H, t, t)
    probs = hide(scores, allowed).softmax(-1).view(b * H, t, t)
    return torch.bmm(probs, v).view(b, H, t, D).transpose(1, 2)


def unread(module, q, k, v):
    """baddbmm onto memory that it does not read, as of torch.empty."""
    b, t = q.shape[:2]
    allowed = seen(q)
    q, k, v = (x.transpose(1, 2).reshape(b * H, t, D) for x in (q, k, v))
    scores = torch.full((b * H, t, t), float("nan"))
    scores = scores.baddbmm(q, k.transpose(1, 2), beta=0, alpha=SCALE).view(b, H, t, t)
    probs = hide(scores, allowed).softmax(-1)
    return (probs @ v.view(b, H, t, D)).transpose(1, 2)


def einsum(module, q, k, v):
    """Scores [B,T,H,S]."""
    scores = torch.einsum("bthd,bshd->bths", q, k) * SCALE
    probs = hide(scores, seen(q)[:, None]).softmax(-1)
    return torch.einsum("bths,bshd->bthd", probs, v)


def grouped(module, q, k, v):
    """Scores [B,G,R,T,S] over G of the KV heads."""
    q = q.view(*q.shape[:2], G, H // G, D)
    scores = torch.einsum("btgrd,bsgd->bgrts", q, k[:, :, :G]) * SCALE
    out = torch.einsum("bgrts,bsgd->btgrd", hide(scores, seen(q)).softmax(-1), v[:, :, :G])
    return out.flatten(2, 3)


def one_kv_head(module, q, k, v):
    """The KV head is broadcast by the product."""
    allowed = seen(q)
    q, k, v = heads(q, k[:, :, :1], v[:, :, :1])
    return (hide(q @ k.mT * SCALE, allowed).softmax(-1) @ v).transpose(1, 2)


def repeated(module, q, k, v):
    """sdpa over three axes, KV heads repeated."""
    b, t = q.shape[:2]
    k, v = (x[:, :, :G].repeat_interleave(H // G, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2).reshape(b * H, t, D) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.view(b, H, t, D).transpose(1, 2)


def beside(module, scores, allowed):
    """A learned score beside those of the keys, less the largest."""
    b, _, t, _ = scores.shape
    sink = module.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
    scores = torch.cat([hide(scores, allowed), sink], dim=-1)
    return scores - scores.max(dim=-1, keepdim=True).values


def behind(module, q, k, v):
    """The sink as a share of the keys' own softmax, after the product with v."""
    allowed = seen(q)
    q, k, v = heads(q, k, v)
    scores = hide(q @ k.mT * SCALE, allowed)
    share = torch.sigmoid(scores.logsumexp(-1) - module.sinks.view(1, -1, 1))
    return ((scores.softmax(-1) @ v) * share.unsqueeze(-1)).transpose(1, 2)


def other_way_round(module, q, k, v):
    """No sink: the more the keys weigh, the less comes through."""
    allowed = seen(q)
    q, k, v = heads(q, k, v)
    scores = hide(q @ k.mT * SCALE, allowed)
    share = torch.sigmoid(module.sinks.view(1, -1, 1) - scores.logsumexp(-1))
    return ((scores.softmax(-1) @ v) * share.unsqueeze(-1)).transpose(1, 2)


def biased(module, scores, allowed):
    index = torch.arange(scores.shape[-1])
    distance = index[:, None] - index[None]
    return hide(scores + slopes()[:, None, None] * (distance.clamp(min=0) % 5), allowed)


SCORES = {
    "sink": written(beside, lambda module, p: p[..., :-1]),
    "sink behind": behind,
    "one more": written(lambda m, s, a: F.pad(hide(s, a), (0, 1)), lambda m, p: p[..., :-1]),
    "factor": written(lambda m, s, a: s * a.float() + -1e4 * (1 - a.float())),
    "zeros after": written(
        lambda m, s, a: s.masked_fill(~a, float("-inf")),
        lambda m, p: p.masked_fill(~seen(p.transpose(1, 2)), 0.0),
    ),
    "soft cap": written(lambda m, s, a: hide(torch.tanh(s / 1.5) * 1.5, a)),
    "bias": written(biased),
    "two scales": written(lambda m, s, a: (hide(s * 3, a) - 0.5) / 2.0 + 1.0),
}
LAYOUTS = {
    f.__name__: f for f in (merged, bloom, unread, einsum, grouped, one_kv_head, repeated)
}  # fmt: skip


def recognised(mix, max_context=300):
    """The program up to attention, its numbers checked after each pass."""
    program = capture(Form(mix), max_context=max_context)
    run(program, [Clean(), Fold(), Positions(), Attention()], NumericCheck(program))
    found = program.nodes(attention.default)
    assert len(found) == 2
    return found[0], program


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("merged", H),
        ("bloom", H),
        ("unread", H),
        ("einsum", H),
        ("grouped", G),
        ("one_kv_head", 1),
        ("repeated", G),
    ],
)
def test_a_layout_is_read(name, groups):
    node, program = recognised(LAYOUTS[name])
    q, k, v = (n.meta["val"].shape for n in node.args[:3])
    assert (q[1], k[1], v[1], q[3]) == (H, groups, groups, D)
    assert node.args[6] == pytest.approx(SCALE) and node.args[7:10] == (0.0, "causal", 0)
    if name == "bloom":  # told by distance, though written by the key's position
        bias = program.params[node.args[5].target]
        want = -0.7 * slopes()[:, None] * torch.arange(300)
        torch.testing.assert_close(bias, want, atol=1e-4, rtol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCORES)
def test_what_is_done_to_scores_is_read(name):
    node, program = recognised(SCORES[name], 40)
    factor, cap = (1.5 if name == "two scales" else 1.0), (1.5 if name == "soft cap" else 0.0)
    assert node.args[6] == pytest.approx(SCALE * factor)
    assert node.args[7] == pytest.approx(cap) and node.args[8] == "causal"
    assert (node.args[5] is not None) == (name == "bias")
    learned = Form(SCORES[name]).sinks
    sinks = {"sink": learned, "sink behind": learned, "one more": torch.zeros(H)}
    assert len(node.args) == (11 if name in sinks else 10)
    if name in sinks:
        assert torch.equal(program.params[node.args[10].target], sinks[name])


def test_another_share_than_a_sinks_is_no_sink():
    node, _ = recognised(other_way_round, 40)
    assert len(node.args) == 10
    with pytest.raises(PassError, match="mixes tokens outside attention"):
        optimize(Form(other_way_round), max_context=40, target="eager")


def decoded(mix, **options):
    """(compiled, module's) logits: one call, single tokens, ragged rows."""
    model = Form(mix)
    tokens = torch.randint(0, VOCAB, (2, 25), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = model(tokens)
    got = torch.full_like(want, float("nan"))
    with optimize(model, max_context=48, max_batch=2, **options) as compiled:
        with compiled.session(2) as session:
            for start, end in ((0, 7), (7, 8), (8, 9), (9, 25)):
                got[:, start:end] = torch.from_numpy(session.run(tokens[:, start:end].numpy()))
            session.rewind([3, 11])
            rows = torch.stack([tokens[0, 3:7], tokens[1, 11:15]])
            out = torch.from_numpy(session.run(rows.numpy(), [4, 2]))
            got[0, 3:7], got[1, 11:13] = out[0], out[1, :2]
    return got, want


@pytest.mark.few(1)
@pytest.mark.parametrize("mix", [LAYOUTS["bloom"], LAYOUTS["grouped"], SCORES["sink"]])
def test_the_compiled_model_is_right(mix):
    torch.testing.assert_close(*decoded(mix), atol=1e-4, rtol=1e-4)


# Controls


def test_a_sink_that_is_lost_is_caught(monkeypatch):
    monkeypatch.setattr(recognise, "read_sink", lambda *_: None)
    with pytest.raises(PassError, match="not a scale, soft cap, mask or bias"):
        recognised(SCORES["sink"], 40)


def test_a_sink_lost_later_is_caught():
    program = capture(Form(SCORES["sink"]), max_context=40)
    check = NumericCheck(program)
    run(program, pipeline()[: [type(p) for p in pipeline()].index(Layers)], check)
    for node in program.nodes(attention.default):
        node.args = node.args[:10]
    with pytest.raises(PassError, match="Layers changed what the program computes"):
        run(program, [Layers2()], check)


class Layers2(Layers):
    after = ()


Layers2.__name__ = "Layers"


REFUSED = {
    "mask under the cap": (
        written(lambda m, s, a: torch.tanh(hide(s, a) / 1.5) * 1.5),
        "lets a token attend to later tokens",
    ),
    "heads that talk": (
        written(lambda m, s, a: hide(m.talk(s.transpose(1, 3)).transpose(1, 3), a)),
        "not a scale, soft cap, mask or bias",
    ),
    "talk after": (
        written(lambda m, s, a: hide(s, a), lambda m, p: m.talk(p.transpose(1, 3)).transpose(1, 3)),
        "not a scale, soft cap, mask or bias",
    ),
    "a bias from the tokens": (
        lambda m, q, k, v: written(
            lambda m, s, a: hide(s + v.sum(-1).transpose(1, 2)[:, :, None], a)
        )(m, q, k, v),
        "its scores depend on .* beside",
    ),
    "squares": (
        written(lambda m, s, a: hide(s * s.abs(), a)),
        "not a scale, soft cap, mask or bias",
    ),
    "heads first": (
        lambda m, q, k, v: (
            torch.bmm(
                torch.bmm(
                    *(x.permute(2, 0, 1, 3).reshape(-1, x.shape[1], D) for x in (q, k)[:1]),
                    k.permute(2, 0, 3, 1).reshape(-1, D, k.shape[1]),
                )
                .masked_fill(~seen(q), float("-inf"))
                .softmax(-1),
                v.permute(2, 0, 1, 3).reshape(-1, v.shape[1], D),
            )
            .view(H, v.shape[0], v.shape[1], D)
            .permute(1, 2, 0, 3)
        ),
        "holds heads before the rows of the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_attention_is_refused_with_the_reason(name):
    mix, why = REFUSED[name]
    with pytest.raises(AccelError, match=why):
        optimize(Form(mix), target="eager", max_context=40)
