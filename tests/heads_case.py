"""Heads of published layouts with random weights, and what they draft by the formulas of their authors, in plain
PyTorch.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HEADS, GROUPS, EPS, THETA = 4, 2, 1e-5, 10000.0


def eagle3_tensors(
    target_width, width, vocabulary, drafted, own=False, fc_norm=False, input_norm=False, seed=0
):
    """Those of an EAGLE-3 head, by their published names."""
    g = torch.Generator().manual_seed(seed)
    size = width // HEADS

    def some(*shape):
        return torch.randn(shape, generator=g) * 1.6 / shape[-1] ** 0.5

    def norm(n=width):
        return 1 + 0.2 * torch.randn(n, generator=g)

    found = {"fc.weight": some(width, 3 * target_width), "norm.weight": norm()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        found[f"midlayer.{name}.weight"] = norm()
    for name, out in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
        found[f"midlayer.self_attn.{name}_proj.weight"] = some(out * size, 2 * width)
    found["midlayer.self_attn.o_proj.weight"] = some(width, width)
    for name in ("gate", "up"):
        found[f"midlayer.mlp.{name}_proj.weight"] = some(2 * width, width)
    found["midlayer.mlp.down_proj.weight"] = some(width, 2 * width)
    found["lm_head.weight"] = 3 * some(drafted, width)
    if drafted < vocabulary:
        ids = torch.randperm(vocabulary, generator=g)[:drafted].sort().values
        found["d2t"] = ids - torch.arange(drafted)
        found["t2d"] = torch.zeros(vocabulary, dtype=torch.bool)
        found["t2d"][ids] = True
    if own:
        found["embed_tokens.weight"] = some(vocabulary, width)
    if fc_norm:
        found |= {f"fc_norm.{i}.weight": norm(target_width) for i in range(3)}
    if input_norm:
        found["input_norm.weight"] = norm(3 * target_width)
    return found


def eagle3_folder(folder, tensors, target_width, vocabulary, speculators=False, **config):
    """A head as its authors publish it, or speculators."""
    width = len(tensors["norm.weight"])
    layer = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
    }
    told = {"draft_vocab_size": len(tensors["lm_head.weight"]), "target_hidden_size": target_width}
    if speculators:
        tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
        told |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    else:
        told |= {**layer, "architectures": ["LlamaForCausalLMEagle3"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


class Eagle3:
    """logits and the features of the next token, slot by slot, as the authors have them."""

    def __init__(self, tensors, residual_normed=False, output_normed=False):
        self.t, self.residual_normed, self.output_normed = tensors, residual_normed, output_normed

    def norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.t[f"{name}.weight"]

    def fuse(self, taps):
        """Of the three taps of tokens [n,Ht] each."""
        if "fc_norm.0.weight" in self.t:
            taps = [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
        whole = torch.cat(taps, -1)
        if "input_norm.weight" in self.t:
            whole = self.norm(whole, "input_norm")
        return whole @ self.t["fc.weight"].T

    def step(self, e, h, held=None):
        """Embeddings of the next tokens and features [n,W] -> logits [n,Vd], features and keys and values, of slots
        behind those `held`.
        """
        n, width = h.shape
        size = width // HEADS
        normed = self.norm(h, "midlayer.hidden_norm")
        x = torch.cat([self.norm(e, "midlayer.input_layernorm"), normed], -1)
        q, k, v = (
            (x @ self.t[f"midlayer.self_attn.{p}_proj.weight"].T).view(n, -1, size).transpose(0, 1)
            for p in "qkv"
        )
        first = 0 if held is None else held[0].shape[1]
        angles = (first + torch.arange(n))[:, None] * THETA ** -(torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))

        def turned(y):
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat([-b, a], -1) * sin

        q, k = turned(q), turned(k)
        if held is not None:
            k, v = torch.cat([held[0], k], 1), torch.cat([held[1], v], 1)
        keys, values = (y.repeat_interleave(HEADS // GROUPS, 0) for y in (k, v))
        seen = torch.arange(k.shape[1]) <= first + torch.arange(n)[:, None]
        mixed = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=seen)
        mixed = mixed[0].transpose(0, 1).reshape(n, width)
        y = normed if self.residual_normed else h
        y = y + mixed @ self.t["midlayer.self_attn.o_proj.weight"].T
        z = self.norm(y, "midlayer.post_attention_layernorm")
        up = F.silu(z @ self.t["midlayer.mlp.gate_proj.weight"].T)
        up = up * (z @ self.t["midlayer.mlp.up_proj.weight"].T)
        y = y + up @ self.t["midlayer.mlp.down_proj.weight"].T
        last = self.norm(y, "norm")
        return last @ self.t["lm_head.weight"].T, last if self.output_normed else y, (k, v)

    def ids(self):
        """The target's token of each draft token."""
        count = len(self.t["lm_head.weight"])
        return torch.arange(count) + self.t.get("d2t", 0)

    def chain(self, embedding, taps, tokens, count):
        """What it drafts behind tokens [n], all but the last of which the target ran: `count` tokens, the likeliest
        each. embedding [V,E]; taps: three [n-1,Ht].
        """
        table = self.t.get("embed_tokens.weight", embedding)
        logits, h, held = self.step(table[tokens[1:]], self.fuse(taps))
        found = []
        while True:
            found.append(int(self.ids()[logits[-1].argmax()]))
            if len(found) == count:
                return found
            logits, h, held = self.step(table[[found[-1]]], h[-1:], held)
