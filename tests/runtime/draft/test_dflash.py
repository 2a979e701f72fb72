"""draft = dflash: a block is that of the published formulas, whatever stood before; tokens are plain decoding's."""

import json
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import accel
from accel.compiler.draft_build import _check_head
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import CaptureError, RecipeError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.tree.chain import Chain

from ...draft_case import rows_of
from ...heads_case import EPS, GROUPS, HEADS, THETA, as_plain, drafts, target_of, texts_of

LAYERS, BLOCK, MASK, IDS = 4, 6, 100, (0, 2)
SIZE = 8  # of an attention head, whatever the width


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model, its directory, and a head's tensors for it."""
    torch.manual_seed(3)
    module = models.make("llama", LAYERS).eval()
    folder = tmp_path_factory.mktemp("target")
    module.save_pretrained(folder)
    return module, folder, tensors_for(module.config.hidden_size)


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
def block(module, t, text, count, size=BLOCK, off=0, first=0, causal=False):
    """The likeliest tokens behind a text, by the formulas of the authors. The controls: taps of layers `off` further,
    positions of the block `first` further, a block that sees only what is before.
    """
    states = module(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    embedding = module.get_input_embeddings().weight

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * t[f"{name}.weight"]

    c = norm(torch.cat([states[k + 1 + off][0] for k in IDS], -1) @ t["fc.weight"].T, "hidden_norm")
    x = embedding[torch.tensor([text[-1]] + [MASK] * (size - 1))]
    n = len(c)
    places = torch.cat([torch.arange(n), torch.arange(n, n + size) + first])

    def turned(y, where):
        angles = where[:, None] * THETA ** -(torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angles.cos(), angles.sin()))
        a, b = y.chunk(2, -1)
        return y * cos + torch.cat([-b, a], -1) * sin

    seen = torch.ones(size, n + size).tril(n if causal else n + size).bool()
    for i in range(2):
        p = f"layers.{i}."
        z = norm(x, p + "input_layernorm")
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
        x = x + mixed.transpose(0, 1).flatten(1) @ t[p + "self_attn.o_proj.weight"].T
        z = norm(x, p + "post_attention_layernorm")
        up = F.silu(z @ t[p + "mlp.gate_proj.weight"].T) * (z @ t[p + "mlp.up_proj.weight"].T)
        x = x + up @ t[p + "mlp.down_proj.weight"].T
    logits = module.get_output_embeddings()(norm(x, "norm")[1:])
    return logits.argmax(-1)[:count].tolist()


def build(folder, path, target="eager", **more):
    recipe = {
        "draft": {"use": "dflash", "path": str(path), "weights": ""},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    return accel.optimize(folder, recipe, target=target, max_context=64, max_batch=2, **more)


def test_a_block_is_that_of_the_formulas(tmp_path, target):
    """Behind a prompt, and behind tokens that came after other blocks; a shorter draft is of a whole block, too,
    but where the context ends.
    """
    module, folder, tensors = target
    path = written(tmp_path / "head", config_for(module), tensors)
    texts, rounds = texts_of(20), (8, 9, 14)

    def wanted(count, **other):
        return [[block(module, tensors, t[:n], count, **other) for t in texts] for n in rounds]

    with build(folder, path) as model:
        assert drafts(model, texts, 3, rounds) == wanted(3)
        found = drafts(model, texts, 9, rounds)
        ends = [(text * 4)[:62] for text in texts]  # of 64 tokens
        last = drafts(model, ends, 9, (62,))
    assert found == wanted(9)
    assert last == [[block(module, tensors, text, 9, size=3) for text in ends]]
    for control in ({"off": 1}, {"off": -1}, {"first": 1}, {"causal": True}):
        assert found != wanted(9, **control), control


@pytest.mark.long
def test_rows_join_and_leave(tmp_path, target):
    """A row that came with another session drafts as by itself, and a row that takes another's place, too."""
    module, folder, tensors = target
    path, texts = written(tmp_path / "head", config_for(module), tensors), texts_of(20)

    def asked(drafters, *rows):
        trees = drafters.draft(dict.fromkeys(rows, 4), None)
        return [trees[i].tokens.tolist() for i in rows]

    def grown(session, rows, text, size):
        session.run(np.array([text[size - 2 : size - 1]]))
        rows[0].accept(text[size - 1], None)

    with build(folder, path) as model:
        method, opened = model.decoding()[1].methods["draft"], []
        for text, size in zip(texts, (8, 11), strict=True):
            rows, session = rows_of([text[:size]]), model.session(1)
            drafters = method.open(session, rows, DecodeContext({}, None, model))
            session.prompt(np.array([text[: size - 1]]))
            assert asked(drafters, 0) == [block(module, tensors, text[:size], 4)]
            opened.append((session, rows, drafters))
        (session, rows, drafters), (other, more, theirs) = opened
        session.join(other)
        rows += more
        drafters.join(theirs)
        assert drafters.joins
        want = [block(module, tensors, t[:n], 4) for t, n in zip(texts, (8, 11), strict=True)]
        assert asked(drafters, 0, 1) == want
        order = session.leave(0)
        drafters.leave(order)
        rows[:] = [rows[i] for i in order]
        grown(session, rows, texts[1], 12)
        assert asked(drafters, 0) == [block(module, tensors, texts[1][:12], 4)]
        drafters.close()
        session.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target_name", "temperature"), [("onnx", 0.0), ("onnx", 0.9), ("eager", 0.0)]
)
def test_tokens_are_those_of_plain_decoding(tmp_path, target, target_name, temperature):
    module, folder, tensors = target
    path = written(tmp_path / "head", config_for(module), tensors)
    out = {"out": tmp_path / "out"} if target_name == "onnx" else {}
    with build(folder, path, target_name, **out) as model:
        assert as_plain(model, Chain(), temperature, limit=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("fc.weight"), "lacks fc.weight .1 of 25 tensors"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "has extra .1 tensors more"),
        (lambda t, c: t["norm.weight"].fill_(torch.nan), "norm.weight holds numbers"),
        (lambda t, c: c.update(hidden_size="a"), "hidden_size = 'a'; a head needs a whole number"),
        (
            lambda t, c: c.update(dflash_config={}),
            r"comes out of layers \[\], and its target has 4",
        ),
        (lambda t, c: c.update(target_layer_ids=[4]), r"comes out of layers \[4\], and its target"),
        (lambda t, c: c.update(block_size=1), "block_size = 1; a head needs a whole number of 2"),
        (lambda t, c: c["dflash_config"].update(mask_token_id=101), "mask_token_id is 101, of 101"),
        (lambda t, c: c.update(is_causal=True), "it is a later form"),
        (lambda t, c: c.update(model_type="llama"), "layers are of model_type 'llama'"),
        (
            lambda t, c: c.update(layer_types=["full_attention", "sliding_attention"]),
            "have sliding_attention, and accel reads heads of full attention",
        ),
        (lambda t, c: c.update(output_multiplier=2.0), "says output_multiplier = 2.0, which accel"),
        (
            lambda t, c: c.update(vocab_size=110),
            r"the model's output head has size \[101, 48\], and \[110",
        ),
    ],
)
def test_wrong_heads_are_refused(tmp_path, target, change, words):
    module, folder, tensors = target
    config, tensors = config_for(module), {n: t.clone() for n, t in tensors.items()}
    change(tensors, config)
    path = written(tmp_path / "head", config, tensors)
    with pytest.raises(CaptureError, match=words):
        head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load()


def test_what_is_no_head(tmp_path, target):
    module, folder, tensors = target
    path = written(tmp_path / "head", config_for(module), tensors)
    assert with_draft("base", path).tables["draft"]["use"] == "dflash"
    with pytest.raises(RecipeError, match="holds a model, not a head"):
        build(folder, folder)
    gemma = SimpleNamespace(config={"model_type": "gemma3_text", "hidden_size": 48})
    with pytest.raises(RecipeError, match="the embedding of a gemma3_text without its scale"):
        _check_head(head_at(path), gemma)
