"""Models that nobody registered: attention in the forms that people and torch.nn write it in."""

import models
import pytest
import random_decoders
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accel

HEADS, SIZE, VOCAB = 3, 6, 23
WIDTH = HEADS * SIZE


class Mixed(nn.Module):
    """Embeddings, one mixing of tokens x [B,T,E] -> [B,T,E], and a head."""

    def __init__(self, mix, positions=True, **parts):
        super().__init__()
        self.mix = mix
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(64, WIDTH) if positions else None
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        for name, part in parts.items():
            setattr(self, name, part)
        models.randomise(self, "forms")

    def forward(self, tokens):
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(x + self.mix(self, x)))


def heads(module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B,H,T,D]."""
    return module.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4).unbind(0)


def joined(module, y: Tensor) -> Tensor:
    return module.out(y.transpose(1, 2).flatten(2))


def lower(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).tril()


def right(model) -> None:
    """Prefill, cut calls, a rewind and a ragged batch equal the module's."""
    with accel.optimize(model, target="eager", max_context=48, max_batch=3) as compiled:
        assert not random_decoders.compare(model, compiled, VOCAB, 3)


# Ways to attend


def one_subscript(module, x):
    q, k, v = heads(module, x)
    w = torch.einsum("bhid,bhjd->bhij", q, k) / SIZE**0.5
    w = w.masked_fill(~lower(x.shape[1]), float("-inf")).softmax(-1)
    return joined(module, torch.einsum("bhij,bhjd->bhid", w, v))


def keys_first(module, x):
    """Scores [B,H,T,S] from [S,B,H,D]; tokens first, as in [T,B,E] code."""
    q, k, v = (y.permute(2, 0, 1, 3) for y in heads(module, x))
    w = torch.einsum("ibnd,jbnd->bnij", q * SIZE**-0.5, k)
    w = torch.where(lower(x.shape[1]), w, -1e30).softmax(-1)
    return joined(module, torch.einsum("bnij,jbnd->ibnd", w, v).permute(1, 2, 0, 3))


def without_heads(module, x):
    """One head over the whole width, [B,T,E] all through."""
    q, k, v = module.qkv(x).chunk(3, -1)
    w = (q @ k.transpose(1, 2) * WIDTH**-0.5).masked_fill(~lower(x.shape[1]), float("-inf"))
    return w.softmax(-1) @ v


def flat_batch(module, x):
    """[B·H,T,D] by bmm, and a float mask of -inf."""
    b, t, _ = x.shape
    q, k, v = (y.reshape(b * HEADS, t, SIZE) for y in heads(module, x))
    mask = torch.full((t, t), float("-inf")).triu(1)
    w = torch.bmm(q * SIZE**-0.5, k.transpose(1, 2)) + mask
    return joined(module, torch.bmm(w.softmax(-1), v).view(b, HEADS, t, SIZE))


def one_kv_head(module, x):
    """All query heads over one key head, broadcast and not repeated."""
    q, k, v = heads(module, x)
    k, v = k[:, :1], v[:, :1]
    w = (q @ k.mT * 0.4).masked_fill(~lower(x.shape[1]), torch.finfo(q.dtype).min)
    return joined(module, w.softmax(-1, dtype=torch.float32).to(q.dtype) @ v)


def in_place(module, x):
    q, k, v = heads(module, x)
    w = q @ k.mT
    w.mul_(SIZE**-0.5).masked_fill_(~lower(x.shape[1]), float("-inf"))
    return joined(module, F.dropout(w.softmax(-1), 0.1, module.training) @ v)


def parted(module, x):
    """A module inside, batch second."""
    hidden = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    x = x.transpose(0, 1)
    out, _ = module.inner(x, x, x, attn_mask=hidden, is_causal=True)
    return out.transpose(0, 1)


def with_weights(module, x):
    """nn.MultiheadAttention that also returns the probabilities, from a boolean mask per call."""
    out, _ = module.inner(x, x, x, attn_mask=~lower(x.shape[1]), need_weights=True)
    return out


def stacked(module, x):
    return module.inner(x, mask=~lower(x.shape[1]), is_causal=True)


def to_itself(module, x):
    """A decoder layer whose memory is its own input, under the same mask."""
    hidden = ~lower(x.shape[1])
    return module.inner(x, x, tgt_mask=hidden, memory_mask=hidden)


def to_constants(module, x):
    """A decoder layer whose memory is learned."""
    memory = module.memory.expand(x.shape[0], -1, -1)
    return module.inner(x, memory, tgt_mask=~lower(x.shape[1]))


def attention_module(**options):
    return nn.MultiheadAttention(WIDTH, HEADS, **options)


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def decoder_layer():
    return nn.TransformerDecoderLayer(WIDTH, HEADS, 20, batch_first=True, activation="gelu")


FORMS = {
    "einsum": Mixed(one_subscript),
    "einsum, tokens first": Mixed(keys_first),
    "no head axis": Mixed(without_heads),
    "bmm": Mixed(flat_batch),
    "one kv head": Mixed(one_kv_head),
    "in place": Mixed(in_place),
    "no positions": Mixed(one_subscript, positions=False),
    "MultiheadAttention": Mixed(parted, inner=attention_module()),
    "MultiheadAttention, weights": Mixed(with_weights, inner=attention_module(batch_first=True)),
    "TransformerEncoder": Mixed(stacked, inner=encoder()),
    "TransformerDecoderLayer": Mixed(to_itself, inner=decoder_layer()),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_attention_is_right(name):
    right(FORMS[name])


def test_attention_to_learned_constants_is_refused():
    """Neither a token's own cache nor an encoder's states."""
    memory = nn.Parameter(torch.zeros(1, 4, WIDTH))
    model = Mixed(to_constants, inner=decoder_layer(), memory=memory)
    with pytest.raises(accel.PassError, match="an attention over 4 keys: neither one per token"):
        right(model)


def test_zaya_projects_by_its_form_as_by_its_own_code():
    """With biases, of which the second convolution sees the first one's before the first token, too."""
    zaya = pytest.importorskip("transformers.models.zaya.modeling_zaya")
    from accel.compiler.smoke.tiny_models import small_config
    from accel.ir.capture.forms.compressed import FORMS

    config = small_config("zaya", attention_bias=True)
    module = models.randomise(zaya.ZayaCCAProjection(config, 0), "zaya")
    x = torch.randn(2, 9, config.hidden_size, generator=torch.Generator().manual_seed(1))
    form = FORMS["ZayaCCAProjection"]
    with torch.no_grad():
        want, got = module(x, None), form(module, x)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        module.conv_qk_depthwise.bias.add_(1.0)  # the control: what is compared depends on it
        assert not torch.allclose(form(module, x)[0], want[0], atol=1e-3)


@pytest.mark.long
def test_zaya_drafts():
    """Its state goes back to behind a draft's rejected tokens: what a convolution multiplies by is no token's."""
    pytest.importorskip("transformers.models.zaya.modeling_zaya")
    from accel.compiler.smoke.tiny_models import small_model

    model = small_model("zaya")
    prompt, options = [5, 9, 17, 5, 9, 17, 5, 9], {"max_context": 64, "verify": False}
    with accel.optimize(model, "prompt-lookup", target="eager", **options) as built:
        found = built.generate([prompt], max_new_tokens=8, eos=[])
    text = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(8):
            last = model(text, use_cache=False).logits[:, -1]
            text = torch.cat([text, last.argmax(-1, keepdim=True)], 1)
    assert found.tokens == text[:, len(prompt) :].tolist()
