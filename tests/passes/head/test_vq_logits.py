"""The head by groups of tokens, against plain PyTorch over the module's own hidden states."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import PassError, RecipeError
from accel.passes.head._codes import codebook, members, of_groups
from accel.passes.head.vq_logits import APART, WIDE

TOKENS = np.random.default_rng(0).integers(0, 90, (2, 24))
ROWS = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))


def built(module, target="eager", **options):
    head = {"use": "vq-logits", "codes": 24, "rerank": 6, "tokens": 5, **options}
    return accel.optimize(
        module, {"head": head}, max_context=64, max_batch=2, target=target, verify=target == "onnx"
    )


def dense(module):
    with torch.no_grad():
        return module(torch.tensor(TOKENS), use_cache=False).logits


def by_groups(module, params, rerank):
    """Logits [B,T,V] by the rule of the docstring, from hidden states before the head."""
    head = module.get_output_embeddings()
    seen = []
    handle = head.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    want = dense(module)
    handle.remove()
    group, codes = params["head.group"], params["head.codes"]
    with torch.no_grad():
        z = seen[0] @ codes.mT + (params["head.level"] if head.bias is not None else 0)
        found = z[..., group]
        if rerank:
            best = (z + APART * params["head.apart"]).topk(rerank).indices
            there = (group[None, None, None] == best[..., None]).any(2)
            found = torch.where(
                there, seen[0] @ head.weight.mT + (0 if head.bias is None else head.bias), found
            )
    return found, want


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "phi"])
@pytest.mark.parametrize("rerank", [0, 6])
def test_logits_are_those_of_the_rule(name, rerank):
    module = models.make(name, 2)
    with built(module, rerank=rerank) as compiled, compiled.session(2) as session:
        found, want = by_groups(module, compiled.program.params, rerank)
        whole = session.run(TOKENS[:, : WIDE + 4])
        expected = want if rerank else found
        assert np.allclose(whole, expected[:, : WIDE + 4], atol=1e-4)
        for end in (WIDE + 5, WIDE + 9):  # one token, and a few
            got = session.run(TOKENS[:, session.length : end])
            assert np.allclose(got, found[:, end - got.shape[1] : end], atol=1e-4)
        assert not np.allclose(got, want[:, end - got.shape[1] : end], atol=1e-2)


def test_odds_of_a_group_and_of_a_token_in_it_are_those_of_the_token():
    """softmax over tokens = softmax over z + log n, evenly within a group."""
    module = models.make("llama", 2)
    with built(module, rerank=0) as compiled:
        found, _ = by_groups(module, compiled.program.params, 0)
        group = compiled.program.params["head.group"]
        sizes = torch.bincount(group, minlength=24)
        first = torch.stack(
            [(group == g).nonzero()[0, 0] if n else torch.tensor(0) for g, n in enumerate(sizes)]
        )
        z = found[..., first] + sizes.log()
        odds = z.softmax(-1)[..., group] / sizes[group]
        assert torch.allclose(odds, found.softmax(-1), atol=1e-6)
        assert not torch.allclose(z.softmax(-1)[..., group], found.softmax(-1), atol=1e-3)


def test_as_many_codes_as_tokens_are_the_head_itself():
    module = models.make("llama", 2)
    with built(module, codes=101) as compiled:
        assert "101 codes are the head itself" in str(compiled.report)
        assert torch.allclose(torch.tensor(compiled.logits(TOKENS)), dense(module), atol=1e-4)


@pytest.mark.long
def test_a_soft_cap_stays_behind_it_and_onnx_is_eager():
    module = models.make("gemma2", 2)
    with built(module, "onnx") as compiled, built(module) as eager:
        with compiled.session(2) as one, eager.session(2) as other:
            for start, end in ((0, 12), (12, 13), (13, 16)):
                assert np.allclose(
                    one.run(TOKENS[:, start:end]), other.run(TOKENS[:, start:end]), atol=1e-4
                )


def test_it_goes_with_weights_of_few_bits_and_drafts_do_not():
    recipe = {
        "head": {"use": "vq-logits", "codes": 24, "rerank": 6, "tokens": 5},
        "weights": {"use": "int8", "smallest": 256},
    }
    with accel.optimize(models.make("llama", 2), recipe, max_context=64) as compiled:
        assert len(compiled.generate(TOKENS[0, :8], 6).tokens[0]) == 6
    recipe = {
        "head": {"use": "vq-logits"},
        "draft": {"use": "prompt-lookup"},
        "verify": {"use": "bit-exact"},
    }
    with pytest.raises(RecipeError):
        accel.optimize(models.make("llama", 2), recipe, max_context=64)


def test_groups_have_room_for_all_and_no_more_than_their_room():
    for count, most in ((10, 30), (10, 35), (17, 18), (300, 1)):
        group = codebook(ROWS, count, most, lambda *_: None)
        sizes = torch.bincount(group, minlength=count)
        assert len(sizes) == count and int(sizes.max()) <= most and int(sizes.sum()) == 300
        table = members(group, count)
        for g in range(count):
            assert (
                set(table[g].tolist()) == set((group == g).nonzero()[:, 0].tolist()) or not sizes[g]
            )
        assert torch.equal(group, codebook(ROWS, count, most, lambda *_: None))


def test_near_rows_are_in_a_group():
    group = codebook(ROWS, 30, 13, lambda *_: None)
    spread = (ROWS - of_groups(ROWS, group, 30)[group]).square().sum()
    chance = group[torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    assert spread < 0.8 * (ROWS - of_groups(ROWS, chance, 30)[chance]).square().sum()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rerank": 25}, PassError, "rerank is 25, but there are 24 codes; give at most 24"),
        ({"codes": -1}, RecipeError, "codes is -1"),
        ({"tokens": 0}, RecipeError, "tokens is 0"),
    ],
)
def test_bad_options_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        built(models.make("llama", 2), **options)
