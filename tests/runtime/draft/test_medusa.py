"""draft = medusa: a draft is that of the published formulas, whatever stood before; tokens are plain decoding's."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import accel
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import AccelError, CaptureError, RecipeError
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.sample.standard import Standard
from accel.runtime.serve.engine import Engine, Request
from accel.runtime.speculation.independent import IndependentFollower
from accel.runtime.tree.chain import Chain
from accel.runtime.tree.eagle_tree import EagleTree
from accel.runtime.tree.static import Static
from accel.runtime.verify.rrs_wor import RrsWor

from ...draft_case import plain, rows_of
from ...heads_case import PROMPTS, as_plain, asked, drafts, llama_in, opened, target_of, texts_of

LAYERS, HEADS, DRAFTED = 3, 4, 40
FORMS = ("authors", "blocks", "own words", "target's words")
PATHS = ((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0), (0, 0, 0, 0), (2,), (2, 0))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model and its directory."""
    return llama_in(tmp_path_factory.mktemp("target"), LAYERS)


def tensors_for(module, form="authors", seed=0):
    """Of heads, by their published names."""
    g, (vocabulary, width) = torch.Generator().manual_seed(seed), size_of(module)
    blocks = 2 if form == "blocks" else 1
    count = DRAFTED if form == "own words" else vocabulary
    found = {}
    for i in range(HEADS):
        for j in range(blocks):
            found[f"{i}.{j}.linear.weight"] = torch.randn(width, width, generator=g) / width**0.5
            found[f"{i}.{j}.linear.bias"] = torch.randn(width, generator=g) / 2
        if form != "target's words":
            found[f"{i}.{blocks}.weight"] = torch.randn(count, width, generator=g)
    if form == "own words":
        ids = torch.randperm(vocabulary, generator=g)[:count].sort().values
        found["d2t"] = ids - torch.arange(count)
    return found


def size_of(module):
    return tuple(module.get_output_embeddings().weight.shape)


def written(folder, tensors, module, form="authors", **more):
    """A folder as the authors publish one, or with all that this project's trainer says."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2 if form == "blocks" else 1}
    if form in ("own words", "target's words"):
        vocabulary, width = size_of(module)
        config |= {"medusa_num_heads": HEADS, "vocab_size": vocabulary, "hidden_size": width}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    if form == "authors":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


@torch.no_grad()
def said(module, tensors, tokens, off=0):
    """The logits [K,V] of heads behind tokens [n], by the paper: W_i (h + SiLU(R_i h + b_i)), h what the output head
    read of the last token that ran. The control: of a slot `off` further.
    """
    h = module.get_decoder()(torch.tensor([tokens])).last_hidden_state[0, len(tokens) - 2 + off]
    blocks = max(int(name.split(".")[1]) for name in tensors if "linear" in name) + 1
    found = []
    for i in range(HEADS):
        x = h
        for j in range(blocks):
            w, b = (tensors[f"{i}.{j}.linear.{part}"] for part in ("weight", "bias"))
            x = x + F.silu(w @ x + b)
        words = tensors.get(f"{i}.{blocks}.weight", module.get_output_embeddings().weight)
        if "d2t" not in tensors:
            found.append(words @ x)
            continue
        whole = torch.full((len(module.get_output_embeddings().weight),), -torch.inf, dtype=h.dtype)
        whole[torch.arange(len(words)) + tensors["d2t"]] = words @ x
        found.append(whole)
    return torch.stack(found)


def chain(module, tensors, tokens, count, **other):
    return said(module, tensors, tokens, **other).argmax(-1)[:count].tolist()


def build(source, path, target="eager", tree="chain", weights="", **more):
    recipe = {
        "draft": {"use": "medusa", "path": str(path), "weights": weights},
        "tree": {"use": tree},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    return accel.optimize(source, recipe, target=target, max_context=64, max_batch=2, **more)


@pytest.fixture(scope="module")
def built(target, tmp_path_factory):
    """The model with heads, and their tensors."""
    module, folder = target
    tensors = tensors_for(module)
    path = written(tmp_path_factory.mktemp("head") / "authors", tensors, module)
    with build(folder, path, tree="static") as model:
        yield model, tensors


@pytest.mark.parametrize("form", FORMS)
def test_heads_say_what_the_formulas_do(target, tmp_path, form):
    module, folder = target
    tensors = tensors_for(module, form)
    path = written(tmp_path, tensors, module, form)
    loaded = head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load()
    head, text = loaded.model, torch.tensor([texts_of(9)[0]])
    for parameter, stored in loaded.stored.items():
        parameter.data = stored.read()
    head, module = head.double(), copy.deepcopy(module).double()
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    with torch.no_grad():
        h = module.get_decoder()(text).last_hidden_state
        found = head.words(head.said(h))[0]
    for n in range(2, 9):
        want = said(module, tensors, text[0, :n].tolist())
        real = want.isfinite()
        torch.testing.assert_close(found[n - 2][real], want[real], atol=1e-5, rtol=1e-5)
        assert (found[n - 2][~real] < found[n - 2][real].min()).all()


VLLM = ("vllm", "vllm, biases", "vllm, few words", "vllm, one head")


def of_vllm(folder, module, form, prefix=""):
    """A folder in vLLM's layout, and what is in it by the authors' names."""
    few, one = form == "vllm, few words", form == "vllm, one head"
    tensors = tensors_for(module, "own words" if few else "target's words" if one else "authors")
    vocabulary, width = size_of(module)
    config = {
        "model_type": "medusa", "hidden_size": width, "vocab_size": vocabulary, "num_heads": HEADS,
        "num_hidden_layers": 1, "truncated_vocab_size": DRAFTED if few else vocabulary,
        "medusa_fc_bias": "biases" in form, "original_lm_head": one,
    }  # fmt: skip
    named = {}
    if few:
        ids = torch.arange(DRAFTED) + tensors["d2t"]
        named["token_map"] = ids
    for name, tensor in tensors.items():
        head, *rest = name.split(".")
        if name == "d2t":
            continue
        if rest[-1] == "bias" and "biases" not in form:
            tensor.zero_()
        elif "linear" in rest:
            named[f"{prefix}blocks.{head}.layers.{rest[0]}.{rest[-1]}"] = tensor
        elif few:  # of all tokens, as a head is trained
            whole = torch.zeros(vocabulary, width)
            whole[ids] = tensor
            named[f"{prefix}lm_heads.{head}.weight"] = whole
        else:
            named[f"{prefix}lm_heads.{head}.weight"] = tensor
    if one:
        words = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(7))
        for i in range(HEADS):
            tensors[f"{i}.1.weight"] = named[f"lm_heads.{i}.weight"] = words
    named[f"{prefix}blocks.{HEADS}.layers.0.weight"] = torch.zeros(3, 3)  # a head more is left out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(named, folder / "pytorch_model.bin")
    return folder, tensors


@pytest.mark.parametrize("form", VLLM)
def test_heads_in_the_layout_of_vllm_say_what_the_formulas_do(target, tmp_path, form):
    """The control: what the heads of another seed say."""
    module, _ = target
    path, tensors = of_vllm(tmp_path, module, form, "medusa_heads." if form == "vllm" else "")
    head = head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load().model
    text = torch.tensor([texts_of(9)[0]])
    with torch.no_grad():
        found = head.words(head.said(module.get_decoder()(text).last_hidden_state))[0]
    want = said(module, tensors, text[0, :8].tolist())
    real = want.isfinite()
    torch.testing.assert_close(found[6][real], want[real], atol=1e-5, rtol=1e-5)
    assert (found[6][~real] < found[6][real].min()).all()
    other = said(module, tensors_for(module, seed=1), text[0, :8].tolist())
    assert not torch.allclose(found[6][real], other[real], atol=1e-2)


def test_wrong_heads_in_the_layout_of_vllm_are_refused(target, tmp_path):
    module, _ = target
    path, _ = of_vllm(tmp_path, module, "vllm")
    named = torch.load(path / "pytorch_model.bin")
    for change, words in (
        ({"lm_heads.2.weight": None}, "lacks 2.1.weight"),
        ({"norm.weight": torch.zeros(3)}, "has norm.weight .1 tensors more"),
        ({"lm_head.weight": torch.zeros(5, 3)}, r"lm_head.weight has size \[5, 3\]"),
        ({"token_map": torch.tensor([2, 2])}, "token_map names a token of the target twice"),
        (
            {"token_map": torch.tensor([2, 101])},
            "token_map names token 101, and the target has 101",
        ),
        ({"token_map": torch.tensor([-1, 2])}, "token_map names token -1, and the target has 101"),
    ):
        changed = {n: t for n, t in {**named, **change}.items() if t is not None}
        torch.save(changed, path / "pytorch_model.bin")
        with pytest.raises(CaptureError, match=words):
            head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load()


def test_a_draft_is_that_of_the_formulas(target, built):
    """Behind a prompt, and behind tokens that came after other drafts; a draft ends where the heads do."""
    (module, _), (model, tensors) = target, built
    texts, rounds = texts_of(20), (8, 9, 14)

    def wanted(**other):
        return [[chain(module, tensors, t[:n], HEADS, **other) for t in texts] for n in rounds]

    assert drafts(model, texts, 9, rounds) == wanted()
    assert drafts(model, texts, 2, rounds) == [[d[:2] for d in ones] for ones in wanted()]
    for off in (-1, 1):
        assert wanted() != wanted(off=off), "the control: features off by one slot"


def test_logits_are_those_of_the_formulas(target, built):
    """To 1e-5, row by row, whichever rows are asked; nothing is cached."""
    (module, _), (model, tensors), texts = target, built, texts_of(12)
    with model.session(2) as session:
        head = model.draft_model.facts.draft_head
        follower = IndependentFollower(model.draft_model, session, 2, head)
        session.prompt(np.array([text[:7] for text in texts]))
        for rows in ((0, 1), (1,), (0,)):
            follower.follow({i: np.array(texts[i][:8]) for i in rows})
            for i in rows:
                want, other = (said(module, tensors, texts[i][:n]).numpy() for n in (8, 7))
                assert np.abs(follower._said[i] - want).max() < 1e-5 * np.abs(want).max()
                assert np.abs(follower._said[i] - other).max() > 0.1
        assert not follower._session.lengths.any() and not follower.kv_bytes
        follower.close()


@pytest.mark.parametrize("shape", [Static(paths=PATHS), EagleTree(nodes=12, top_k=3, depth=9)])
def test_a_tree_has_the_likeliest_of_each_head(target, built, shape):
    """Whatever leads to a node, its children are the best of the head of its depth."""
    (module, _), (model, tensors), (text, _) = target, built, texts_of(12)
    with model.session(1) as session:
        rows = rows_of([text[:8]])
        drafters = opened(model, session, rows, shape)
        session.prompt(np.array([text[:7]]))
        (tree,) = asked(drafters, rows, 0)
        drafters.close()
    scores = said(module, tensors, text[:8]).log_softmax(-1)
    best = scores.argsort(-1, descending=True).tolist()
    paths = {tuple(tree.tokens[list(tree.path(n))].tolist()) for n in range(len(tree))}
    if isinstance(shape, Static):
        assert paths == {tuple(best[d][r] for d, r in enumerate(path)) for path in PATHS}
        return
    worth = {  # of the three best of each head, all paths
        path: sum(float(scores[d, t]) for d, t in enumerate(path))
        for depth in range(1, HEADS + 1)
        for path in itertools.product(*(best[d][:3] for d in range(depth)))
    }
    assert paths == set(sorted(worth, key=lambda path: -worth[path])[:12])


WAYS = [(Chain(), 0.0), (Static(paths=PATHS), 0.0), (Static(paths=PATHS), 0.9)]


@pytest.mark.parametrize(("tree", "temperature"), WAYS)
def test_tokens_are_those_of_plain_decoding(built, tree, temperature):
    assert as_plain(built[0], tree, temperature)


@pytest.mark.few(1)
def test_tokens_are_those_of_plain_decoding_in_an_artifact(target, tmp_path):
    """Which holds the heads in 8 bits; with a guard, which goes by what calls cost, too."""
    module, folder = target
    path = written(tmp_path / "head", tensors_for(module), module)
    with build(folder, path, "onnx", "static", weights="int8", out=tmp_path / "out") as model:
        assert all(as_plain(model, *way) for way in WAYS)
        want = plain(model.session(1), rows_of(PROMPTS[:1], limit=12, max_context=64))
        assert model.costs and model.generate(PROMPTS[0], max_new_tokens=12).tokens == want


def test_sampled_drafts_say_what_they_were_drawn_from(target, built):
    """Which rules that accept by p/q rely on: of each node the law of the head of its depth, whatever leads to it. The
    control: the law of the next head.
    """
    (module, _), (model, tensors), (text, _) = target, built, texts_of(12)
    with model.session(1) as session:
        rows = rows_of([text[:8]], Standard(temperature=0.8))
        drafters = opened(model, session, rows, Static(paths=PATHS), RrsWor())
        session.prompt(np.array([text[:7]]))
        (tree,) = asked(drafters, rows, 0)
        drafters.close()
    laws = (said(module, tensors, text[:8]) / 0.8).softmax(-1).numpy()
    assert len(tree) == len(PATHS) and not tree.replacement
    for node, depth in enumerate(tree.depths.tolist()):
        q = tree.q[tree.rows[node]]
        np.testing.assert_allclose(q, laws[depth - 1, : q.size], atol=1e-5)
        assert np.abs(q - laws[depth % HEADS, : q.size]).max() > 1e-3


def test_rows_join_and_leave(target, built):
    """A row that came with another session drafts as by itself, and one that takes another's place, too."""
    (module, _), (model, tensors), texts, parts = target, built, texts_of(20), []

    def tokens(drafters, rows, *which):
        return [tree.tokens.tolist() for tree in asked(drafters, rows, *which)]

    for text, size in zip(texts, (8, 11), strict=True):
        rows, session = rows_of([text[:size]]), model.session(1)
        drafters = opened(model, session, rows)
        session.prompt(np.array([text[: size - 1]]))
        assert tokens(drafters, rows, 0) == [chain(module, tensors, text[:size], HEADS)]
        parts.append((session, rows, drafters))
    (session, rows, drafters), (other, more, theirs) = parts
    session.join(other)
    rows += more
    drafters.join(theirs)
    assert drafters.joins
    want = [chain(module, tensors, t[:n], HEADS) for t, n in zip(texts, (8, 11), strict=True)]
    assert tokens(drafters, rows, 0, 1) == want
    order = session.leave(0)
    drafters.leave(order)
    rows[:] = [rows[i] for i in order]
    session.run(np.array([texts[1][10:11]]))
    rows[0].accept(texts[1][11], None)
    assert tokens(drafters, rows, 0) == [chain(module, tensors, texts[1][:12], HEADS)]
    drafters.close()
    session.close()


def test_requests_of_a_server_get_what_they_get_alone(built, monkeypatch):
    """Rows join while others draft, and leave."""
    monkeypatch.setattr(CompiledModel, "costs", None)  # nothing weighs whether drafts pay
    (model, _), rng = built, np.random.default_rng(5)
    requests = [
        Request(rng.integers(1, 100, 1 + 4 * i), SamplingParams(max_tokens=4 + 5 * (i % 3), seed=i))
        for i in range(5)
    ]
    want = [model.generate(one.prompt, sampling_params=one.params).tokens[0] for one in requests]
    with Engine(model) as engine:
        tickets = [engine.submit(one) for one in requests]
        assert [[event.token for event in ticket] for ticket in tickets] == want
        assert engine.stats["drafted_total"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("1.0.linear.bias"), "lacks 1.0.linear.bias .1 of 12 tensors"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "has extra .1 tensors more"),
        (lambda t, c: t["2.1.weight"].fill_(torch.nan), "2.1.weight holds numbers"),
        (
            lambda t, c: t.update({"3.0.linear.weight": torch.zeros(3, 3)}),
            "3.0.linear.weight has size",
        ),
        (lambda t, c: t.pop("0.1.weight"), "lacks 0.1.weight, by which its first head"),
        (lambda t, c: c.update(medusa_num_heads=9), "lacks 4.0.linear.bias"),
        (
            lambda t, c: c.update(medusa_num_heads="a"),
            "medusa_num_heads = 'a'; a head needs a whole",
        ),
        (lambda t, c: c.update(medusa_num_layers=-1), "lacks 0.-1.weight"),
        (
            lambda t, c: c.update(vocab_size=90, hidden_size=48),
            "has size .*, and .* by its config.json",
        ),
    ],
)
def test_wrong_heads_are_refused(target, tmp_path, change, words):
    module, folder = target
    tensors, config = tensors_for(module), {}
    change(tensors, config)
    path = written(tmp_path / "head", tensors, module, **config)
    with pytest.raises(CaptureError, match=words):
        head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load()


@pytest.mark.parametrize("holds", [[1], {"0.0.linear.weight": 3}, None])
def test_a_damaged_file_is_refused(target, tmp_path, holds):
    path = written(tmp_path / "head", tensors_for(target[0]), target[0])
    if holds is None:
        (path / "medusa_lm_head.pt").write_bytes(b"cut")
    else:
        torch.save(holds, path / "medusa_lm_head.pt")
    with pytest.raises(CaptureError, match="medusa_lm_head.pt is no file of tensors, or damaged"):
        head_at(path).load()


def test_heads_of_other_targets_are_refused(target, tmp_path):
    module, folder = target
    tensors = tensors_for(module)
    for name in [n for n in tensors if n.endswith(".1.weight")]:
        tensors[name] = tensors[name][:90]
    path = written(tmp_path / "few", tensors, module)
    with pytest.raises(AccelError, match="has 90 tokens and the model 101"):
        build(folder, path).close()
    path = written(
        tmp_path / "narrow",
        {n: t[..., :32] if "weight" in n else t for n, t in tensors_for(module).items()},
        module,
    )
    with pytest.raises(RecipeError, match="reads states of 32 numbers, (?s:.*) train medusa MODEL"):
        build(folder, path).close()
    assert with_draft("base", path).tables["draft"]["use"] == "medusa"


def test_what_drafts_would_have_been(target, built):
    """Of tokens that came without drafts, each from where the one before it ended; then a draft is what it is anyway.
    The control: what the token after says.
    """
    (module, _), (model, tensors) = target, built
    said_after, text = (lambda seen: chain(module, tensors, seen, HEADS)), texts_of(20)[0][:6]
    prompt = list(text)
    for stands in (2, HEADS, 0, 1):
        drafted = said_after(text)
        text += drafted[:stands]
        if stands != 1:  # the last has not ended
            text.append(next(t for t in (3, 4) if t not in drafted[stands : stands + 1]))
    with model.session(1) as session:
        rows = rows_of([prompt])
        drafters = opened(model, session, rows)
        session.prompt(np.array([prompt]))
        session.run(np.array([text[len(prompt) : -1]]))
        for token in text[len(prompt) :]:
            rows[0].accept(token, None)
        assert drafters.probes and drafters.probe([0]) == [(3, 2), (HEADS, HEADS), (1, 0), (1, 1)]
        assert drafters.probe([0]) == [], "it was asked already"
        assert asked(drafters, rows, 0, limit=HEADS)[0].tokens.tolist() == said_after(text)
        drafters.close()
    with model.session(1) as session:
        drafters = opened(model, session, rows)
        session.prompt(np.array([text[:-1]]))
        past = drafters._follower.past
        drafters._follower.past = lambda *given: {
            i: (first + 1, said) for i, (first, said) in past(*given).items()
        }
        assert drafters.probe([0])[:2] != [(3, 2), (HEADS, HEADS)]
        drafters.close()
