"""The bundled masked-diffusion model: it loads by its path, answers, and every loop decodes it."""

import dataclasses
import random

import numpy as np
import pytest
import reference_data
from typer.testing import CliRunner

import accel
from accel import cli
from accel.reference import tasks
from accel.runtime.canvas.dllm_blockcache import DllmBlockcache
from accel.runtime.canvas.whole import Whole
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.loop.dllm_lowconf import DllmLowconf
from accel.runtime.loop.dllm_threshold import DllmThreshold
from accel.runtime.loop.freedave import Freedave
from accel.runtime.sample.standard import Standard

FOLDER = reference_data.REFERENCE / "diffusion"
NEW = 16
WHOLE = Whole()


@pytest.fixture(scope="module")
def model():
    with accel.optimize(
        FOLDER,
        {"loop": {"use": "dllm-threshold", "block": NEW}, "canvas": {"use": "dllm-blockcache"}},
        max_context=256,
    ) as compiled:
        yield compiled


def asked(seed, task="key_value"):
    return tasks.make(task, random.Random(f"a test {task} {seed}"), 70)


def decoded(model, loop, prompt, canvas=WHOLE):
    """New tokens and calls."""
    ids = np.array(model.tokenizer.encode(prompt))
    with model.session() as session:
        row = Row(
            ids,
            Standard(),
            np.random.default_rng(0),
            limit=NEW,
            max_context=256,
            eos=model.facts.eos,
        )
        list(loop.tokens(session, [row], DecodeContext(methods={"canvas": canvas})))
        return row.tokens, int(session.stats["calls"])


@pytest.mark.long
def test_what_it_is(model):
    assert dataclasses.asdict(model.facts.diffusion) == {"mask": reference_data.PAD, "shift": True}
    assert model.tokenizer is not None and (FOLDER / "model.safetensors").stat().st_size < 13e6
    assert (
        FOLDER.joinpath("tokenizer.json").read_bytes()
        == (FOLDER.parent / "tokenizer.json").read_bytes()
    )


def test_it_answers_in_few_calls(model):
    """And one token per call takes as many as the block has."""
    right = calls = 0
    for seed in range(6):
        prompt, answer = asked(seed)
        out = model.generate(prompt, max_new_tokens=NEW)
        right += out.text[0].removesuffix("<|eos|>") == answer
        calls += out.stats["calls"]
    assert right >= 4 and calls <= 6 * 5
    prompt, answer = asked(0)
    tokens, most = decoded(model, DllmLowconf(block=NEW), prompt)
    assert (
        most > 2 * len(tokens) and model.tokenizer.decode(tokens).removesuffix("<|eos|>") == answer
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("canvas", [WHOLE, DllmBlockcache()], ids=["whole", "dual"])
def test_freedave_is_one_token_per_call(model, canvas):
    saved = others = 0
    for prompt in (asked(0, "copy")[0], asked(1)[0], "def total(items):\n    result ="):
        want, most = decoded(model, DllmLowconf(block=NEW), prompt, canvas)
        got, calls = decoded(model, Freedave(block=NEW), prompt, canvas)
        assert got == want
        saved += most - calls
        others += decoded(model, DllmThreshold(block=NEW, threshold=0.0), prompt)[0] != want
    assert saved > 0 and others > 0, "all at once would do as well: the comparison says nothing"


def test_nothing_comes_after_a_stop_string(model):
    prompt, answer = asked(0)
    first, second, _ = answer.split()
    out = model.generate(prompt, max_new_tokens=NEW, stop=" " + second)
    assert (
        out.text[0] == " " + first and out.stats["finish"] == ["stop"] and len(out.tokens[0]) == 2
    )


@pytest.mark.long
def test_the_command_line(model):
    prompt, answer = asked(0)
    call = ["run", str(model.artifact.path), "--prompt", prompt, "--max-new-tokens", str(NEW)]
    result = CliRunner().invoke(cli.app, call)
    assert result.exit_code == 0 and answer in result.stdout
    result = CliRunner().invoke(cli.app, ["run", str(FOLDER), "--prompt", prompt])
    assert result.exit_code != 0 and "is a masked-diffusion model" in result.stderr
