"""The tokens that a speech model's decoder starts from, and the texts behind them, against transformers' Whisper."""

import copy
import json
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import accel
from accel import cli
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.capture.encoder import encoder_facts
from accel.ir.encoder import DETECT
from accel.ir.errors import InputError
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.decode.timestamps import Timestamps

# a token above the one for texts without times is a time to transformers
CODES = "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr".split()
LANGUAGES = {f"<|{code}|>": 40 + i for i, code in enumerate(CODES)}
TASKS = {"translate": 96, "transcribe": 97}
FULL = {"lang_to_id": LANGUAGES, "task_to_id": TASKS, "no_timestamps_token_id": 100}
NULL = [[1, None], [2, 97]]
CONFIGS = {
    "full": FULL,
    "language": {**FULL, "language": "french"},
    "task": {**FULL, "task": "translate"},
    "both": {**FULL, "language": "<|de|>", "task": "translate"},
    "null": {**FULL, "forced_decoder_ids": NULL},
    "null and last": {**FULL, "forced_decoder_ids": [[1, None], [2, 97], [3, 100]]},
    "forced": {**FULL, "forced_decoder_ids": [[1, 42], [2, 96], [3, 100]]},
    "old": {"forced_decoder_ids": NULL},
    "old and last": {"forced_decoder_ids": NULL, "no_timestamps_token_id": 100},
    "english": {"no_timestamps_token_id": 100, "forced_decoder_ids": [[1, 100]]},
    "no last": {"lang_to_id": LANGUAGES, "task_to_id": TASKS},
    "no tasks": {"lang_to_id": LANGUAGES, "language": "es"},
    "neither": {},
}


@pytest.fixture(scope="module")
def whisper():
    from transformers import AutoModelForSpeechSeq2Seq

    config = small_config("whisper", encoder_layers=1)
    return randomise(AutoModelForSpeechSeq2Seq.from_config(config), "whisper").eval()


def tell(model, **config):
    """Set what the model's generation configuration says."""
    from transformers import GenerationConfig

    ends = {"eos_token_id": 2, "pad_token_id": 2}
    model.generation_config = GenerationConfig(decoder_start_token_id=1, **ends)
    for name, value in config.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.fixture
def told(whisper):
    """`tell` of the model, whose configuration is as before afterwards."""
    before = whisper.generation_config
    yield partial(tell, whisper)
    whisper.generation_config = before


@pytest.fixture(scope="module")
def artifact(whisper, tmp_path_factory):
    """A build to ONNX, of which all is told."""
    folder = tmp_path_factory.mktemp("whisper") / "artifact"
    build(tell(copy.deepcopy(whisper), **FULL), out=folder).close()
    return folder


def features_of(model, count=3):
    facts = encoder_facts(model, 64, [])
    rng = np.random.default_rng(3)
    return [3 * rng.standard_normal(facts.features, np.float32) for _ in range(count)]


def their_starts(model, sources, language=None, task=None, timed=None):
    """transformers' own first tokens of each source."""
    config = copy.deepcopy(model.generation_config)
    config.return_timestamps = timed
    model._set_language_and_task(language, task, None, config)
    given = torch.tensor(np.stack(sources))
    return model._retrieve_init_tokens(
        given, len(sources), config, model.config, given.shape[-1], {}
    ).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_starts_are_transformers(told, name):
    """With each language and task that may be asked for; what is detected is left open here."""
    config = CONFIGS[name]
    model = told(**config)
    sources = features_of(model, 1)
    facts = encoder_facts(model, 64, notes := [])
    languages = [None, "en", "French", "<|de|>"] if "lang_to_id" in config else [None]
    tasks = [None, "translate", "transcribe"] if "task_to_id" in config else [None]
    times = [None, True, False] if "no_timestamps_token_id" in config else [None]
    for language, task, timed in product(languages, tasks, times):
        (want,) = their_starts(model, sources, language, task, timed)
        if facts.speech is None:
            got = list(facts.start)
        else:
            got = facts.speech.start(language, task, timed)
        assert [w if g == DETECT else g for g, w in zip(got, want, strict=True)] == want
        assert DETECT not in got or want[got.index(DETECT)] in LANGUAGES.values()
    assert not notes


def build(model, **options):
    return accel.optimize(model, max_context=64, max_batch=2, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_texts_are_transformers(told, target, artifact):
    """Detected for each of three inputs, named for all, and named for each."""
    model = told(**FULL)
    sources = features_of(model)
    detected = their_starts(model, sources)
    assert len({start[1] for start in detected}) > 1
    built = accel.load(artifact) if target == "onnx" else build(model, target=target)
    settings = {"max_new_tokens": 5, "repetition_penalty": 2.0}
    each = {"language": ["de", "en", "chinese"], "task": "transcribe"}
    asked = [{}, {"language": "fr"}, {"task": "translate"}, each]
    with built:
        texts = []
        for given in asked:
            got = built.generate(encoder_input=sources, **given, **settings).tokens
            want = model.generate(
                torch.tensor(np.stack(sources)), **given, **settings, do_sample=False, num_beams=1
            ).tolist()
            starts = their_starts(model, sources, **given)
            for ours, theirs, start in zip(got, want, starts, strict=True):
                theirs = theirs[len(start) :] if theirs[: len(start)] == start else theirs
                assert ours == theirs[: len(ours)]
                assert len(ours) == 5 or ours[-1] == 2
            texts.append(got)
        assert len({json.dumps(text) for text in texts}) > 1
        with built.stream(encoder_input=sources[:1], language="fr", **settings) as stream:
            assert list(stream) == texts[1][0]
        ready = built.prepare(None, SamplingParams(max_tokens=5), encoder_input=sources[1])
        assert ready.sample.row.prompt.tolist() == detected[1]  # as an engine takes a request


TIMED = {  # in Whisper's order: text, the end, what a text begins with, times
    "eos_token_id": 50, "pad_token_id": 50, "lang_to_id": {"<|en|>": 51, "<|de|>": 52},
    "task_to_id": {"translate": 53, "transcribe": 54}, "no_timestamps_token_id": 55, "language": "en",
}  # fmt: skip
MORE = [
    {},
    {"max_initial_timestamp_index": 2},
    {"suppress_tokens": [5, 60, 61], "begin_suppress_tokens": [7, 58]},
    {"return_timestamps": True},
]


def their_text(model, source):
    """transformers' text of one pass over one source, with times."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor(source[None]), return_timestamps=True, force_unique_generate_call=True,
            max_new_tokens=12, do_sample=False, num_beams=1,
        )  # fmt: skip
    text = found[0].tolist()
    (start,) = their_starts(model, [source], timed=True)
    return text[len(start) :] if text[: len(start)] == start else text


@pytest.mark.few(1)
@pytest.mark.parametrize("more", MORE, ids=lambda more: ",".join(more) or "plain")
def test_times_are_transformers(told, more):
    model = told(**TIMED, **more)
    sources = features_of(model, 4)
    wanted = [their_text(model, source) for source in sources]
    asked = {} if "return_timestamps" in more else {"timestamps": True}
    with build(model, target="eager") as built:
        found = built.generate(encoder_input=sources, max_new_tokens=12, **asked).tokens
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == theirs[: len(ours)]
            assert len(ours) == 12 or ours[-1] == 50
        assert all(text[0] > 55 for text in found)
        assert any(token < 50 for text in found for token in text)
        plain = built.generate(encoder_input=sources, max_new_tokens=12, timestamps=False)
        assert plain.tokens != found
        with built.stream(encoder_input=sources[:1], max_new_tokens=12, **asked) as stream:
            assert list(stream) == found[0]


def test_times_are_those_of_transformers_rule():
    """Over texts that hold times in any order, and logits of which some rule a token out."""
    from transformers import GenerationConfig, WhisperTimeStampLogitsProcessor

    rng = np.random.default_rng(0)
    for _ in range(300):
        latest = int(rng.integers(0, 9)) if rng.random() < 0.5 else None
        config = GenerationConfig(eos_token_id=18)
        config.no_timestamps_token_id, config.max_initial_timestamp_index = 20, latest
        start, size = int(rng.integers(1, 4)), int(rng.integers(0, 6))
        seen = rng.integers(15, 32, start + size)
        logits = rng.normal(0, rng.choice([0.1, 1, 4]), 32).astype(np.float32)
        logits[rng.integers(0, 32, int(rng.integers(0, 4)))] = -np.inf
        theirs = WhisperTimeStampLogitsProcessor(config, begin_index=start)
        want = theirs(torch.tensor(seen[None]), torch.tensor(logits[None]))[0].numpy()
        Timestamps(21, 18, start, latest).restrict(logits, seen)
        np.testing.assert_array_equal(logits, want)


def test_what_is_refused(told):
    with build(told(**FULL), target="eager") as model:
        source = features_of(told(**FULL), 1)
        for given, words in (
            ({"language": "klingon"}, "language 'klingon'"),
            ({"language": "frnch"}, "french"),
            ({"task": "translat"}, "translate"),
            ({"language": ["en", "fr"]}, "for 1 encoder inputs"),
            ({"language": 5}, "language is 5"),
            ({"timestamps": 1}, "timestamps is 1"),
            ({"language": "en", "prompts": [[1, 40]]}, "is of token ids"),
        ):
            with pytest.raises(InputError, match=words):
                model.generate(encoder_input=source, **given)
    for asked in ({"language": "en"}, {"timestamps": True}):
        with build(told(), target="eager") as model, pytest.raises(InputError, match="names none"):
            model.generate(encoder_input=source, **asked)
    for config, words in (
        ({"lang_to_id": LANGUAGES, "language": "en"}, "names no no_timestamps_token_id"),
        ({"no_timestamps_token_id": 100}, "lacks tokens above no_timestamps_token_id"),
        ({"no_timestamps_token_id": 55, "eos_token_id": []}, "lacks an eos_token_id"),
    ):
        with build(told(**config), target="eager") as model, pytest.raises(InputError, match=words):
            model.generate(encoder_input=source, timestamps=True)


def test_what_a_configuration_says_in_vain_is_noted(told):
    notes = []
    encoder_facts(told(**FULL, language="yo", task="sing"), 64, notes)
    assert [note.split(" of the")[0] for note in notes] == [
        "generate ignores language = 'yo'",
        "generate ignores task = 'sing'",
    ]


def test_the_command_line_takes_language_and_task(whisper, artifact, tmp_path):
    (source,) = features_of(whisper, 1)
    np.save(tmp_path / "x.npy", source)
    with accel.load(artifact) as built:
        asked = {"language": "fr", "task": "translate"}
        want = built.generate(encoder_input=source, max_new_tokens=4, **asked).tokens[0]
    options = ["--input", str(tmp_path / "x.npy"), "--max-new-tokens", "4", "--json"]
    options += ["--language", "fr", "--task", "translate"]
    out = CliRunner().invoke(cli.app, ["run", str(artifact), *options])
    assert json.loads(out.stdout)["tokens"] == want
