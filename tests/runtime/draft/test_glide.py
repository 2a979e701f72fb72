"""draft = glide: a draft is that of the formulas, whatever stood before; tokens are plain decoding's."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import accel
from accel.compiler.load.heads import Target
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import AccelError, CaptureError, RecipeError
from accel.runtime.speculation.features import FeatureFollower
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree

from ...draft_case import rows_of
from ...heads_case import EPS, as_plain, asked, drafts, llama_in, opened, texts_of, turned

LAYERS, HEADS, GROUPS, THETA, DRAFTED = 3, 2, 1, 20000.0, 60
OTHERS = {"one layer": {"count": 1}, "own embedding": {"count": 1, "own": True}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The module of a target, and its folder."""
    return llama_in(tmp_path_factory.mktemp("target"), LAYERS)


def written(folder, module, count=1, own=False, seed=0, **change):
    """A head's folder, and its tensors: `count` layers, whose sizes are not the target's where it has an embedding and
    all words of its `own`.
    """
    c, g = module.config, torch.Generator().manual_seed(seed)
    width = 32 if own else c.hidden_size
    inner, size = 40, width // HEADS
    read = c.num_attention_heads * c.head_dim

    def some(*shape):
        return torch.randn(shape, generator=g) * 1.6 / shape[-1] ** 0.5

    def norm():
        return 1 + 0.2 * torch.randn(width, generator=g)

    found = {"norm.weight": norm()}
    for i in range(count):
        part = {f"{n}_layernorm.weight": norm() for n in ("input", "post_attention")}
        part |= {"self_attn.q_proj.weight": some(HEADS * size, width)}
        part |= {f"self_attn.{n}_proj.weight": some(GROUPS * size, width) for n in "kv"}
        part |= {"self_attn.o_proj.weight": some(width, HEADS * size)}
        part |= {"cross_attn.q_proj.weight": some(read, width)}
        part |= {"cross_attn.o_proj.weight": some(width, read)}
        part |= {f"mlp.{n}_proj.weight": some(inner, width) for n in ("gate", "up")}
        part |= {"mlp.down_proj.weight": some(width, inner)}
        found |= {f"layers.{i}.{n}": tensor for n, tensor in part.items()}
    words = c.vocab_size if own else DRAFTED
    found["lm_head.weight"] = 3 * some(words, width)
    if own:
        found["embed_tokens.weight"] = some(c.vocab_size, width)
    else:
        found["embed_norm.weight"] = norm()
        ids = torch.randperm(c.vocab_size, generator=g)[:DRAFTED].sort().values
        found["d2t"] = ids - torch.arange(DRAFTED)
        found["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool)
        found["t2d"][ids] = True
    target = {
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rope_parameters": c.rope_parameters,
    }
    config = {
        "architectures": ["GlideDraft"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": count,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": size,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "target_config": target,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    save_file({n: t.contiguous() for n, t in found.items()}, folder / "model.safetensors")
    return folder, found


class Plain:
    """What a head says, by the paper: x + SelfAttn(norm(x)), x + CrossAttn(x), x + MLP(norm(x)), layer by layer.

    off: slots by which keys and values are off. ahead: places by which queries are. cross: whether there is
    cross-attention.
    """

    def __init__(self, module, tensors, off=0, ahead=0, cross=True):
        self.module, self.t, self.off, self.ahead, self.cross = module, tensors, off, ahead, cross
        self.count = len({n.split(".")[1] for n in tensors if n.startswith("layers.")})

    def norm(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.t[f"{name}.weight"]

    @torch.no_grad()
    def said(self, tokens, drafted):
        """The logits [n,V] behind tokens 1 .. of a text [s] that was verified and what was `drafted` behind it. Token p
        of the text sees the target's keys of the tokens before it, a drafted one of all but the text's last.
        """
        c, ids = self.module.config, [*tokens, *drafted]
        cache = self.module(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
        places = torch.arange(1, len(ids))
        if "embed_tokens.weight" in self.t:
            x = self.t["embed_tokens.weight"][ids[1:]]
        else:
            x = self.norm(self.module.get_input_embeddings().weight[ids[1:]], "embed_norm")
        n, width = x.shape
        for i in range(self.count):
            w = {k.removeprefix(f"layers.{i}."): v for k, v in self.t.items()}
            y = self.norm(x, f"layers.{i}.input_layernorm")
            q, k, v = (
                (y @ w[f"self_attn.{p}_proj.weight"].T).view(n, -1, width // HEADS).transpose(0, 1)
                for p in "qkv"
            )
            q, k = turned(q, places, THETA), turned(k, places, THETA)
            k, v = (s.repeat_interleave(HEADS // GROUPS, 0) for s in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(0, 1).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
            if self.cross:
                layer = cache.layers[c.num_hidden_layers - self.count + i]
                held = [s[0] for s in (layer.keys, layer.values)]
                k, v = (torch.cat([s[:, :1]] * self.off + [s], 1)[:, : s.shape[1]] for s in held)
                q = (x @ w["cross_attn.q_proj.weight"].T).view(n, -1, c.head_dim).transpose(0, 1)
                q = turned(q, places + self.ahead, c.rope_parameters["rope_theta"])
                k, v = (s.repeat_interleave(len(q) // len(k), 0) for s in (k, v))
                seen = torch.arange(k.shape[1]) < places[:, None]
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
                x = x + mixed.transpose(0, 1).reshape(n, -1) @ w["cross_attn.o_proj.weight"].T
            z = self.norm(x, f"layers.{i}.post_attention_layernorm")
            up = F.silu(z @ w["mlp.gate_proj.weight"].T) * (z @ w["mlp.up_proj.weight"].T)
            x = x + up @ w["mlp.down_proj.weight"].T
        own = self.norm(x, "norm") @ self.t["lm_head.weight"].T
        if "d2t" not in self.t:
            return own
        whole = torch.full((n, c.vocab_size), -torch.inf)
        whole[:, torch.arange(own.shape[1]) + self.t["d2t"]] = own
        return whole

    def chain(self, tokens, count):
        found = []
        for _ in range(count):
            found.append(int(self.said(tokens, found)[-1].argmax()))
        return found


def build(source, path, target="eager", tree="chain", **more):
    recipe = {
        "draft": {"use": "glide", "path": str(path), "weights": ""},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
        **more.pop("tables", {}),
    }
    return accel.optimize(source, recipe, target=target, max_context=64, max_batch=2, **more)


@pytest.fixture(scope="module")
def built(home, tmp_path_factory):
    """The model with a head of two layers, and that head's tensors."""
    module, folder = home
    path, tensors = written(tmp_path_factory.mktemp("head"), module, 2)
    with build(folder, path, tree="eagle-tree") as model:
        yield model, tensors


def test_a_draft_is_that_of_the_formulas(home, built):
    """Behind a prompt, and behind tokens that came after drafts of which some stood or all fell. The controls: keys and
    values of the token before, queries at the place before, and no cross-attention.
    """
    (module, _), (model, tensors) = home, built
    check_drafts(module, model, tensors)


@pytest.mark.long
@pytest.mark.parametrize("form", OTHERS)
def test_a_draft_of_each_form_is_that_of_the_formulas(home, tmp_path, form):
    module, folder = home
    path, tensors = written(tmp_path / "head", module, **OTHERS[form])
    with build(folder, path) as model:
        check_drafts(module, model, tensors)


def check_drafts(module, model, tensors):
    texts, rounds = texts_of(20), (8, 9, 14)

    def wanted(**other):
        head = Plain(module, tensors, **other)
        return [[head.chain(t[:n], 3) for t in texts] for n in rounds]

    assert model.draft_model.facts.draft_head.drafter == "glide"
    assert drafts(model, texts, 3, rounds) == wanted()
    for other in ({"off": 1}, {"ahead": -1}, {"cross": False}):
        assert wanted() != wanted(**other), other


def test_logits_are_those_of_the_formulas(home, built):
    """To 1e-5, after drafts of which two tokens stood and none, whichever rows are asked."""
    (module, _), (model, tensors) = home, built
    texts, plain = texts_of(14), Plain(module, tensors)
    other = Plain(module, tensors, off=1)

    def check(said, drafted):
        for i, (logits, tokens) in enumerate(zip(said, drafted, strict=True)):
            if tokens is None:
                continue
            want, wrong = (one.said(*tokens)[-1] for one in (plain, other))
            real = want.isfinite()
            found = torch.from_numpy(logits[-1, : len(want)].copy())
            assert (found[real] - want[real]).abs().max() < 1e-5 * want[real].abs().max(), i
            assert (found[real] - wrong[real]).abs().max() > 1e-2, i

    with model.session(2) as session:
        head = model.draft_model.facts.draft_head
        follower = FeatureFollower(model.draft_model, session, 2, False, head)
        session.prompt(np.array([text[:6] for text in texts]))
        check(
            follower.follow({i: np.array(t[:7]) for i, t in enumerate(texts)}),
            [(t[:7], []) for t in texts],
        )
        for n, token in enumerate((50, 51, 52)):
            ran = follower.run({i: np.array([token]) for i in range(2)})
            check(ran, [(t[:7], [50, 51, 52][: n + 1]) for t in texts])
        session.run(np.array([[t[6], 50, 51] for t in texts]))  # two of three stand
        stood = [[*t[:7], 50, 51, t[9]] for t in texts]
        check(follower.follow({1: np.array(stood[1])}), [None, (stood[1], [])])
        check(follower.follow({0: np.array(stood[0])}), [(stood[0], []), None])
        follower.run({0: np.array([60])})
        session.run(np.array([one[9:] for one in stood]))  # none stands
        fell = [[*one, 70] for one in stood]
        check(
            follower.follow({i: np.array(one) for i, one in enumerate(fell)}),
            [(one, []) for one in fell],
        )
        follower.close()


WAYS = [(Chain(), 0.0), (EagleTree(nodes=12, top_k=3, depth=4), 0.0), (Chain(), 0.9)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("tree", "temperature"), WAYS)
def test_tokens_are_those_of_plain_decoding(built, tree, temperature):
    assert as_plain(built[0], tree, temperature)


@pytest.mark.long
def test_tokens_are_those_of_plain_decoding_in_an_artifact(home, tmp_path):
    module, folder = home
    path, tensors = written(tmp_path / "head", module, 2)
    with build(folder, path, "onnx", "eagle-tree", out=tmp_path / "out") as model:
        assert all(as_plain(model, *way) for way in WAYS[:2])
        texts = texts_of(12)
        want = [[Plain(module, tensors).chain(t[:8], 3) for t in texts]]
        assert drafts(model, texts, 3, (8,)) == want


def test_rows_join_and_leave(home, built):
    """A row that came with another session drafts as by itself, and one that takes another's place, too."""
    (module, _), (model, tensors), texts, parts = home, built, texts_of(20), []
    head = Plain(module, tensors)

    def tokens(drafters, rows, *which):
        return [tree.tokens.tolist() for tree in asked(drafters, rows, *which, limit=3)]

    for text, size in zip(texts, (8, 11), strict=True):
        rows, session = rows_of([text[:size]]), model.session(1)
        drafters = opened(model, session, rows)
        session.prompt(np.array([text[: size - 1]]))
        assert tokens(drafters, rows, 0) == [head.chain(text[:size], 3)]
        parts.append((session, rows, drafters))
    (session, rows, drafters), (other, more, theirs) = parts
    session.join(other)
    rows += more
    drafters.join(theirs)
    want = [head.chain(t[:n], 3) for t, n in zip(texts, (8, 11), strict=True)]
    assert tokens(drafters, rows, 0, 1) == want
    order = session.leave(0)
    drafters.leave(order)
    rows[:] = [rows[i] for i in order]
    session.run(np.array([texts[1][10:11]]))
    rows[0].accept(texts[1][11], None)
    assert tokens(drafters, rows, 0) == [head.chain(texts[1][:12], 3)]
    drafters.close()
    session.close()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"kv.codec": {"use": "kv-int8"}}, "stores keys as attention reads them"),
        ({"kv.codec": {"use": "kivi"}}, "stores keys as attention reads them"),
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
        (lambda t, c: t.pop("layers.0.cross_attn.o_proj.weight"), "lacks layers.0.cross_attn.o_"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "has extra .1 tensors more"),
        (lambda t, c: t["norm.weight"].fill_(torch.nan), "norm.weight holds numbers that are not"),
        (lambda t, c: t["d2t"].fill_(99), "d2t names token 101, and the target has 101"),
        (lambda t, c: c.update(num_attention_heads="a"), "num_attention_heads = 'a'; a head needs"),
        (lambda t, c: c.update(hidden_act="no"), "transformers makes no layers|'no'"),
        (lambda t, c: c["target_config"].update(num_key_value_heads=1), "each of 1 heads of .* tr"),
        (lambda t, c: c["target_config"].update(num_hidden_layers=4), "of 1 of 4 layers, .* has 3"),
        (lambda t, c: c["target_config"].pop("head_dim"), "head_dim = None; a head needs a whole"),
    ],
)
def test_wrong_heads_are_refused(home, tmp_path, change, words):
    module, _ = home
    path, tensors = written(tmp_path / "head", module)
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
    config = json.loads((path / "config.json").read_text())
    path, _ = written(tmp_path / "wide", module)
    (path / "config.json").write_text(
        json.dumps({**config, "target_config": {**config["target_config"], "hidden_size": 40}})
    )
    with pytest.raises(AccelError, match="reads states of 40 numbers, (?s:.*) train glide MODEL"):
        build(folder, path).close()
    assert with_draft("base", path).tables["draft"]["use"] == "glide"
