"""draft = bpd: a draft is that of the paper's formulas, tokens are plain decoding's, and a relaxed rule takes what is
among the best; its lattice is rescored.
"""

import json

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import accel
from accel.compiler.load.heads._folder import head_at
from accel.ir.errors import CaptureError, RecipeError
from accel.runtime.sample.standard import Standard
from accel.runtime.tree.bpd_rescore import BpdRescore
from accel.runtime.tree.chain import Chain
from accel.runtime.verify import Chance, Target
from accel.runtime.verify.top_beta import TopBeta

from ...draft_case import rows_of
from ...heads_case import as_plain, asked, drafts, opened, texts_of

LAYERS, HEADS, INNER, DRAFTED = 3, 4, 20, 40


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(3)
    return models.make("llama", LAYERS).eval()


def tensors_for(module):
    g, (vocabulary, width) = torch.Generator().manual_seed(0), module.lm_head.weight.shape
    ids = torch.randperm(vocabulary, generator=g)[:DRAFTED].sort().values
    return {
        "hidden.weight": torch.randn(HEADS * INNER, width, generator=g) / width**0.5,
        "hidden.bias": torch.randn(HEADS * INNER, generator=g),
        "output.weight": 2 * torch.randn(HEADS * width, HEADS * INNER, generator=g) / INNER**0.5,
        "output.bias": torch.randn(HEADS * width, generator=g),
        "norm.weight": 1 + 0.2 * torch.randn(width, generator=g),
        "norm.bias": 0.2 * torch.randn(width, generator=g),
        "lm_head.weight": module.lm_head.weight.detach()[ids].clone(),
        "d2t": ids - torch.arange(DRAFTED),
    }


def written(folder, module, tensors, **more):
    vocabulary, width = module.lm_head.weight.shape
    config = {"bpd_num_heads": HEADS, "bpd_inner_size": INNER}
    config |= {"vocab_size": vocabulary, "hidden_size": width, **more}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def build(module, path, **more):
    recipe = {"draft": {"use": "bpd", "path": str(path), "weights": ""}, **more}
    return accel.optimize(module, recipe, target="eager", max_context=64, max_batch=2)


@pytest.fixture(scope="module")
def built(module, tmp_path_factory):
    tensors = tensors_for(module)
    path = written(tmp_path_factory.mktemp("head") / "head", module, tensors)
    rescored = {"tree": {"use": "bpd-rescore"}, "verify": {"use": "sample-match"}}
    with build(module, path, **rescored) as model:
        yield model, tensors


@torch.no_grad()
def said(module, t, tokens, off=0):
    """The logits [K,V] of heads behind tokens [n]: of the decoder's output h for the last that ran, the words of
    norm(h + u_i), all u of W2 relu(W1 h). The control: of a slot `off` further.
    """
    h = module.get_decoder()(torch.tensor([tokens])).last_hidden_state[0, len(tokens) - 2 + off]
    u = t["output.weight"] @ F.relu(t["hidden.weight"] @ h + t["hidden.bias"]) + t["output.bias"]
    found = torch.full((HEADS, len(module.lm_head.weight)), -torch.inf)
    for i, one in enumerate(u.view(HEADS, -1)):
        x = h + one
        x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * t["norm.weight"] + t["norm.bias"]
        found[i, torch.arange(DRAFTED) + t["d2t"]] = t["lm_head.weight"] @ x
    return found


def test_heads_say_what_the_formulas_do(module, tmp_path):
    tensors, text = tensors_for(module), torch.tensor([texts_of(9)[0]])
    head = head_at(written(tmp_path / "head", module, tensors)).load().model
    with torch.no_grad():
        found = head.words(head.said(module.get_decoder()(text).last_hidden_state))[0]
    for n in range(2, 9):
        want = said(module, tensors, text[0, :n].tolist())
        real = want.isfinite()
        torch.testing.assert_close(found[n - 2][real], want[real], atol=1e-5, rtol=1e-5)


def test_a_draft_is_that_of_the_formulas(module, built):
    (model, tensors), texts, rounds = built, texts_of(20), (8, 9, 14)

    def wanted(**other):
        heads = [[said(module, tensors, t[:n], **other) for t in texts] for n in rounds]
        return [[one.argmax(-1).tolist() for one in ones] for ones in heads]

    assert drafts(model, texts, 9, rounds) == wanted()
    for off in (-1, 1):
        assert wanted() != wanted(off=off), "the control: features off by one slot"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", [Chain(), BpdRescore(), BpdRescore(paths=1)])
def test_tokens_are_those_of_plain_decoding(built, tree, temperature):
    assert as_plain(built[0], tree, temperature)


def test_a_relaxed_rule_with_one_token_is_exact(built):
    assert as_plain(built[0], Chain(), 0.0, TopBeta(beta=1, tau=1000.0))
    assert not as_plain(built[0], Chain(), 0.0, TopBeta(beta=60, tau=1000.0)), "the control"


@pytest.mark.parametrize("beta", [1, 2, 5])
def test_a_relaxed_rule_takes_the_best(beta):
    """Of the paper: the longest beginning of a block whose tokens are each among the r best."""
    rng = np.random.default_rng(beta)
    from accel.runtime.tree import Tree

    for _ in range(40):
        logits = rng.normal(size=(5, 9)).astype(np.float32)
        block = np.argsort(-logits[:4], 1)[np.arange(4), rng.integers(0, 3, 4)]
        ranks = [(logits[i] > logits[i, t]).sum() for i, t in enumerate(block)]
        stands = next((i for i, rank in enumerate(ranks) if rank >= beta), 4)
        target = Target(Tree.chain(block), logits, np.array([0]), Standard())
        verdict = TopBeta(beta=beta, tau=1000.0).judge(target, Chance(rng))
        assert verdict.path == tuple(range(stands))
        assert verdict.token == logits[stands].argmax()


def test_a_lattice_without_ngrams_is_the_chain_of_the_heads(module, built):
    (model, tensors), (text, _) = built, texts_of(12)
    with model.session(1) as session:
        rows = rows_of([text[:8]])
        drafters = opened(model, session, rows, BpdRescore(alpha=0.0, paths=1))
        session.prompt(np.array([text[:7]]))
        (tree,) = asked(drafters, rows, 0)
        drafters.close()
    assert tree.tokens.tolist() == said(module, tensors, text[:8]).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("norm.bias"), "lacks norm.bias .1 of 7 tensors"),
        (lambda t, c: t.pop("d2t"), "lm_head.weight has size .*, and .* by its config.json"),
        (
            lambda t, c: c.update(bpd_inner_size=0),
            "bpd_inner_size = 0; a head needs a whole number",
        ),
        (lambda t, c: c.update(bpd_num_heads=3), "has size .*, and .* by its config.json"),
        (lambda t, c: t["hidden.bias"].fill_(torch.nan), "hidden.bias holds numbers"),
    ],
)
def test_wrong_heads_are_refused(module, tmp_path, change, words):
    tensors, config = tensors_for(module), {}
    change(tensors, config)
    path = written(tmp_path / "head", module, tensors, **config)
    with pytest.raises(CaptureError, match=words):
        head_at(path).load()


def test_another_drafters_head_is_refused(module, tmp_path):
    path = written(tmp_path / "head", module, tensors_for(module))
    recipe = {"draft": {"use": "medusa", "path": str(path), "weights": ""}}
    with pytest.raises(RecipeError, match="use draft = bpd for it"):
        accel.optimize(module, recipe, target="eager", max_context=64, max_batch=1)
