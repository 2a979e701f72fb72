"""Heads of published layouts with random weights, and what they draft by the formulas of their authors, in plain
PyTorch.
"""

from __future__ import annotations

import json

import models
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import accel
from accel.compiler.load.heads import Target
from accel.ir.weights import Stored
from accel.runtime.decode.context import DecodeContext
from accel.runtime.length.fixed import Fixed
from accel.runtime.sample.standard import Standard
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree.chain import Chain
from accel.runtime.verify.sample_match import SampleMatch

from .draft_case import plain, rows_of, speculated

HEADS, GROUPS, EPS, THETA = 4, 2, 1e-5, 10000.0
PROMPTS = [[5, 9, 3, 11, 7, 30, 2], [2, 8, 60, 41]]


def target_of(weight, layers=2):
    """What a head is told of a target with this output head [V,E]."""
    return Target(layers, Stored.of(weight.detach()))


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


def peagle_chain(head, embedding, taps, tokens, count, mask):
    """What an EAGLE-3 head with `mask_hidden` drafts in one pass behind tokens [n], as `Eagle3.chain`: all but the
    first from slots of masks, which see each other in order.
    """
    table = head.t.get("embed_tokens.weight", embedding)
    e = torch.cat([table[tokens[1:]], table[[mask]].expand(count - 1, -1)])
    hidden = head.t["mask_hidden"].flatten().chunk(3)
    masks = head.fuse([part[None].expand(count - 1, -1) for part in hidden])
    logits, _, _ = head.step(e, torch.cat([head.fuse(taps), masks]))
    return head.ids()[logits[-count:].argmax(-1)].tolist()


def eagle1_tensors(module, bias=False, qkv_bias=False, seed=0):
    """Those of an EAGLE head of a llama, by their published names."""
    c, g = module.config, torch.Generator().manual_seed(seed)
    width, size = c.hidden_size, c.hidden_size // HEADS

    def some(*shape):
        return torch.randn(shape, generator=g) * 1.6 / shape[-1] ** 0.5

    found = {"fc.weight": some(width, 2 * width)}
    if bias:
        found["fc.bias"] = 0.3 * some(width)
    found["layers.0.post_attention_layernorm.weight"] = 1 + 0.2 * torch.randn(width, generator=g)
    for name, out in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
        found[f"layers.0.self_attn.{name}_proj.weight"] = some(out * size, width)
        if qkv_bias:
            found[f"layers.0.self_attn.{name}_proj.bias"] = some(out * size)
    found["layers.0.self_attn.o_proj.weight"] = some(width, width)
    for name in ("gate", "up"):
        found[f"layers.0.mlp.{name}_proj.weight"] = some(2 * width, width)
    found["layers.0.mlp.down_proj.weight"] = some(width, 2 * width)
    return found


def eagle1_folder(folder, module, tensors, speculators=False, **config):
    """A head as its authors publish it, embedding included, or speculators."""
    c = module.config
    layer = {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": 2 * c.hidden_size,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": 1,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
    }
    if speculators:
        names = (("fc.", "fusion_fc."), ("layers.0.", "transformer."))
        for old, new in names:
            tensors = {n.replace(old, new): t for n, t in tensors.items()}
        tensors = {**tensors, "lm_head.weight": module.lm_head.weight.detach()}
        told = {"speculators_model_type": "eagle", "transformer_layer_config": layer}
    else:
        table = module.get_input_embeddings().weight.detach()
        tensors = {**tensors, "embed_tokens.weight": table}
        told = {**layer, "architectures": ["LlamaForCausalLM"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


class Eagle1:
    """What an EAGLE head of a model drafts, by the formulas of its authors."""

    def __init__(self, tensors, module, heads=HEADS):
        self.t, self.heads = tensors, heads
        self.table = module.get_input_embeddings().weight.detach()
        self.head = module.lm_head.weight.detach()

    def states(self, tokens, features):
        """Features of the next tokens [n,W], of tokens and the features before them [n,W]."""
        t, n = self.t, len(features)
        size = len(t["layers.0.self_attn.q_proj.weight"]) // self.heads
        joined = torch.cat([self.table[tokens], features], -1)
        x = joined @ t["fc.weight"].T + t.get("fc.bias", 0)

        def heads(name):
            stem = f"layers.0.self_attn.{name}_proj"
            y = x @ t[f"{stem}.weight"].T + t.get(f"{stem}.bias", 0)
            return y.view(n, -1, size).transpose(0, 1)

        angles = torch.arange(n)[:, None] * THETA ** -(torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))

        def turned(y):
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat([-b, a], -1) * sin

        q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
        k, v = (y.repeat_interleave(self.heads // len(y), 0) for y in (k, v))
        scores = (q @ k.transpose(1, 2)) / size**0.5
        hidden = torch.ones(n, n).triu(1).bool()
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        y = x + mixed.transpose(0, 1).reshape(n, -1) @ t["layers.0.self_attn.o_proj.weight"].T
        z = y * (y.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
        z = z * t["layers.0.post_attention_layernorm.weight"]
        up = F.silu(z @ t["layers.0.mlp.gate_proj.weight"].T)
        up = up * (z @ t["layers.0.mlp.up_proj.weight"].T)
        return y + up @ t["layers.0.mlp.down_proj.weight"].T

    def chain(self, features, tokens, count):
        """Behind tokens [n], of all but the last of which the features [n-1,W] are known: `count` tokens, the likeliest
        each.
        """
        tokens, found = list(tokens[1:]), []
        while True:
            new = self.states(torch.tensor(tokens), features)[-1]
            found.append(int((self.head @ new).argmax()))
            if len(found) == count:
                return found
            tokens.append(found[-1])
            features = torch.cat([features, new[None]])


def mtp_layers(module):
    """transformers' module of one random next-token layer of a model."""
    from transformers.modeling_layers import MtpModel

    text = module.config.get_text_config()
    text.num_mtp_layers = 1
    for name, usual in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(text, name, None) is not None:
            setattr(text, f"mtp_{name}", [usual])
    layers, g = MtpModel(module, 1).eval(), torch.Generator().manual_seed(0)
    for name, tensor in layers.layers.state_dict().items():
        size = 0.1 if tensor.dim() == 1 else 1.6 / tensor.shape[-1] ** 0.5
        tensor.copy_(size * torch.randn(tensor.shape, generator=g) + float("norm" in name) / 2)
    return layers


def mtp_folder(module, folder, **config):
    """A model with a random next-token layer beside its own, as its family publishes one, and transformers' module of
    that layer.
    """
    text, layers = module.config.get_text_config(), mtp_layers(module)
    module.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= _mtp_names(layers, text.num_hidden_layers, "qwen" in text.model_type)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    file = folder / "config.json"
    told = {n: v for n, v in json.loads(file.read_text()).items() if "mtp" not in n}
    file.write_text(json.dumps({**told, **config}))
    return layers


def _mtp_names(layers, count, own):
    """The tensors by published names, experts one by one. own: with numbers of their own, as of Qwen, else behind the
    target's.
    """
    found = {}
    top = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "post_norm": "norm",
    }
    for name, tensor in layers.layers[0].state_dict().items():
        first, _, rest = name.partition(".")
        if own:
            place = f"mtp.{top[first]}." if first in top else "mtp.layers.0."
        else:
            first = {"post_norm": "shared_head.norm", "mtp_block": ""}.get(first, first)
            place = f"model.layers.{count}.{first}." if first else f"model.layers.{count}."
        if "experts." not in rest or "shared" in rest:
            found[place + rest] = tensor
            continue
        stem, _, kind = rest.rpartition(".")
        for i, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            found |= {f"{place}{stem}.{i}.{part}.weight": t for part, t in parts.items()}
    return found


@torch.no_grad()
def mtp_chain(module, layers, tokens, count, states="last_hidden_state", shift=0):
    """What transformers' module drafts behind tokens [n], each from its own output for the one before. states: of the
    target. shift: slots by which they are off.
    """
    ids = torch.tensor([tokens])
    ran = module.get_decoder()(ids[:, :-1], output_hidden_states=True)
    h = ran.last_hidden_state
    if states == "stream":
        norm, found = module.get_decoder().norm, []
        hook = norm.register_forward_pre_hook(lambda _, x: found.append(x[0]))
        module.get_decoder()(ids[:, :-1])
        hook.remove()
        (h,) = found
    h = h.roll(shift, 1)
    drafted = []
    while True:
        e = layers.embed_tokens(ids[:, 1:])
        positions = torch.arange(1, h.shape[1] + 1)[
            None
        ]  # of the tokens, as transformers counts them
        turns = layers.rotary_emb(e, positions)
        seen = torch.ones(h.shape[1], h.shape[1]).tril().bool()[None, None]
        y = layers.layers[0](e, h, turns, seen, positions, None)
        drafted.append(int(layers.shared_head(y[0, -1]).argmax()))
        if len(drafted) == count:
            return drafted
        ids = torch.cat([ids, torch.tensor([drafted[-1:]])], 1)
        h = torch.cat([h, y[:, -1:]], 1)


def mctp_tensors(module, count, bias=True, seed=0):
    """Those of MCTP modules behind the layers of a llama, by their published names."""
    c, g = module.config, torch.Generator().manual_seed(seed)
    width, size = c.hidden_size, c.hidden_size // HEADS

    def some(*shape):
        return torch.randn(shape, generator=g) * 1.6 / shape[-1] ** 0.5

    def norm():
        return 1 + 0.2 * torch.randn(width, generator=g)

    found = {"model.norm.weight": norm()}
    for m in range(count):
        found[f"model.mtp_projs.{m}.weight"] = some(width, 2 * width)
        found[f"model.mtp_embed_norms.{m}.weight"] = norm()
        found[f"model.mtp_hidden_norms.{m}.weight"] = norm()
        layer = f"model.layers.{c.num_hidden_layers + m}."
        for name in ("input", "post_attention"):
            found[f"{layer}{name}_layernorm.weight"] = norm()
        for name, out in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            found[f"{layer}self_attn.{name}_proj.weight"] = some(out * size, width)
            if bias:
                found[f"{layer}self_attn.{name}_proj.bias"] = some(out * size)
        found[f"{layer}self_attn.o_proj.weight"] = some(width, width)
        for name in ("gate", "up"):
            found[f"{layer}mlp.{name}_proj.weight"] = some(2 * width, width)
        found[f"{layer}mlp.down_proj.weight"] = some(width, 2 * width)
    return found


def mctp_folder(folder, module, tensors, **config):
    """Modules in a checkpoint of their authors, the model's embedding and layers beside them."""
    c = module.config
    count = sum("mtp_projs" in name for name in tensors)
    told = {
        "architectures": ["Qwen2MTPForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": c.hidden_size,
        "intermediate_size": 2 * c.hidden_size,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": c.num_hidden_layers + count,
        "num_nextn_predict_layers": count,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
    }
    beside = {
        "model.embed_tokens.weight": module.get_input_embeddings().weight.detach(),
        "model.layers.0.mlp.up_proj.weight": torch.ones(2, 2),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    whole = {n: t.contiguous() for n, t in {**beside, **tensors}.items()}
    save_file(whole, folder / "model.safetensors")
    return folder


class Mctp:
    """What MCTP modules of a model say, by the formulas of their authors."""

    def __init__(self, tensors, module):
        self.t = tensors
        self.first = module.config.num_hidden_layers
        self.table = module.get_input_embeddings().weight.detach()
        self.head = module.lm_head.weight.detach()

    def norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.t[f"model.{name}.weight"]

    def states(self, m, tokens, before):
        """Those of module m, of the tokens of its slots and the states before it [n,W]."""
        t, n, width = self.t, len(tokens), self.table.shape[1]
        layer, size = f"layers.{self.first + m}.", width // HEADS
        e = self.norm(self.table[tokens], f"mtp_embed_norms.{m}")
        h = self.norm(before, f"mtp_hidden_norms.{m}")
        x = torch.cat([e, h], -1) @ t[f"model.mtp_projs.{m}.weight"].T
        z = self.norm(x, f"{layer}input_layernorm")

        def heads(name):
            stem = f"model.{layer}self_attn.{name}_proj"
            y = z @ t[f"{stem}.weight"].T + t.get(f"{stem}.bias", 0)
            return y.view(n, -1, size).transpose(0, 1)

        places = torch.arange(n) + m + 1
        q, k, v = turned(heads("q"), places, THETA), turned(heads("k"), places, THETA), heads("v")
        k, v = (y.repeat_interleave(HEADS // GROUPS, 0) for y in (k, v))
        scores = (q @ k.transpose(1, 2)) / size**0.5
        hidden = torch.ones(n, n).triu(1).bool()
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        mixed = mixed.transpose(0, 1).reshape(n, -1)
        y = x + mixed @ t[f"model.{layer}self_attn.o_proj.weight"].T
        z = self.norm(y, f"{layer}post_attention_layernorm")
        up = F.silu(z @ t[f"model.{layer}mlp.gate_proj.weight"].T)
        up = up * (z @ t[f"model.{layer}mlp.up_proj.weight"].T)
        return self.norm(y + up @ t[f"model.{layer}mlp.down_proj.weight"].T, "norm")

    def chain(self, features, tokens, count):
        """Behind tokens [n], of all but the last of which the features [n-1,W] are known: `count` tokens, the likeliest
        each, and their logits [count,V].
        """
        tokens, said = list(tokens), []
        for m in range(count):
            ids = torch.tensor(tokens[m + 1 :])
            features = self.states(m, ids, features)
            said.append(features[-1] @ self.head.T)
            tokens.append(int(said[-1].argmax()))
        return tokens[-count:], torch.stack(said)


def llama_in(folder, layers):
    """A model of so many layers, and its directory."""
    torch.manual_seed(3)
    module = models.make("llama", layers).eval()
    module.save_pretrained(folder)
    return module, folder


def built(use, folder, path, place="eager", rule="spec-chain", **draft):
    """A model with a head, for chains; of ONNX, its artifact beside the head."""
    recipe = {
        "draft": {"use": use, "path": str(path), "weights": "", **draft},
        "verify": {"use": rule},
        "length": {"use": "fixed"},
    }
    out = {"out": path.parent / "out"} if place == "onnx" else {}
    return accel.optimize(folder, recipe, target=place, max_context=64, max_batch=2, **out)


def drafts(model, texts, count, rounds):
    """What rows draft behind growing beginnings of texts, a session that runs them, drafts between."""
    method = model.decoding()[1].methods["draft"]
    rows, found = rows_of([text[: rounds[0] - 1] for text in texts]), []
    methods = {"tree": Chain(), "verify": SampleMatch(), "length": Fixed(count)}
    with model.session(len(texts)) as session:
        drafters = method.open(session, rows, DecodeContext(methods, None, model))
        session.prompt(np.array([row.prompt for row in rows]))
        done = rounds[0] - 1
        for size in rounds:
            if size - 1 > done:
                session.run(np.array([text[done : size - 1] for text in texts]))
            for row, text in zip(rows, texts, strict=True):
                for token in text[row.seen.size : size]:
                    row.accept(token, None)
            done = size - 1
            paces = Fixed(count).open(rows, unmeasured_cost)
            trees = drafters.draft(dict.fromkeys(range(len(texts)), count), paces)
            found.append([trees[i].tokens.tolist() for i in range(len(texts))])
        drafters.close()
    return found


def turned(y, places, theta):
    """y [H,n,D] at places [n]."""
    size = y.shape[2]
    angles = places[:, None] * theta ** -(torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))
    a, b = y.chunk(2, -1)
    return y * cos + torch.cat([-b, a], -1) * sin


def texts_of(count):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 100, count).tolist() for _ in range(2)]


def opened(model, session, rows, tree=Chain(), rule=SampleMatch()):  # noqa: B008  (frozen)
    """The drafters of rows."""
    methods = {"tree": tree, "verify": rule}
    context = DecodeContext(methods, None, model)
    return model.decoding()[1].methods["draft"].open(session, rows, context)


def asked(drafters, rows, *which, limit=30):
    """The trees of some of them."""
    paces = Fixed(limit).open(rows, unmeasured_cost)
    trees = drafters.draft(dict.fromkeys(which, limit), paces)
    return [trees[i] for i in which]


def as_plain(model, tree, temperature, rule="sample-match", limit=9):
    """Whether the tokens of two rows, drafted, are those of plain decoding."""

    def rows():
        sampler = Standard(temperature=temperature)
        found = rows_of(PROMPTS, sampler, limit=16, max_context=64)
        for i, row in enumerate(found):
            row.rng = np.random.default_rng(i)
        return found

    method = model.decoding()[1].methods["draft"]
    want, made = plain(model.session(2), rows()), rows()
    with model.session(2) as session:
        more = {"length": Fixed(limit), "model": model, "tree": tree}
        list(speculated(session, made, method, rule, **more))
    assert sum(row.drafting["drafted"] for row in made) > 20
    return [row.tokens for row in made] == want
