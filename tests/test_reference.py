"""The bundled model: it loads, keeps its limits, and has learnt; its tasks are what they say."""

import json
import math
import random

import pytest
import reference_data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from accel.reference import tasks

FOLDER = reference_data.REFERENCE


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_limits(model, tokenizer):
    config = model.config
    assert isinstance(model, LlamaForCausalLM)
    assert 6e6 <= model.num_parameters() <= 12e6
    assert (FOLDER / "model.safetensors").stat().st_size <= 25e6
    assert 8 <= config.num_hidden_layers <= 12
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.max_position_embeddings == 2048 and config.tie_word_embeddings
    assert len(tokenizer) == config.vocab_size == 4096
    assert tokenizer.bos_token_id == config.bos_token_id
    assert tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.pad_token_id == config.pad_token_id


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_digits_stand_alone(tokenizer):
    ids = tokenizer("x = 4821", add_special_tokens=False).input_ids
    assert [tokenizer.decode(token) for token in ids[-4:]] == list("4821")


def test_prompts_begin_with_bos(tokenizer):
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("task", tasks.TASKS)
def test_tasks_follow_the_seed(task):
    first, again, other = (tasks.make(task, random.Random(seed), 300) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("length", [100, 250, 500, 1000, 1500])
def test_task_lengths(tokenizer, task, length):
    prompt, answer = tasks.make(task, random.Random(length), length)
    start = tokenizer(prompt).input_ids
    assert abs(len(start) - length) <= 20
    joint = tokenizer(prompt + answer).input_ids
    assert joint == start + tokenizer(answer, add_special_tokens=False).input_ids


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_in_the_prompt(seed):
    rng = random.Random(seed)
    for task in ("pass_key", "key_value", "copy"):
        prompt, answer = tasks.make(task, rng, 200)
        cue = prompt.rsplit("\n", 1)[1]
        assert cue + answer in prompt.splitlines(), task
    prompt, answer = tasks.make("edit", rng, 200)
    *body, title, cue = prompt.splitlines()
    old, new = title.removeprefix("# copy, ").split(" becomes ")
    words = (cue + answer).split()
    assert " ".join(old if word == new else word for word in words) in body


@pytest.mark.parametrize("task", tasks.TASKS)
def test_further_answers_follow_the_first(task):
    pieces = tasks.TASKS[task](random.Random(3), 12, 4)
    assert sum(is_answer for _, is_answer in pieces) == 4
    assert not pieces[0][1]


def held_out_perplexity(model, tokenizer):
    _, texts = reference_data.sources()
    ids = tokenizer(texts[0], return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        return math.exp(model(ids, labels=ids).loss)


@pytest.mark.long
def test_held_out_code_is_not_news(model, tokenizer):
    """The bound is far above the measured figure, and far below what an untrained model gives."""
    torch.manual_seed(0)
    untrained = LlamaForCausalLM(model.config).eval()
    assert held_out_perplexity(model, tokenizer) < 150 < held_out_perplexity(untrained, tokenizer)


def recalled(model, tokenizer, task):
    """How many of six prompts of 250 tokens greedy decoding answers exactly."""
    count = 0
    for seed in range(6):
        prompt, answer = tasks.make(task, random.Random(seed), 250)
        start = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = tokenizer(answer, add_special_tokens=False).input_ids
        out = model.generate(start, max_new_tokens=len(wanted), do_sample=False)
        count += out[0, start.shape[1] :].tolist() == wanted
    return count


@pytest.mark.parametrize("task", ["key_value", "copy"])
def test_recall(model, tokenizer, task):
    assert recalled(model, tokenizer, task) >= 4


def test_the_readme_reports_this_model():
    evaluation = json.loads((FOLDER / "evaluation.json").read_text())
    trained = json.loads((FOLDER / "training.json").read_text())["trained"]
    readme = (FOLDER / "README.md").read_text()
    assert f"**{evaluation['held_out']['perplexity']}**" in readme
    assert f"{trained['tokens'] / 1e6:.2f} M tokens in {trained['step']} steps" in readme
