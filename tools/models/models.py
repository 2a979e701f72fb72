"""Small models of real architectures with random weights, for tests and for `tools/matrix/parity.py`.

Sizes are odd on purpose: head sizes that are not hidden/heads where the configuration allows, a
vocabulary that is no multiple of 8, tied and untied heads, windows shorter than the tests' prompts.
The weights are scaled so that logits spread over several units and greedy decoding does not stall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.compiler.smoke.tiny_models import randomise, small_model
from accel.ir.capture.arch.cla import Cla, ClaConfig
from accel.ir.capture.arch.rwkv_x import RwkvX, RwkvXConfig
from accel.ir.capture.arch.yoco import Yoco, YocoConfig

LAYERS = 3


def random(kind: str, /, seed: str = "", embedding: float = 0.4, **sizes: Any) -> nn.Module:
    """A model type of transformers with random weights, which go by `seed` or else by the type."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    return randomise(model, seed or kind, embedding)


def llama() -> nn.Module:
    """Grouped KV heads, head size 10 where hidden/heads is 12, untied."""
    return random(
        "llama", vocab_size=101, hidden_size=48, intermediate_size=76, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip


def mistral() -> nn.Module:
    """A sliding window of 7 tokens in every layer; a single KV head."""
    return random(
        "mistral", vocab_size=99, hidden_size=42, intermediate_size=70, num_hidden_layers=LAYERS,
        num_attention_heads=3, num_key_value_heads=1, head_dim=12, sliding_window=7,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip


def qwen2() -> nn.Module:
    """Biases on q, k and v; tied."""
    return random(
        "qwen2", vocab_size=103, hidden_size=56, intermediate_size=90, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip


def qwen3() -> nn.Module:
    """RMSNorm over each head of q and k; head size 14 where hidden/heads is 12."""
    return random(
        "qwen3", vocab_size=107, hidden_size=48, intermediate_size=80, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=14, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip


def gemma2() -> nn.Module:
    """Soft caps on scores and logits, a window of 6 in every second layer, more norms; tied."""
    return random(
        "gemma2", embedding=0.06,  # it is scaled by √48
        vocab_size=109, hidden_size=48, intermediate_size=84, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=14, query_pre_attn_scalar=11,
        sliding_window=6, max_position_embeddings=512, attn_logit_softcapping=5.0,
        final_logit_softcapping=1.5, attn_implementation="eager",
    )  # fmt: skip


def gpt2() -> nn.Module:
    """Learned positions, LayerNorm, products stored [in, out]; tied."""
    return random(
        "gpt2", vocab_size=97, n_embd=36, n_layer=LAYERS, n_head=3, n_positions=256,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def gpt_neox() -> nn.Module:
    """Attention and MLP side by side; rope on a quarter of each head; untied."""
    return random(
        "gpt_neox", vocab_size=95, hidden_size=48, intermediate_size=100, num_hidden_layers=LAYERS,
        num_attention_heads=3, max_position_embeddings=512, use_parallel_residual=True,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
        tie_word_embeddings=False,
    )  # fmt: skip


def opt() -> nn.Module:
    """Learned positions with an offset of 2, ReLU, embeddings narrower than the layers; tied."""
    return random(
        "opt", vocab_size=91, hidden_size=40, ffn_dim=90, num_hidden_layers=LAYERS, num_attention_heads=4,
        word_embed_proj_dim=28, max_position_embeddings=256,
    )  # fmt: skip


def phi3() -> nn.Module:
    """q, k and v in one product, gate and up in another."""
    return random(
        "phi3", vocab_size=105, hidden_size=48, intermediate_size=72, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        original_max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


class SdpaBlock(nn.Module):
    """Pre-norm block around F.scaled_dot_product_attention(is_causal=True)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        qkv = self.qkv(self.before(x)).view(b, t, 3, self.heads, e // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, e))
        return x + self.mlp(self.between(x))


class PlainSdpa(nn.Module):
    """A decoder in plain PyTorch: sdpa, positions learned and looked up by arange; tied."""

    def __init__(self, vocab: int = 89, width: int = 44, heads: int = 4, layers: int = LAYERS):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(200, width)
        self.blocks = nn.ModuleList(SdpaBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class SoftmaxBlock(nn.Module):
    """Pre-norm block: softmax written out, a tril buffer, interleaved rotary embedding."""

    mask: Tensor
    frequency: Tensor

    def __init__(self, width: int, heads: int, size: int, longest: int):
        super().__init__()
        self.heads, self.size = heads, size
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(width, heads * size, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * size, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("mask", torch.ones(longest, longest).tril(), persistent=False)
        frequency = 10000.0 ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("frequency", frequency, persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        """[B,H,T,D]: channels 2i and 2i+1 turn by position · frequency[i]."""
        angle = torch.arange(x.shape[2])[:, None] * self.frequency  # [T,D/2]
        cos, sin = angle.cos(), angle.sin()
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.norm(x)
        q, k, v = (
            f(h).view(b, t, self.heads, self.size).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = self.turn(q) @ self.turn(k).transpose(-2, -1) / self.size**0.5
        scores = scores.masked_fill(self.mask[:t, :t] == 0, float("-inf"))
        mixed = torch.softmax(scores, dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PlainSoftmax(nn.Module):
    """A decoder in plain PyTorch with everything written out; untied."""

    def __init__(
        self, vocab: int = 93, width: int = 40, heads: int = 3, size: int = 14, layers: int = LAYERS
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(SoftmaxBlock(width, heads, size, 256) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LatentBlock(nn.Module):
    """Multi-head latent attention: rotary channels first, biases on both products, a scaled latent."""

    RANK, TURNED, PLAIN, VALUE = 11, 6, 8, 7

    def __init__(self, width: int, heads: int = 5):
        super().__init__()
        self.heads = heads
        self.between: Callable[[Tensor], Tensor] = lambda latent: latent * 0.7
        self.q = nn.Linear(width, heads * (self.TURNED + self.PLAIN))
        self.down = nn.Linear(width, self.RANK + self.TURNED)
        self.key: nn.Module = nn.Linear(self.RANK, heads * self.PLAIN)
        self.value = nn.Linear(self.RANK, heads * self.VALUE)
        self.out = nn.Linear(heads * self.VALUE, width)

    def forward(self, x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        def split(y: Tensor, width: int) -> Tensor:
            return y.view(*y.shape[:2], -1, width).transpose(1, 2)

        h = F.rms_norm(x, x.shape[-1:])
        q = split(self.q(h), self.TURNED + self.PLAIN)
        latent, shared = self.down(h).split([self.RANK, self.TURNED], -1)
        latent = self.between(F.rms_norm(latent, (self.RANK,)))
        shared = turn(split(shared, self.TURNED)).expand(-1, self.heads, -1, -1)
        q = torch.cat([turn(q[..., : self.TURNED]), q[..., self.TURNED :]], -1)
        k = torch.cat([shared, split(self.key(latent), self.PLAIN)], -1)
        v = split(self.value(latent), self.VALUE)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return x + mixed


class PlainLatent(nn.Module):
    """A decoder of such blocks; its rotation is by complex numbers."""

    speed: Tensor

    def __init__(self, vocab: int = 53, width: int = 30, layers: int = LAYERS):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LatentBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)
        self.register_buffer("speed", 100.0 ** -torch.linspace(0, 1, LatentBlock.TURNED // 2))

    def forward(self, tokens: Tensor) -> Tensor:
        angle = torch.arange(tokens.shape[1])[:, None] * self.speed
        spin = torch.polar(torch.ones_like(angle), angle)

        def turn(x: Tensor) -> Tensor:
            turned = torch.view_as_real(torch.complex(x[..., 0::2], x[..., 1::2]) * spin)
            return turned.flatten(-2)

        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, turn)
        logits: Tensor = self.head(F.rms_norm(x, x.shape[-1:]))
        return logits


def plain_latent() -> nn.Module:
    """No Hugging Face: multi-head latent attention."""
    return randomise(PlainLatent(layers=LAYERS), "plain_latent")


def plain_sdpa() -> nn.Module:
    """No Hugging Face: F.scaled_dot_product_attention and learned positions."""
    return randomise(PlainSdpa(), "plain_sdpa")


def plain_softmax() -> nn.Module:
    """No Hugging Face: softmax, mask and rotary embedding written out."""
    return randomise(PlainSoftmax(), "plain_softmax")


def cla(factor: int = 2, layers: int = 4) -> nn.Module:
    """No Hugging Face: layers of which `factor` share the keys and values of the first."""
    config = ClaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, factor=factor,
    )  # fmt: skip
    return randomise(Cla(config), "cla")


def yoco(layers: int = 4, window: int = 7) -> nn.Module:
    """No Hugging Face: half of the layers with a window, the others read one cache."""
    config = YocoConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, window=window,
    )  # fmt: skip
    return randomise(Yoco(config), "yoco")


def rwkv_x() -> nn.Module:
    """No Hugging Face: RWKV-7, and attention without positions in the third layer."""
    config = RwkvXConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_rwkv_layers=2, num_sparse_layers=1,
        head_dim=8, low_rank=4,
    )  # fmt: skip
    return randomise(RwkvX(config), "rwkv_x")


def llada() -> nn.Module:
    """LLaDA's shape: a Llama that sees both ways and fills masks, as many KV heads as query heads, untied."""
    return random(
        "llama", seed="llada", vocab_size=101, hidden_size=48, intermediate_size=76, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512,
        tie_word_embeddings=False, is_causal=False, mask_token_id=100,
    )  # fmt: skip


def dream() -> nn.Module:
    """Dream's shape: a Qwen2 that sees both ways, whose logits are of the token that follows."""
    return random(
        "qwen2", seed="dream", vocab_size=103, hidden_size=56, intermediate_size=90, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=False, is_causal=False, mask_token_id=102, logit_shift=True,
    )  # fmt: skip


def tiny() -> nn.Module:
    """One layer, 31 tokens, learned positions up to 200: the least that there is to capture."""
    return randomise(PlainSdpa(vocab=31, width=12, heads=2, layers=1), "tiny")


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "phi3": phi3,
    "plain_sdpa": plain_sdpa,
    "plain_softmax": plain_softmax,
    "plain_latent": plain_latent,
}

FILLERS: dict[str, Callable[[], nn.Module]] = {"llada": llada, "dream": dream}


@contextmanager
def layers(count: int) -> Iterator[None]:
    """Models that are made within have so many layers."""
    global LAYERS
    before, LAYERS = LAYERS, count
    try:
        yield
    finally:
        LAYERS = before


def make(name: str, count: int) -> nn.Module:
    """A model of so many layers: one of ARCHITECTURES, "tiny", or of any model type of transformers."""
    with layers(count):
        if maker := {**ARCHITECTURES, "tiny": tiny}.get(name):
            return maker()
        return small_model(name)


def wordy(seed: str) -> nn.Module:
    """A Llama of two layers with as many tokens as the bundled tokenizer."""
    return random(
        "llama", seed=seed, vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip


def write(folder: Path) -> Path:
    """A model directory: a Llama of two layers with a byte-level tokenizer that fits it."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    make("llama", 2).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:100]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["ab"], trainers.BpeTrainer(vocab_size=101, initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
