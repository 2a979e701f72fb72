"""ut5: texts are those of plain rewriting, call by call."""

import numpy as np
import pytest
import torch

import accel
from accel.ir.errors import InputError, RecipeError

from ...both_ways_case import SOURCES, START, built, graphs, rewriter
from ...diffusion_case import MASK, eager, prompts

NEW = 9


@torch.no_grad()
def logits(source, ids):
    """[n,V] behind the start token."""
    out = rewriter()(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids]))
    return out.logits[0, 1:].double().log_softmax(1)


def plain(source, steps, starts=1, seed=0, new=NEW):
    """The text [n] and the calls until it no longer changed, or all."""
    rng = np.random.default_rng(seed)
    found = []
    for one in [rng, *rng.spawn(starts - 1)]:
        text = one.integers(0, rewriter().config.vocab_size, new).tolist()
        before, call = None, 0
        while text != before and call < steps:
            given = logits(source, [START, *text])
            before, text, call = text, given.argmax(1).tolist(), call + 1
        found.append((float(given.max(1).values.sum()), text, call))
    return max(found)[1], max(call for *_, call in found)


def law_text(steps, starts, rewritten=plain):
    model = built("ut5", steps=steps, starts=starts)
    for source in SOURCES:
        out = model.generate(encoder_input=[source], eos=[], max_new_tokens=NEW, seed=4)
        want, calls = rewritten(source, steps, starts, 4)
        assert out.tokens == [want]
        assert out.stats["calls"] == 1 + calls  # that of the encoder, too


@pytest.mark.parametrize("steps, starts", [(1, 1), (2, 1), (6, 1), (2, 3)])
def test_a_text_is_that_of_plain_rewriting(steps, starts):
    law_text(steps, starts)


@pytest.mark.long
def test_an_artifact_rewrites_as_the_eager_target(tmp_path):
    said = {"encoder_input": SOURCES, "max_new_tokens": NEW, "eos": [], "seed": 1}
    built("ut5", "onnx").save(tmp_path / "artifact")
    with accel.load(tmp_path / "artifact") as loaded:
        assert loaded.generate(**said).tokens == built("ut5").generate(**said).tokens


def test_a_text_that_is_not_rewritten_is_seen():
    """The control: what one call less gives."""
    with pytest.raises(AssertionError):
        law_text(2, 1, lambda source, steps, *rest: plain(source, steps - 1, *rest))


def test_a_fixed_point_stays():
    """More steps give the same text where a call changed nothing, and take no more calls."""
    few, many = (built("ut5", steps=n) for n in (64, 1024))
    given = {"encoder_input": SOURCES[:1], "max_new_tokens": 3, "eos": [], "seed": 0}
    one, other = few.generate(**given), many.generate(**given)
    text, calls = plain(SOURCES[0], 64, seed=0, new=3)
    assert calls < 64, "it has no fixed point: take another seed"
    assert one.tokens == other.tokens == [text]
    assert one.stats["calls"] == other.stats["calls"] == 1 + calls


def test_it_also_rewrites_what_fills_masks_and_never_writes_the_mask():
    module, _ = eager(False)
    compiled = accel.optimize(module, {"loop": {"use": "ut5", "steps": 2}}, target="eager")
    out = compiled.generate(prompts()[0], max_new_tokens=7, eos=[])
    assert len(out.tokens[0]) == 7 and MASK not in out.tokens[0] and out.stats["calls"] == 2


def test_a_temperature_draws_tokens_and_the_seed_tells_which():
    model = built("ut5", steps=2, starts=1)
    given = {"encoder_input": SOURCES, "max_new_tokens": NEW, "temperature": 1.0, "eos": []}
    one, again, other = (model.generate(**given, seed=n).tokens for n in (1, 1, 2))
    assert one == again != other


def test_what_is_refused():
    model = built("ut5")
    for options, words in (
        ({"logprobs": 1}, "logprobs"),
        ({"max_new_tokens": 0}, "at least 1|1 or more"),
    ):
        with pytest.raises(InputError, match=words):
            model.generate(encoder_input=SOURCES[:1], **options)
    with pytest.raises(
        RecipeError, match="loop = ut5.*attends only to earlier tokens|no mask token"
    ):
        accel.optimize("api/reference", {"loop": {"use": "ut5"}}, target="eager")
    with pytest.raises(RecipeError, match="gives a graph of tokens; give loop = da-transformer"):
        accel.optimize(graphs(), {"loop": {"use": "ut5"}}, target="eager", max_context=40)
    with pytest.raises(RecipeError, match="has no mask token.*give loop = ut5"):
        accel.optimize(rewriter(), {"loop": {"use": "prophet"}}, target="eager", max_context=40)
    with pytest.raises(RecipeError, match="one of ut5"):
        accel.optimize(rewriter(), "base", target="eager", max_context=40)
