"""draft = longspec: a draft is that of the formulas, whatever stood before; its own cache does not grow; tokens are
plain decoding's.
"""

import json
from math import prod

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import accel
from accel.compiler.load.heads import Target
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import AccelError, CaptureError, RecipeError
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...draft_case import rows_of
from ...heads_case import EPS, as_plain, asked, drafts, opened, texts_of, turned
from .test_glide import written as glide_folder

LAYERS, WINDOW = 3, 6


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The module of a target, and its folder."""
    torch.manual_seed(3)
    module, folder = models.make("llama", LAYERS).eval(), tmp_path_factory.mktemp("target")
    module.config.max_position_embeddings = 1024
    module.save_pretrained(folder)
    return module, folder


def written(folder, module, normed=True, seed=0, **change):
    """A head's folder, and its tensors, those that its authors write and do not use included where it is not
    `normed`.
    """
    c, g = module.config, torch.Generator().manual_seed(seed)
    width, size = c.hidden_size, c.head_dim
    out, read = c.num_attention_heads * size, c.num_key_value_heads * size

    def some(*shape):
        return torch.randn(shape, generator=g) * 1.6 / shape[-1] ** 0.5

    found = {}
    for name in ("input", "post_self_attention", "post_cross_attention"):
        found[f"{name}_layernorm.weight"] = 1 + 0.2 * torch.randn(width, generator=g)
    for kind in ("self", "cross"):
        for name, count in (("q", out), ("k", read), ("v", read)):
            if kind == "self" or name == "q" or not normed:
                found[f"{kind}_attn.{name}_proj.weight"] = some(count, width)
                found[f"{kind}_attn.{name}_proj.bias"] = 0.3 * some(count)
        found[f"{kind}_attn.o_proj.weight"] = some(width, out)
    found |= {f"mlp.{n}_proj.weight": some(40, width) for n in ("gate", "up")}
    found["mlp.down_proj.weight"] = some(width, 40)
    if normed:
        found["embed_norm.weight"] = 1 + 0.2 * torch.randn(width, generator=g)
    config = {
        "architectures": ["LlamaGlideDecoderLayer"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": width,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": EPS,
        "rope_parameters": c.rope_parameters,
        "window": WINDOW,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    save_file({n: t.contiguous() for n, t in found.items()}, folder / "model.safetensors")
    return folder, found


class Plain:
    """What a head says, by the paper: x + SelfAttn(norm(x)) over the newest tokens, x + CrossAttn(norm(x)), x +
    MLP(norm(x)), and the target's output head.

    window: tokens that self-attention sees. off: slots by which the target's keys and values are off. first: the place
    of the text's first token. normed: whether there is a norm behind the layer.
    """

    def __init__(self, module, tensors, window=WINDOW, off=0, first=0, normed=False):
        self.module, self.t = module, tensors
        self.window, self.off, self.first, self.normed = window, off, first, normed
        self.theta = module.config.rope_parameters["rope_theta"]

    def norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.t[f"{name}.weight"]

    def heads(self, y, kind, name):
        made = y @ self.t[f"{kind}_attn.{name}_proj.weight"].T
        made = made + self.t[f"{kind}_attn.{name}_proj.bias"]
        return made.view(len(y), -1, self.module.config.head_dim).transpose(0, 1)

    @torch.no_grad()
    def said(self, tokens, drafted):
        """The logits [n,V] behind tokens 1 .. of a text [s] that was verified and what was `drafted` behind it. Token p
        of the text sees the target's keys of the tokens before it, a drafted one of all but the text's last.
        """
        ids, before = [*tokens, *drafted], torch.tensor([tokens[:-1]])
        held = self.first + torch.arange(before.shape[1])[None]
        cache = self.module(before, position_ids=held, use_cache=True).past_key_values
        return self.of(ids, [s[0] for s in (cache.layers[-1].keys, cache.layers[-1].values)])

    def of(self, ids, held, stale=1, at=None):
        """The same of ids [n+1], and keys and values [G,s,D] of the target. stale: a token sees those alone that are so
        many tokens before it; the first ones see none. at: the place of each token.
        """
        places = torch.arange(1, len(ids))
        at = self.first + places if at is None else at[1:]
        x = self.module.get_input_embeddings().weight[ids[1:]]
        if "embed_norm.weight" in self.t:
            x = self.norm(x, "embed_norm")
        n = len(x)
        y = self.norm(x, "input_layernorm")
        q, k, v = (self.heads(y, "self", p) for p in "qkv")
        q, k = (turned(z, at, self.theta) for z in (q, k))
        k, v = (s.repeat_interleave(len(q) // len(s), 0) for s in (k, v))
        back = places[:, None] - places
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=(back >= 0) & (back < self.window)
        )
        x = x + mixed.transpose(0, 1).reshape(n, -1) @ self.t["self_attn.o_proj.weight"].T
        k, v = (torch.cat([s[:, :1]] * self.off + [s], 1)[:, : s.shape[1]] for s in held)
        q = self.heads(self.norm(x, "post_self_attention_layernorm"), "cross", "q")
        q = turned(q, at, self.theta)
        k, v = (s.repeat_interleave(len(q) // len(s), 0) for s in (k, v))
        seen = torch.arange(k.shape[1]) <= places[:, None] - stale
        scores = (q @ k.transpose(1, 2) / q.shape[2] ** 0.5).masked_fill(~seen, -torch.inf)
        mixed = scores.softmax(-1).nan_to_num() @ v
        x = x + mixed.transpose(0, 1).reshape(n, -1) @ self.t["cross_attn.o_proj.weight"].T
        z = self.norm(x, "post_cross_attention_layernorm")
        up = F.silu(z @ self.t["mlp.gate_proj.weight"].T) * (z @ self.t["mlp.up_proj.weight"].T)
        x = x + up @ self.t["mlp.down_proj.weight"].T
        if self.normed:
            x = self.module.get_decoder().norm(x)
        return self.module.lm_head(x)

    def chain(self, tokens, count):
        found = []
        for _ in range(count):
            found.append(int(self.said(tokens, found)[-1].argmax()))
        return found


def build(source, path, target="eager", tree="chain", use="longspec", **more):
    recipe = {
        "draft": {"use": use, "path": str(path), "weights": ""},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
        **more.pop("tables", {}),
    }
    settings = {"max_context": 1024, "max_batch": 2, **more}
    return accel.optimize(source, recipe, target=target, **settings)


@pytest.fixture(scope="module")
def built(home, tmp_path_factory):
    """The model with a head, and that head's tensors."""
    module, folder = home
    path, tensors = written(tmp_path_factory.mktemp("head"), module)
    with build(folder, path, tree="eagle-tree") as model:
        yield model, tensors


CONTROLS = {"window": {"window": 99}, "keys": {"off": 1}, "norm": {"normed": True}}


def test_a_draft_is_that_of_the_formulas(home, built):
    """Behind a prompt, and behind drafts of which some tokens stood or none. The controls: no window,
    keys and values of the token before, and a norm before the output head.
    """
    (module, _), (model, tensors) = home, built
    check_drafts(module, model, tensors)


def check_drafts(module, model, tensors):
    texts, rounds = texts_of(20), (8, 9, 14)

    def wanted(**other):
        head = Plain(module, tensors, **other)
        return [[head.chain(t[:n], 3) for t in texts] for n in rounds]

    assert model.draft_model.facts.draft_head.drafter == "longspec"
    assert drafts(model, texts, 3, rounds) == wanted()
    for name, other in CONTROLS.items():
        assert wanted() != wanted(**other), name


@pytest.mark.long
def test_a_draft_of_the_layout_of_its_authors_is_that_of_the_formulas(home, tmp_path):
    """Which has products that it does not use, and the target's embedding as it is."""
    module, folder = home
    path, tensors = written(tmp_path / "head", module, normed=False)
    with build(folder, path) as model:
        check_drafts(module, model, tensors)


def test_its_own_cache_does_not_grow(home, built):
    """From 400 to 700 tokens the bytes of its sessions grow by the copy of the target's keys and values alone."""
    head, c = built[0].draft_model, home[0].config
    assert head.facts.window.size == WINDOW
    few, many = grown(head)
    assert many - few == 256 * states(head, True)
    assert few == 512 * (states(head, True) + states(head, False))
    kv = next(s for s in head.program.state if s.name == "kv.0.k")
    assert kv.shape == ("B", c.num_key_value_heads, "C1", c.head_dim)


def states(head, grows):
    """Bytes of a slot of all states that have one for each token, or of those that do not."""
    sizes = {"float32": 4, "float16": 2, "int64": 8}
    found = [s for s in head.program.state if ("C" in s.shape) == grows]
    return sum(sizes[s.dtype] * prod(n for n in s.shape if isinstance(n, int)) for s in found)


def grown(head):
    """Bytes of its sessions with 400 tokens, and with 700."""
    found = []
    for count in (400, 700):
        with head.session(1) as session:
            session.prompt(np.arange(count)[None] % 90)
            found.append(session.stats["kv_bytes"])
    return found


@pytest.mark.long
def test_that_of_a_glide_head_grows(home, built, tmp_path):
    """By its own keys and values, too."""
    path, _ = glide_folder(tmp_path / "glide", home[0])
    with build(home[1], path, use="glide") as other:
        head = other.draft_model
        few, many = grown(head)
        assert states(head, False) == 0 and many - few == 256 * states(head, True)
        assert states(head, True) > states(built[0].draft_model, True)


def test_a_shift_of_all_places_changes_nothing(home, built):
    """The target's keys shift with them. The control: the head's own places alone shift."""
    (module, _), (_, tensors) = home, built
    head, far = Plain(module, tensors), Plain(module, tensors, first=300)
    text = texts_of(16)[0]
    want = head.said(text, [3, 4])
    torch.testing.assert_close(far.said(text, [3, 4]), want, atol=2e-3, rtol=1e-3)
    cache = module(torch.tensor([text[:-1]]), use_cache=True).past_key_values.layers[-1]
    with torch.no_grad():
        mixed = far.of([*text, 3, 4], [s[0] for s in (cache.keys, cache.values)])
    assert (mixed - want).abs().max() > 1e-1


WAYS = [(Chain(), 0.0), (EagleTree(nodes=12, top_k=3, depth=4), 0.0), (Chain(), 0.9)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("tree", "temperature"), WAYS)
def test_tokens_are_those_of_plain_decoding(built, tree, temperature):
    assert as_plain(built[0], tree, temperature)


@pytest.mark.long
def test_tokens_are_those_of_plain_decoding_in_an_artifact(home, tmp_path):
    module, folder = home
    path, tensors = written(tmp_path / "head", module)
    with build(folder, path, "onnx", "eagle-tree", out=tmp_path / "out") as model:
        assert all(as_plain(model, *way) for way in WAYS[:2])
        texts = texts_of(12)
        want = [[Plain(module, tensors).chain(t[:8], 3) for t in texts]]
        assert drafts(model, texts, 3, (8,)) == want


def test_a_long_text_drafts_as_a_short_one(home, built):
    """Behind 300 tokens, most of which its own cache has dropped; and after most of a draft fell."""
    (module, _), (model, tensors) = home, built
    text = (np.random.default_rng(5).integers(1, 100, 340)).tolist()
    head, tokens = Plain(module, tensors), []
    rows, session = rows_of([text[:300]], limit=64, max_context=1024), model.session(1)
    drafters = opened(model, session, rows)
    session.prompt(np.array([text[:299]]))
    for size in (300, 301, 340):
        if size > 300:
            session.run(np.array([text[len(rows[0].seen) - 1 : size - 1]]))
        for token in text[len(rows[0].seen) : size]:
            rows[0].accept(token, None)
        tokens.append(asked(drafters, rows, 0, limit=4)[0].tokens.tolist())
    assert tokens == [head.chain(text[:n], 4) for n in (300, 301, 340)]
    assert drafters.kv_bytes > 0
    drafters.close()
    session.close()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"kv.codec": {"use": "kv-int8"}}, "stores keys as attention reads them"),
        ({"kv.score": {"use": "snapkv"}}, "keeps every token that it was given"),
        ({"kv.reuse": {"use": "paged-prefix"}}, "share cache memory|every token of a prompt runs"),
    ],
)
def test_caches_that_are_stored_otherwise_are_refused(home, tmp_path, tables, words):
    path, _ = written(tmp_path / "head", home[0])
    with pytest.raises(RecipeError, match=words):
        build(home[1], path, tables=tables)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("cross_attn.o_proj.weight"), "lacks cross_attn.o_proj"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "has extra .1 tensors more"),
        (lambda t, c: t["mlp.up_proj.weight"].fill_(torch.nan), "up_proj.weight holds numbers"),
        (lambda t, c: c.update(window=0), "window = 0; a head needs a whole number"),
        (lambda t, c: c.update(num_attention_heads="a"), "num_attention_heads = 'a'; a head needs"),
        (lambda t, c: c.update(hidden_act="no"), "transformers makes no layer|'no'"),
        (lambda t, c: c.update(num_key_value_heads=1), "of 1 heads of .* its target has 3 layers"),
        (lambda t, c: c.update(num_hidden_layers=4), "last of 4 layers, .* has 3"),
    ],
)
def test_wrong_heads_are_refused(home, tmp_path, change, words):
    module, _ = home
    path, _ = written(tmp_path / "head", module)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    c = module.config
    target = Target(LAYERS, None, ((c.num_key_value_heads, c.head_dim),) * LAYERS)
    with pytest.raises(CaptureError, match=words):
        head_at(path, target=target).load()


def test_heads_of_other_targets_are_refused(home, tmp_path):
    module, folder = home
    path, _ = written(tmp_path / "few", module, vocab_size=90)
    with pytest.raises(AccelError, match="has 90 tokens and the model 101"):
        build(folder, path).close()
    path, _ = written(tmp_path / "wide", module, hidden_size=40)
    with pytest.raises(
        AccelError, match="reads states of 40 numbers, (?s:.*) train longspec MODEL"
    ):
        build(folder, path).close()
    assert with_draft("base", path).tables["draft"]["use"] == "longspec"
