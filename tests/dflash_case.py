"""DFlash heads with random weights in published layouts, and what they draft by the formulas of their authors, in plain
PyTorch.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from .heads_case import EPS, GROUPS, HEADS, THETA

LAYERS, BLOCK, MASK, IDS = 4, 6, 100, (0, 2)  # of the target; ids of layers whose outputs are read
SIZE = 8  # of an attention head, whatever the width


def tensors_for(width, layers=2):
    g = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(shape, generator=g) * 1.6 / shape[-1] ** 0.5

    def norm(n=width):
        return 1 + 0.2 * torch.randn(n, generator=g)

    found = {"fc.weight": some(width, len(IDS) * width)}
    found |= {"hidden_norm.weight": norm(), "norm.weight": norm()}
    for i in range(layers):
        p = f"layers.{i}."
        found[p + "input_layernorm.weight"] = norm()
        found[p + "post_attention_layernorm.weight"] = norm()
        for name, count in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            found[f"{p}self_attn.{name}_proj.weight"] = some(count * SIZE, width)
        found[p + "self_attn.o_proj.weight"] = some(width, HEADS * SIZE)
        found[p + "self_attn.q_norm.weight"] = norm(SIZE)
        found[p + "self_attn.k_norm.weight"] = norm(SIZE)
        for name in ("gate", "up"):
            found[f"{p}mlp.{name}_proj.weight"] = some(2 * width, width)
        found[p + "mlp.down_proj.weight"] = some(width, 2 * width)
    return found


def config_for(module, **more):
    width = module.config.hidden_size
    return {
        **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2},
        **{"hidden_size": width, "intermediate_size": 2 * width, "head_dim": SIZE},
        **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "rms_norm_eps": EPS},
        **{"vocab_size": module.config.vocab_size, "max_position_embeddings": 256},
        **{"rope_theta": THETA, "block_size": BLOCK, "num_target_layers": LAYERS},
        "dflash_config": {"target_layer_ids": list(IDS), "mask_token_id": MASK},
        **more,
    }


def written(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


@torch.no_grad()
def block_logits(module, t, text, scales=(1.0, 1.0, 0.0), skip=1, **more):
    """What a head says of the tokens of a block behind a text [size-skip,Vd], by the formulas of the authors. scales:
    of embeddings and of logits, and their cap. skip: tokens of a block that say nothing. The rest as of `block_hidden`.
    """
    x = block_hidden(module, t, text, scale=scales[0], **more)
    head = t.get("lm_head.weight", module.get_output_embeddings().weight)
    logits = (x[skip:] @ head.T) * scales[1]
    return (logits / scales[2]).tanh() * scales[2] if scales[2] else logits


@torch.no_grad()
def block_hidden(
    module, t, text, size=BLOCK, off=0, first=0, windows=(0, 0), causal=(), scale=1.0, around=None
):
    """The hidden states of a block's tokens [size,H], as its output head reads them. windows: tokens that each layer
    sees, 0: all. causal: the layers where a token of a block sees none behind it. scale: of embeddings. around: of a
    part's name and its input what it reads, and what becomes of what it says; None: the part as it is. The controls:
    taps of layers `off` further, positions of the block `first` further.
    """
    states = module(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    embedding = t.get("embed_tokens.weight", module.get_input_embeddings().weight)

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * t[f"{name}.weight"]

    c = norm(torch.cat([states[k + 1 + off][0] for k in IDS], -1) @ t["fc.weight"].T, "hidden_norm")
    x = embedding[torch.tensor([text[-1]] + [MASK] * (size - 1))] * scale
    n = len(c)
    places = torch.cat([torch.arange(n), torch.arange(n, n + size) + first])

    def turned(y, where):
        angles = where[:, None] * THETA ** -(torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angles.cos(), angles.sin()))
        a, b = y.chunk(2, -1)
        return y * cos + torch.cat([-b, a], -1) * sin

    def parts(name, z):
        return (z, lambda y: y) if around is None else around(name, z)

    back = torch.arange(n, n + size)[:, None] - torch.arange(n + size)
    for i, window in enumerate(windows):
        seen = torch.ones(size, n + size).bool()
        if i in causal:
            seen &= back >= 0
        if window:
            seen &= back < window
        p = f"layers.{i}."
        z, after = parts(p + "attention", norm(x, p + "input_layernorm"))
        both = torch.cat([c, z])
        q, k, v = (
            (y @ t[f"{p}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, SIZE))
            for name, y in (("q", z), ("k", both), ("v", both))
        )
        q = turned(norm(q, p + "self_attn.q_norm"), places[n:])
        k = turned(norm(k, p + "self_attn.k_norm"), places)
        k, v = (y.repeat_interleave(HEADS // GROUPS, 1) for y in (k, v))
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + after(mixed.transpose(0, 1).flatten(1) @ t[p + "self_attn.o_proj.weight"].T)
        z, after = parts(p + "mlp", norm(x, p + "post_attention_layernorm"))
        up = F.silu(z @ t[p + "mlp.gate_proj.weight"].T) * (z @ t[p + "mlp.up_proj.weight"].T)
        x = x + after(up @ t[p + "mlp.down_proj.weight"].T)
    return norm(x, "norm")


def block(module, t, text, count, **more):
    """The likeliest tokens of a block behind a text, as of `block_logits`."""
    return block_logits(module, t, text, **more).argmax(-1)[:count].tolist()


def speculators_config(module, drafted=None, **more):
    """The same head as speculators write it: ids of layers whose inputs are read."""
    layers = config_for(module)
    for name in ("architectures", "block_size", "num_target_layers", "dflash_config"):
        layers.pop(name)
    return {
        **{"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"},
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**layers, **more.pop("layers", {})},
        **{"aux_hidden_state_layer_ids": [k + 1 for k in IDS], "mask_token_id": MASK},
        **{"block_size": BLOCK, "draft_vocab_size": drafted or module.config.vocab_size},
        **{"sliding_window_non_causal": False, "sample_from_anchor": False},
        **more,
    }


def with_vocabulary(tensors, vocabulary, drafted, width):
    """A head's tensors with an output head of some of the target's tokens, and these tokens."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randperm(vocabulary, generator=g)[:drafted].sort().values
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[ids] = True
    head = 1.6 * torch.randn((drafted, width), generator=g) / width**0.5
    found = {"lm_head.weight": head, "d2t": ids - torch.arange(drafted), "t2d": known}
    return {**tensors, **found}, ids
