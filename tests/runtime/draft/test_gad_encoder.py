"""gad for encoder-decoders: the drafter reads the source by its own encoder, and the whole text again in each call."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

import accel
from accel.compiler import draft_build
from accel.compiler.assemble import assemble
from accel.compiler.load.source import Folder
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.encoder import EncoderFacts
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.draft import gad as module_of_gad

from ...both_ways_case import LONGEST, SOURCES, START

MASK, NEW, BLOCK = 4, 12, 5


@cache
def target():
    from transformers import AutoModelForSeq2SeqLM

    module = randomise(AutoModelForSeq2SeqLM.from_config(small_config("t5")), "t5").eval()
    module.generation_config.decoder_start_token_id = START
    return module


@cache
def filler():
    """A model of the target's weights whose decoder sees both ways, and fills masks."""
    from transformers import AutoModelForSeq2SeqLM

    module = AutoModelForSeq2SeqLM.from_config(small_config("t5")).eval()
    module.load_state_dict(target().state_dict())
    module.decoder.config.is_causal = False
    module.generation_config.decoder_start_token_id = START
    module.config.mask_token_id = MASK
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An artifact of it."""
    out = tmp_path_factory.mktemp("filler")
    recipe = {"loop": {"use": "dllm-lowconf"}}
    with accel.optimize(
        filler(), recipe, max_context=LONGEST, max_batch=3, verify=False
    ) as compiled:
        compiled.save(out / "artifact")
    return out / "artifact"


def recipe(path, **draft):
    return {
        "draft": {"use": "gad", "path": str(path), **draft},
        "length": {"use": "fixed", "tokens": BLOCK},
        "verify": {"use": "sample-match"},
    }


def built(path, **draft):
    return accel.optimize(
        target(), recipe(path, **draft), target="eager", max_context=LONGEST, max_batch=3
    )


@torch.no_grad()
def block(source, seen, size):
    """The likeliest token of each mask behind a text, by the module."""
    ids = [*seen, *[MASK] * size]
    out = filler()(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits
    logits = out[0, len(seen) :].clone()
    logits[:, MASK] = -torch.inf
    return logits.argmax(1).tolist()


def law(path, monkeypatch, sources=SOURCES):
    """Every block that was drafted is what the module fills; the tokens are those of plain decoding."""
    drafted, draft = [], module_of_gad._Blocks.draft

    def noted(self, limits, more):
        seen = {i: self._rows[i].seen.tolist() for i in limits}
        trees = draft(self, limits, more)
        drafted.extend((i, seen[i], tree.tokens.tolist()) for i, tree in trees.items())
        return trees

    monkeypatch.setattr(module_of_gad._Blocks, "draft", noted)
    given = {"encoder_input": SOURCES, "max_new_tokens": NEW, "eos": []}
    with built(path) as model:
        out = model.generate(**given)
    with accel.optimize(target(), target="eager", max_context=LONGEST, max_batch=3) as plain:
        assert out.tokens == plain.generate(**given).tokens
    assert {i for i, *_ in drafted} == {0, 1, 2} and len(drafted) >= 6
    for i, seen, tokens in drafted:
        assert tokens == block(sources[i], seen, len(tokens))


def test_a_block_is_what_the_module_fills_of_the_same_source(folder, monkeypatch):
    law(folder, monkeypatch)


def test_blocks_of_another_source_are_seen(folder, monkeypatch):
    with pytest.raises(AssertionError):
        law(folder, monkeypatch, [*SOURCES[1:], SOURCES[0]])


def test_samples_of_one_source_are_drafted_for(folder):
    """Three rows of one source; seeded tokens are those of plain decoding."""
    given = {"encoder_input": SOURCES[:1], "max_new_tokens": NEW, "eos": [], "n": 3, "seed": 2}
    with (
        built(folder) as model,
        accel.optimize(target(), target="eager", max_context=LONGEST, max_batch=3) as plain,
    ):
        found = model.generate(**given, temperature=0.8).tokens
        assert found == plain.generate(**given, temperature=0.8).tokens
        assert len({tuple(row) for row in found}) > 1


def facts(mask=MASK, **encoder):
    """Of a drafter, as far as the build looks at it."""
    return SimpleNamespace(
        diffusion=SimpleNamespace(mask=mask),
        draft_head=None,
        encoder=EncoderFacts(**{"vocab_size": 90, "max_length": 32, **encoder}),
        max_batch=8,
        vocab_size=90,
    )


@pytest.mark.parametrize(
    ("draft", "other", "why"),
    [
        (facts(None), facts(), "has no token that stands for what is to be filled; set mask_token_id"),
        (facts(), SimpleNamespace(encoder=None), "the model has none whose source it could read"),
        (facts(vocab_size=80), facts(), "reads 80 tokens, and the model's 90 tokens"),
        (facts(features=(3, 7)), facts(), r"reads features \[3, 7\], and the model's 90 tokens"),
        (facts(max_length=16), facts(), "takes 16 tokens, and the model's 32; build it with max_context=32"),
    ],
)  # fmt: skip
def test_a_drafter_that_cannot_read_the_source_is_refused(tmp_path, draft, other, why):
    plan = assemble(Recipe(tables={"draft": {"use": "gad"}}))
    with pytest.raises(RecipeError, match=rf"draft\.gad: .*{why}"):
        draft_build._check(plan, Folder(tmp_path), other, None, draft)


def test_an_encoder_decoder_does_not_draft_token_by_token(tmp_path):
    plan, one = assemble(Recipe(tables={"draft": {"use": "model"}})), facts()
    one.diffusion = None
    with pytest.raises(RecipeError, match="has an encoder; a model that drafts token by token"):
        draft_build._check(plan, Folder(tmp_path), facts(), None, one)
