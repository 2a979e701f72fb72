"""draft = moa-spec: a draft is that of the formulas, whatever stood before; summaries of verified tokens stay; tokens
are plain decoding's.
"""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import accel
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import AccelError, CaptureError, RecipeError
from accel.runtime.speculation.features import FeatureFollower
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...heads_case import EPS, as_plain, drafts, llama_in, target_of, texts_of, turned

LAYERS, HEADS, GROUPS, THETA, DRAFTED = 3, 4, 2, 10000.0, 60


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The module of a target, and its folder."""
    return llama_in(tmp_path_factory.mktemp("target"), LAYERS)


def written(folder, module, own=True, seed=0, **change):
    """A head's folder, and its tensors; own: it drafts some words alone."""
    c, g = module.config, torch.Generator().manual_seed(seed)
    groups, size = c.num_key_value_heads, c.head_dim
    sizes = {"layers": (2 * groups * size, 2 * groups, groups, size, 40)}
    sizes["tokens"] = sizes["summaries"] = (c.hidden_size, HEADS, GROUPS, 12, 44)

    def some(*shape):
        return torch.randn(shape, generator=g) * 1.6 / shape[-1] ** 0.5

    def norm(width):
        return 1 + 0.2 * torch.randn(width, generator=g)

    found = {"embed_norm.weight": norm(c.hidden_size)}
    found["summary_proj.weight"] = some(c.hidden_size, 2 * groups * size)
    for kind, (width, heads, kv, wide, inner) in sizes.items():
        for name, count in (("q", heads), ("k", kv), ("v", kv)):
            found[f"{kind}.{name}_proj.weight"] = some(count * wide, width)
        found[f"{kind}.o_proj.weight"] = some(width, heads * wide)
        found |= {f"{kind}.mlp.{n}_proj.weight": some(inner, width) for n in ("gate", "up")}
        found[f"{kind}.mlp.down_proj.weight"] = some(width, inner)
        for name in ("input", "post_attention"):
            found[f"{kind}.{name}_layernorm.weight"] = norm(width)
    if own:
        ids = torch.randperm(c.vocab_size, generator=g)[:DRAFTED].sort().values
        found["d2t"] = ids - torch.arange(DRAFTED)
        found["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool)
        found["t2d"][ids] = True

    def told(kind):
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        named = dict(zip((*names, "intermediate_size"), sizes[kind], strict=True))
        turns = {"rope_type": "default", "rope_theta": THETA}
        return {**named, "rms_norm_eps": EPS, "rope_parameters": turns}

    config = {
        "architectures": ["MoaSpecDraft"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        **told("tokens"),
        "summary_config": told("layers"),
        "target_config": {
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": groups,
            "head_dim": size,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    save_file({n: t.contiguous() for n, t in found.items()}, folder / "model.safetensors")
    return folder, found


class Plain:
    """What a head says, by the paper: a layer over the layers of each token, on average; a layer over tokens; one from
    these to summaries, through one norm; and the target's output head.

    layers: of the target whose keys and values it reads. off: slots by which summaries are off. ahead: places by which
    queries are.
    """

    size = 12  # of a head, in layers over tokens

    def __init__(self, module, tensors, layers=LAYERS, off=0, ahead=0, theta=THETA):
        self.module, self.t, self.layers, self.theta = module, tensors, layers, theta
        self.off, self.ahead = off, ahead

    def norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.t[f"{name}.weight"]

    def block(self, kind, x, source, places, others, seen):
        """A layer: x [n,W] at places attends to the source [m,W] at others, where seen [n,m]."""
        size = self.size if kind != "layers" else self.module.config.head_dim

        def heads(y, name, at=None):
            made = (y @ self.t[f"{kind}.{name}_proj.weight"].T).view(len(y), -1, size)
            made = made.transpose(0, 1)
            return made if at is None else turned(made, at, self.theta)

        y, s = (self.norm(z, f"{kind}.input_layernorm") for z in (x, source))
        q, k, v = heads(y, "q", places), heads(s, "k", others), heads(s, "v")
        k, v = (z.repeat_interleave(len(q) // len(z), 0) for z in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + mixed.transpose(0, 1).reshape(len(x), -1) @ self.t[f"{kind}.o_proj.weight"].T
        z = self.norm(x, f"{kind}.post_attention_layernorm")
        gate, up, down = (self.t[f"{kind}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return x + (F.silu(z @ gate.T) * (z @ up.T)) @ down.T

    def summary(self, cache, token):
        """Of one token, of the target's cache [W]."""
        parts = []
        for layer in cache.layers[: self.layers]:
            pairs = zip(layer.keys[0, :, token], layer.values[0, :, token], strict=True)
            parts.append(torch.cat([y for pair in pairs for y in pair]))
        x, places = torch.stack(parts), torch.arange(self.layers)
        seen = torch.ones(self.layers, self.layers).bool()
        mixed = self.block("layers", x, x, places, places, seen)
        return mixed.mean(0) @ self.t["summary_proj.weight"].T

    @torch.no_grad()
    def summaries(self, tokens):
        cache = self.module(torch.tensor([tokens]), use_cache=True).past_key_values
        return torch.stack([self.summary(cache, i) for i in range(len(tokens))])

    @torch.no_grad()
    def of(self, ids, s, begin=None, near=None):
        """What the output head reads [n,W] behind ids [n+1], of summaries s [m,W]. begin: of each token the first whose
        summary it does not see; near: the first token that it sees.
        """
        places = torch.arange(1, len(ids))
        x = self.norm(self.module.get_input_embeddings().weight[ids[1:]], "embed_norm")
        seen = places <= places[:, None]
        if near is not None:
            seen &= places >= near[:, None]
        x = self.block("tokens", x, x, places, places, seen)
        s = torch.cat([s[:1]] * self.off + [s])[: len(s)]
        others = torch.arange(len(s))
        seen = others < (places if begin is None else begin)[:, None]
        return self.block("summaries", x, s, places + self.ahead, others, seen)

    @torch.no_grad()
    def said(self, tokens, drafted):
        """The logits [n,V] behind tokens 1 .. of a text [s] that was verified and what was `drafted` behind it."""
        features = self.of([*tokens, *drafted], self.summaries(tokens[:-1]))
        whole = self.module.lm_head(features)
        if "d2t" not in self.t:
            return whole
        some = torch.full_like(whole, -torch.inf)
        ids = torch.arange(DRAFTED) + self.t["d2t"]
        some[:, ids] = whole[:, ids]
        return some

    def chain(self, tokens, count):
        found = []
        for _ in range(count):
            found.append(int(self.said(tokens, found)[-1].argmax()))
        return found


def build(source, path, target="eager", tree="chain", **more):
    recipe = {
        "draft": {"use": "moa-spec", "path": str(path), "weights": ""},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
        **more.pop("tables", {}),
    }
    return accel.optimize(source, recipe, target=target, max_context=64, max_batch=2, **more)


@pytest.fixture(scope="module")
def built(home, tmp_path_factory):
    """The model with a head, and that head's tensors."""
    module, folder = home
    path, tensors = written(tmp_path_factory.mktemp("head"), module)
    with build(folder, path, tree="eagle-tree") as model:
        yield model, tensors


def test_a_draft_is_that_of_the_formulas(home, built):
    """Behind a prompt, and behind drafts of which some tokens stood or none. The controls: the last layer is not
    read, summaries of the token before, and queries at another place.
    """
    (module, _), (model, tensors) = home, built
    check_drafts(module, model, tensors)


def check_drafts(module, model, tensors):
    texts, rounds = texts_of(20), (8, 9, 14)

    def wanted(**other):
        head = Plain(module, tensors, **other)
        return [[head.chain(t[:n], 3) for t in texts] for n in rounds]

    assert model.draft_model.facts.draft_head.drafter == "moa-spec"
    assert drafts(model, texts, 3, rounds) == wanted()
    for other in ({"layers": LAYERS - 1}, {"off": 1}, {"ahead": -2}):
        assert wanted() != wanted(**other), other


@pytest.mark.long
def test_a_draft_of_all_words_is_that_of_the_formulas(home, tmp_path):
    module, folder = home
    path, tensors = written(tmp_path / "head", module, own=False)
    with build(folder, path) as model:
        check_drafts(module, model, tensors)


def test_what_is_cached_of_a_verified_token_stays(home, built):
    """The law: keys and values of its summary are the same after every later round; those of drafted tokens fall. They
    are of the paper's summaries. The control: what lies there of a drafted token changes when it is verified.
    """
    (module, _), (model, tensors) = home, built
    text, plain = texts_of(12)[0], Plain(module, tensors)

    def keys(follower):
        state = follower._session._core.backend._state
        return state["kv.1.k"][0, :, :12, :12].clone()

    with model.session(1) as session:
        head = model.draft_model.facts.draft_head
        follower = FeatureFollower(model.draft_model, session, 1, False, head)
        session.prompt(np.array([text[:6]]))
        follower.follow({0: np.array(text[:7])})
        first = keys(follower)
        for token in (50, 51):
            follower.run({0: np.array([token])})
        drafted = keys(follower)
        session.run(np.array([text[6:9]]))
        follower.follow({0: np.array(text[:10])})
        later = keys(follower)
        follower.close()
    assert torch.equal(first[:, :6], drafted[:, :6]) and torch.equal(first[:, :6], later[:, :6])
    assert not drafted[:, 6:8].any() and later[:, 6:9].any()
    s = plain.norm(plain.summaries(text[:9]), "summaries.input_layernorm")
    want = (s @ tensors["summaries.k_proj.weight"].T).view(9, -1, 12).transpose(0, 1)
    torch.testing.assert_close(
        later[:, :9].float(), turned(want, torch.arange(9), THETA), atol=2e-3, rtol=2e-3
    )


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
        (lambda t, c: t.pop("layers.o_proj.weight"), "lacks layers.o_proj"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "has extra .1 tensors more"),
        (lambda t, c: t["summary_proj.weight"].fill_(torch.nan), "summary_proj.weight holds numb"),
        (lambda t, c: t["d2t"].fill_(99), "d2t names token 101, and the target has 101"),
        (lambda t, c: c.update(num_attention_heads="a"), "num_attention_heads = 'a'; a head needs"),
        (lambda t, c: c.update(hidden_act="no"), "transformers makes no layer|'no'"),
        (lambda t, c: c.pop("summary_config"), "hidden_size = None; a head needs a whole"),
        (lambda t, c: c["summary_config"].update(hidden_size=20), "over layers is 20 wide, and"),
        (lambda t, c: c["target_config"].update(num_hidden_layers=4), "of 4 layers, .* has 3 lay"),
        (lambda t, c: c["target_config"].update(num_key_value_heads=1), "each of 1 heads of .* tr"),
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
    c, target = module.config, target_of(module.lm_head.weight, LAYERS)
    caches = ((c.num_key_value_heads, c.head_dim),) * LAYERS
    with pytest.raises(CaptureError, match=words):
        head_at(path, target=type(target)(LAYERS, target.output_head, caches)).load()


def test_heads_of_other_targets_are_refused(home, tmp_path):
    module, folder = home
    path, _ = written(tmp_path / "few", module, vocab_size=90)
    with pytest.raises(AccelError, match="has 90 tokens and the model 101"):
        build(folder, path).close()
    path, _ = written(tmp_path / "wide", module, hidden_size=40)
    with pytest.raises(
        AccelError, match="reads states of 40 numbers, (?s:.*) train moa-spec MODEL"
    ):
        build(folder, path).close()
    assert with_draft("base", path).tables["draft"]["use"] == "moa-spec"
