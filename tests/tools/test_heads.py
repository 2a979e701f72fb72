"""The trainer of drafting heads: what it learns from is what a loop of guesses computes."""

import heads
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture
def eagle():
    torch.manual_seed(0)
    return heads.Eagle3(CONFIG, torch.arange(0, 64, 2)).eval()


def drafted(head, streams, embeds, base):
    """Logits of each guess behind true features up to slot `base`, one slot at a time."""
    feature = head.fc(streams)[:, : base + 1]
    found = []
    for depth in range(heads.GUESSES):
        slots = base + 1 + depth
        x = torch.cat((head.input_layernorm(embeds[:, :slots]), head.hidden_norm(feature)), -1)
        split = lambda y, n: y.unflatten(-1, (n, head.size)).transpose(1, 2)  # noqa: E731
        at = torch.arange(slots)
        q = heads.rotary(split(head.q_proj(x), head.heads), at, head.theta)
        k = heads.rotary(split(head.k_proj(x), head.groups), at, head.theta)
        v = split(head.v_proj(x), head.groups)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = feature + head.o_proj(out.transpose(1, 2).flatten(2))
        z = head.post_attention_layernorm(y)
        y = y + head.down_proj(F.silu(head.gate_proj(z)) * head.up_proj(z))
        found.append(head.lm_head(head.norm(y[:, -1])))
        feature = torch.cat((feature, y[:, -1:]), 1)
    return found


@torch.no_grad()
def test_rows_of_a_pass_are_the_guesses_of_a_loop(eagle):
    streams, embeds = torch.randn(1, 12, 96), torch.randn(1, 12, 32)
    rows = list(eagle.guesses(streams, embeds))
    for base in (0, 3, 6):
        for depth, logits in enumerate(drafted(eagle, streams, embeds, base)):
            torch.testing.assert_close(rows[depth][:, base + depth], logits)
    one_off = drafted(eagle, streams.roll(1, 1), embeds, 6)[0]
    assert not torch.allclose(rows[0][:, 6], one_off, atol=1e-3)


def test_files_have_the_published_names_and_ids(eagle, tmp_path):
    medusa = heads.Medusa(CONFIG, torch.randn(64, 32))
    heads.written(tmp_path, eagle, medusa, CONFIG, [2, 2, 1])
    from safetensors.torch import load_file

    found = load_file(tmp_path / "eagle3" / "model.safetensors")
    assert {
        "fc.weight",
        "midlayer.self_attn.q_proj.weight",
        "midlayer.mlp.gate_proj.weight",
    } <= set(found)
    assert {"midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= set(
        found
    )
    ids = torch.arange(32) + found["d2t"]
    assert ids.tolist() == found["t2d"].nonzero()[:, 0].tolist() == list(range(0, 64, 2))
