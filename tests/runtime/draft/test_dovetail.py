"""draft = dovetail: drafts are those of the paper's formulas, whatever stood before; tokens are plain decoding's."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import accel
from accel.compiler.load.heads._folder import head_at
from accel.compiler.load.heads.dovetail import DOVETAIL
from accel.compiler.with_draft import with_draft
from accel.ir.errors import AccelError
from accel.ir.recipe import Recipe
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...heads_case import (
    EPS,
    GROUPS,
    HEADS,
    THETA,
    as_plain,
    drafts,
    eagle1_folder,
    llama_in,
    target_of,
    texts_of,
    turned,
)
from .test_eagle1 import features_of

LAYERS = 2


def tensors_of(width, layers=LAYERS, seed=0):
    """Those of a head, by the authors' names."""
    g = torch.Generator().manual_seed(seed)

    def some(*shape, size=1.6):
        return torch.randn(shape, generator=g) * size / shape[-1] ** 0.5

    def norm():
        return 1 + 0.2 * torch.randn(width, generator=g)

    found = {"W_1": some(width, width), "W_2": some(width, width), "W_z": some(2 * width, width)}
    found["input_layernorm.weight"] = norm()
    for i in range(layers):
        stem, size = f"layers.{i}", width // HEADS
        if i:
            found[f"{stem}.input_layernorm.weight"] = norm()
        found[f"{stem}.post_attention_layernorm.weight"] = norm()
        for name, out in (("q", HEADS), ("k", GROUPS), ("v", GROUPS), ("o", HEADS)):
            found[f"{stem}.self_attn.{name}_proj.weight"] = some(out * size, width)
        for name in ("gate", "up"):
            found[f"{stem}.mlp.{name}_proj.weight"] = some(2 * width, width)
        found[f"{stem}.mlp.down_proj.weight"] = some(width, 2 * width)
    return found


class Plain:
    """The paper's formulas, slot by slot. embed: of tokens [1,n] the target's embeddings [1,n,W]."""

    gated = True

    def __init__(self, tensors, embed, heads=HEADS, eps=EPS):
        self.t, self.embed, self.heads, self.eps = tensors, embed, heads, eps

    def norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.t[f"{name}.weight"]

    def fused(self, e, h):
        h1, h2 = h @ self.t["W_1"], F.silu(self.norm(e, "input_layernorm") @ self.t["W_2"])
        z = torch.sigmoid(torch.cat([h1, h2], -1) @ self.t["W_z"]) if self.gated else 0.5
        return z * h1 + (1 - z) * h2

    def layer(self, i, x):
        stem, n = f"layers.{i}", len(x)
        y = self.norm(x, f"{stem}.input_layernorm") if i else x

        def parts(name):
            product = y @ self.t[f"{stem}.self_attn.{name}_proj.weight"].T
            size = len(self.t[f"{stem}.self_attn.q_proj.weight"]) // self.heads
            return product.view(n, -1, size).transpose(0, 1)

        q, k, v = parts("q"), parts("k"), parts("v")
        q, k = (turned(one, torch.arange(n), THETA) for one in (q, k))
        k, v = (one.repeat_interleave(self.heads // len(one), 0) for one in (k, v))
        scores = q @ k.transpose(1, 2) / q.shape[2] ** 0.5
        seen = torch.ones(n, n).tril().bool()
        mixed = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
        x = x + mixed.reshape(n, -1) @ self.t[f"{stem}.self_attn.o_proj.weight"].T
        y = self.norm(x, f"{stem}.post_attention_layernorm")
        up = F.silu(y @ self.t[f"{stem}.mlp.gate_proj.weight"].T)
        up = up * (y @ self.t[f"{stem}.mlp.up_proj.weight"].T)
        return x + up @ self.t[f"{stem}.mlp.down_proj.weight"].T

    def states(self, tokens, features):
        """Features of the next tokens [n,W], of tokens and the features before them [n,W]."""
        x = self.fused(self.embed(tokens[None])[0], features)
        for i in range(sum(name.endswith("down_proj.weight") for name in self.t)):
            x = self.layer(i, x)
        return x

    def chain(self, head, features, tokens, count):
        """Behind tokens [n], of all but the last of which the features are known: the `count` likeliest tokens."""
        tokens, found = list(tokens[1:]), []
        while True:
            new = self.states(torch.tensor(tokens), features)[-1]
            found.append(int((head @ new).argmax()))
            if len(found) == count:
                return found
            tokens.append(found[-1])
            features = torch.cat([features, new[None]])


class Even(Plain):
    gated = False


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The module of a target, and its folder."""
    return llama_in(tmp_path_factory.mktemp("target"), 2)


def head_of(module, folder, layers=LAYERS):
    tensors = tensors_of(module.config.hidden_size, layers)
    return eagle1_folder(folder, module, tensors, num_hidden_layers=layers), tensors


def build(source, path, target="eager", tree="chain", **more):
    recipe = {
        "draft": {"use": "dovetail", "path": str(path), "weights": ""},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    return accel.optimize(source, recipe, target=target, max_context=64, max_batch=2, **more)


@torch.no_grad()
def test_states_are_those_of_the_formulas(home, tmp_path):
    """To 1e-5, of heads of one layer and of two. The controls: an even gate, and features of the token before."""
    module, _ = home
    embed, g = module.get_input_embeddings(), torch.Generator().manual_seed(5)
    tokens, h = torch.arange(3, 15), torch.randn(12, module.config.hidden_size, generator=g)
    for layers in (1, 2):
        path, tensors = head_of(module, tmp_path / str(layers), layers)
        config = json.loads((path / "config.json").read_text())
        head = DOVETAIL.load(path, config, target_of(module.lm_head.weight)).model
        found = head.guessed(embed(tokens)[None], h[None], torch.arange(12)[None])[0]
        want = Plain(tensors, embed).states(tokens, h)
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(found, Even(tensors, embed).states(tokens, h), atol=1e-2)
        assert not torch.allclose(
            found, Plain(tensors, embed).states(tokens, h.roll(1, 0)), atol=1e-2
        )


@pytest.mark.few(1)
def test_a_draft_is_that_of_the_formulas(home, tmp_path):
    """Behind a prompt, and behind tokens that came after other drafts. The controls: an even gate, and states of the
    token before.
    """
    module, folder = home
    path, tensors = head_of(module, tmp_path / "head")
    texts, rounds = texts_of(20), (8, 9, 14)
    embed, head = module.get_input_embeddings(), module.lm_head.weight.detach()

    @torch.no_grad()
    def wanted(kind=Plain, shift=0):
        plain = kind(tensors, embed)
        return [
            [plain.chain(head, features_of(module, t[:n]).roll(shift, 0), t[:n], 4) for t in texts]
            for n in rounds
        ]

    with build(folder, path) as model:
        assert model.draft_model.facts.draft_head.drafter == "dovetail"
        found = drafts(model, texts, 4, rounds)
    assert found == wanted()
    assert found != wanted(Even) and found != wanted(shift=1), "the controls"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target", "tree", "temperature"),
    [("eager", EagleTree(), 0.0), ("onnx", Chain(), 0.9), ("onnx", EagleTree(), 0.0)],
)
def test_tokens_are_those_of_plain_decoding(home, tmp_path, target, tree, temperature):
    path, _ = head_of(home[0], tmp_path / "head")
    out = {"out": tmp_path / "out"} if target == "onnx" else {}
    with build(home[1], path, target, tree.use, **out) as model:
        assert as_plain(model, tree, temperature, limit=4)


def test_the_format_is_told_by_tensors(home, tmp_path):
    """Also where it has one layer, as EAGLE's; the recipe's trees are smaller than EAGLE-2's."""
    module, folder = home
    for layers in (1, 2):
        path, _ = head_of(module, tmp_path / str(layers), layers)
        assert head_at(path).format.method == "dovetail"
        assert with_draft("base", path).tables["draft"]["use"] == "dovetail"
    assert head_at(folder) is None
    assert Recipe.load("dovetail").tables["tree"]["nodes"] < EagleTree().nodes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("layers.1.mlp.up_proj.weight"), "lacks layers.1.mlp.up_proj.weight"),
        (lambda t, c: t.pop("input_layernorm.weight"), "lacks fusion.norm.weight"),
        (lambda t, c: t.update(extra=torch.ones(2)), "has extra .1 tensors more"),
        (lambda t, c: t["W_z"].fill_(torch.nan), "fusion.wz.weight holds numbers that are not fi"),
        (lambda t, c: c.update(num_hidden_layers=0), "num_hidden_layers = 0; a head needs"),
        (lambda t, c: c.update(vocab_size=90), "has 90 tokens and the model 101"),
    ],
)
@pytest.mark.few(2)
def test_wrong_heads_are_refused(home, tmp_path, change, words):
    module, folder = home
    path, tensors = head_of(module, tmp_path / "head")
    config = json.loads((path / "config.json").read_text())
    change(tensors, config)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AccelError, match=words):
        build(folder, path).close()
