"""Tokens that a generation configuration rules out, against transformers' texts."""

import json

import numpy as np
import pytest
import torch

import accel
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.capture.inspect import inspect
from accel.ir.errors import ArtifactError, InputError
from accel.ir.facts import Facts
from accel.ir.fields import Fields
from accel.ir.suppressed import Suppressed
from accel.runtime.decode.logits_processors import Processed
from accel.runtime.sample.standard import Standard

PROMPTS = [[3, 5, 9, 20, 5, 9], [41, 7, 60]]
NEW = 8


@pytest.fixture(scope="module")
def decoder():
    from transformers import AutoModelForCausalLM

    return randomise(AutoModelForCausalLM.from_config(small_config("llama")), "llama").eval()


def theirs(model, prompt):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return found[0, len(prompt) :].tolist()


def tell(model, **config):
    for name, value in config.items():
        setattr(model.generation_config, name, value)


@pytest.fixture
def told(decoder):
    """The decoder, whose configuration rules out what it would say: everywhere, and as a first token."""
    plain = [theirs(decoder, prompt) for prompt in PROMPTS]
    tell(
        decoder, suppress_tokens=[plain[0][1], plain[1][2], -1], begin_suppress_tokens=[plain[1][0]]
    )
    yield decoder, plain
    tell(decoder, suppress_tokens=None, begin_suppress_tokens=None)


@pytest.mark.parametrize("recipe", ["base", "prompt-lookup"])
@pytest.mark.few(2)
def test_texts_are_transformers(told, recipe, tmp_path):
    model, plain = told
    wanted = [theirs(model, prompt) for prompt in PROMPTS]
    assert wanted != plain
    assert any(plain[1][0] in text[1:] for text in wanted) or wanted[1][0] != plain[1][0]
    folder = tmp_path / "artifact"
    with accel.optimize(model, recipe, max_context=64, max_batch=2, out=folder) as built:
        assert built.generate(PROMPTS, max_new_tokens=NEW, eos=[]).tokens == wanted
    with accel.load(folder) as built:
        assert built.generate(PROMPTS, max_new_tokens=NEW, eos=[]).tokens == wanted
        with built.stream(PROMPTS[1], max_new_tokens=NEW, eos=[]) as stream:
            assert list(stream) == wanted[1]
        drawn = built.generate(PROMPTS[:1], max_new_tokens=40, eos=[], temperature=9.0, seed=1)
        ruled = set(model.generation_config.suppress_tokens)
        assert not ruled & set(drawn.tokens[0])
        bias = {token: 100.0 for token in ruled if token >= 0}
        biased = built.generate(PROMPTS, max_new_tokens=NEW, eos=[], logit_bias=bias)
        assert biased.tokens == wanted


@pytest.mark.long
def test_a_speech_models_texts_are_transformers():
    from transformers import AutoModelForSpeechSeq2Seq, GenerationConfig

    config = small_config("whisper", encoder_layers=1)
    model = randomise(AutoModelForSpeechSeq2Seq.from_config(config), "whisper").eval()
    model.generation_config = GenerationConfig(
        decoder_start_token_id=1, eos_token_id=2, pad_token_id=2, no_timestamps_token_id=100
    )
    frames = 2 * config.max_source_positions
    source = 3 * np.random.default_rng(3).standard_normal((config.num_mel_bins, frames), np.float32)

    def text():
        given = torch.tensor(source[None])
        found = model.generate(given, max_new_tokens=6, do_sample=False)[0].tolist()
        return found[2:] if found[:2] == [1, 100] else found

    plain = text()
    tell(model, suppress_tokens=[plain[1], 5], begin_suppress_tokens=[plain[0], 2])
    with accel.optimize(model, max_context=64, target="eager") as built:
        found = built.generate(encoder_input=[source], max_new_tokens=6).tokens[0]
    assert found == text()[: len(found)]
    assert len(found) == 6 or found[-1] == 2
    assert found[0] != plain[0]


def test_where_no_token_is_left():
    ruled = Processed(Standard(0.0), 4, suppressed=Suppressed((0, 1, 2, 3)))
    with pytest.raises(InputError, match="generation configuration suppresses"):
        ruled.distribution(np.zeros(4, np.float32), np.zeros(1, np.int64))


def test_the_first_token_is_behind_the_prompt():
    logits, sampler = np.arange(6, dtype=np.float32), Standard(0.0)
    ruled = Processed(sampler, 6, suppressed=Suppressed((5,), (4, 3)), start=2)
    assert [
        int(ruled.distribution(logits, np.zeros(n, np.int64)).tokens[0]) for n in (1, 2, 3)
    ] == [4, 2, 4]
    unknown = Processed(sampler, 6, suppressed=Suppressed((5,), (4,)))
    assert int(unknown.distribution(logits, np.zeros(2, np.int64)).tokens[0]) == 4


def test_what_lies_outside_a_vocabulary():
    assert Suppressed((-1, 70), (70,)).below(64) is None
    assert Suppressed((70, 3), (70,)).below(64) == Suppressed((3,))
    facts = Facts("Toy", 50, 128, suppressed=Suppressed((3,), (50,)))
    raw = json.loads(json.dumps(facts.to_json()))
    with pytest.raises(ArtifactError, match=r"suppressed.first\[0\] is 50"):
        Facts.from_json(Fields(raw, "model"))


def test_what_a_decoder_asks_for_in_vain_is_noted(decoder):
    tell(decoder, no_repeat_ngram_size=3, num_beams=1)
    notes = inspect(decoder, 64).notes
    tell(decoder, no_repeat_ngram_size=None, num_beams=None)
    assert notes == ("generate ignores no_repeat_ngram_size of the generation's configuration",)
