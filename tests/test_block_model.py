"""The bundled block-diffusion model: it loads by its path, answers in few calls, and is a causal model besides."""

import dataclasses
import random

import pytest
import reference_data
from typer.testing import CliRunner

import accel
from accel import cli
from accel.ir.errors import RecipeError
from accel.reference import tasks

FOLDER = reference_data.REFERENCE / "blocks"
NEW = 16


@pytest.fixture(scope="module")
def model():
    with accel.optimize(FOLDER, {"loop": {"use": "nbdiff", "block": 8}}, max_context=256) as built:
        yield built


def asked(seed, task="key_value"):
    return tasks.make(task, random.Random(f"a test {task} {seed}"), 70)


@pytest.mark.long
def test_what_it_is(model):
    assert dataclasses.asdict(model.facts.blocks) == {"mask": reference_data.PAD, "size": 16}
    assert model.facts.diffusion is None
    assert (FOLDER / "model.safetensors").stat().st_size < 13e6
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert FOLDER.joinpath(name).read_bytes() == (FOLDER.parent / name).read_bytes()


def test_it_answers_in_fewer_calls_than_tokens(model):
    right = calls = tokens = 0
    for seed in range(6):
        prompt, answer = asked(seed, "copy")
        out = model.generate(prompt, max_new_tokens=NEW)
        text = out.text[0].removesuffix("<|eos|>")
        right += text.startswith(answer)
        calls += out.stats["calls"]
        tokens += len(out.tokens[0])
    assert right >= 4 and calls < 0.7 * tokens


def test_what_asks_for_tokens_in_order_is_refused(model):
    with pytest.raises(accel.InputError, match="logprobs: this model fills masks"):
        model.generate("x", max_new_tokens=4, logprobs=1)


def test_other_models_are_refused():
    with pytest.raises(RecipeError, match="not trained to fill blocks .* config.block_size"):
        accel.optimize(FOLDER.parent, "sbd", max_context=64, verify=False)


@pytest.mark.long
def test_the_command_line(model):
    prompt, answer = asked(0)
    call = ["run", str(model.artifact.path), "--prompt", prompt, "--max-new-tokens", str(NEW)]
    result = CliRunner().invoke(cli.app, call)
    assert result.exit_code == 0 and answer in result.stdout
