"""learn2pd: what its network keeps, the ends of its filter, the oracle that it learns from, and what an end cuts."""

import json

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.train import host
from accel.compiler.train.runs import learn2pd as trainer
from accel.compiler.train.train import train
from accel.runtime.loop._canvas import Canvas
from accel.runtime.loop.learn2pd import Learn2pd

from ...diffusion_case import (
    BLOCK,
    NEW,
    Case,
    decoded,
    eager,
    law,
    prompts,
    with_loop,
)
from ...part_case import written


def part(block=32, bias=None):
    """A network, or one that finds all slots, or none, final."""
    rng = np.random.default_rng(block)
    network = {
        name: rng.normal(0, 3, size) for name, size in Learn2pd.sizes(block, 5).items()
    }  # fmt: skip
    if bias is not None:
        network |= {"last": np.zeros((5, block)), "last.bias": np.full(block, bias)}
    return {name: tensor.astype(np.float32) for name, tensor in network.items()}


def filtered(threshold):
    """The published filter, and the surest."""

    def stays(seen):
        network = {name: tensor.astype(np.float64) for name, tensor in part(BLOCK).items()}
        sure = np.where(seen.free, law(seen.logits).max(1), 1)
        sure = [*sure, *[1.0] * (BLOCK - len(seen.free))]
        hidden = np.maximum(0, sure @ network["first"] + network["first.bias"])
        final = 1 / (1 + np.exp(-(hidden @ network["last"] + network["last.bias"]))) > threshold
        return np.flatnonzero(
            seen.free & (final[: len(seen.free)] | (seen.sure == seen.sure.max()))
        )

    return stays


CASES = [Case({"threshold": 0.96}, filtered(0.96)), Case({"threshold": 0.5}, filtered(0.5))]


def ends(tmp_path, bias):
    """Tokens and calls of a filter that keeps all (inf), or nothing."""
    _, compiled = eager(False)
    file = written(compiled, "learn2pd", part(BLOCK, bias), tmp_path / str(bias))
    return decoded(compiled, "learn2pd", prompts(), block=BLOCK, trained=file)


def test_a_filter_of_nothing_is_one_token_per_call_and_of_all_one_call_per_block(tmp_path):
    _, compiled = eager(False)
    plain = decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK)
    assert ends(tmp_path, -1e4) == plain
    tokens, calls, _ = ends(tmp_path, 1e4)
    assert calls == [-(-NEW // BLOCK)] * 2 and tokens != plain[0]


def test_an_oracle_reproduces_the_answer_and_notes_what_was_right():
    _, compiled = eager(True)
    with with_loop(compiled, "dllm-lowconf") as model:
        for prompt in prompts():
            plain = trainer.decoded(model, trainer.DllmLowconf(block=BLOCK), prompt_of(prompt), NEW)
            oracle = trainer.Oracle(block=BLOCK, answer=plain)
            assert (trainer.decoded(model, oracle, prompt_of(prompt), NEW) == plain).all()
            assert len(oracle.calls) < NEW
            sure, right, there = (np.stack(part) for part in zip(*oracle.calls, strict=True))
            assert sure.shape == (len(oracle.calls), BLOCK) and ((sure > 0) & (sure <= 1)).all()
            assert (right <= there).all() and right.sum() < there.sum()
            assert (there[0] == 1).all() and there[-1].sum() < BLOCK

            class Careless(trainer.Oracle):
                def stays(self, guess, place):
                    return slice(None)

            careless = Careless(block=BLOCK, answer=plain)
            assert (trainer.decoded(model, careless, prompt_of(prompt), NEW) != plain).any()


def prompt_of(ids):
    return np.array(ids, np.int64)


def test_what_is_behind_an_end_is_cut_and_what_is_before_stays(monkeypatch):
    """Of each cut: no slot from there on is called again, and what was filled before it is in the answer."""
    _, compiled = eager(False)
    cuts, own = [], Canvas.cut

    def cut(self, i, end):
        start = self.rows[i].prompt.size
        filled = {n: self.ids[i, 0, n] for n in range(start, end) if not self.open[i, n]}
        cuts.append((end - start, {n - start: int(token) for n, token in filled.items()}))
        own(self, i, end)

    monkeypatch.setattr(Canvas, "cut", cut)
    (given,) = prompts()[:1]
    with with_loop(compiled, "learn2pd", block=BLOCK) as made:
        (whole,) = made.generate(given, NEW, eos=[]).tokens
    fewer = 0
    for stop in sorted(set(whole))[:6]:
        found = {}
        for end in ("none", "filled", "guessed"):
            cuts.clear()
            with with_loop(compiled, "learn2pd", block=BLOCK, end=end) as made:
                out = made.generate(given, NEW, eos=[stop])
                both = made.generate(prompts(), NEW, eos=[stop]).tokens
            assert out.tokens[0] == both[0] and out.stats["finish"] == ["eos"]
            found[end] = out.stats["calls"]
            assert bool(cuts) == (end != "none")
        fewer += found["guessed"] < found["none"]
        (length, filled), *_ = [one for one in cuts if one[0] <= NEW]
        answer = both[0] if length >= len(both[0]) else None
        assert answer is not None, "an answer is no longer than what was cut to"
        assert all(answer[n] == token for n, token in filled.items() if n < len(answer))
    assert fewer, "an end spares no call"


def test_a_part_for_blocks_of_another_size_is_refused(tmp_path):
    _, compiled = eager(False)
    file = written(compiled, "learn2pd", part(BLOCK), tmp_path / "part")
    with (
        with_loop(compiled, "learn2pd", block=4, trained=file) as made,
        pytest.raises(accel.InputError, match="block is 4, but.*blocks of 8; give block = 8, or"),
    ):
        made.generate(prompts()[0], 4)


def test_a_model_without_a_part_is_told_how_to_make_one():
    module, _ = eager(False)
    with pytest.raises(
        accel.InputError, match="learn2pd: .*trained for .* model.*accel-compile train learn2pd"
    ):
        accel.optimize(module, "learn2pd", target="eager", max_context=64)


def test_a_network_learns_what_an_oracle_saw():
    """Slots whose guess is right where the model is sure: it learns that, and a shuffled one does not."""
    sure = np.random.default_rng(0).random((400, BLOCK)).astype(np.float32)
    right = torch.from_numpy((sure > 0.6).astype(np.float32))
    x, there = torch.from_numpy(sure), torch.ones(400, BLOCK)

    def learnt(labels):
        network = trainer.begun(Learn2pd.sizes(BLOCK, 16), torch.Generator().manual_seed(0))
        trainer.learn(
            network.values(),
            lambda: trainer.loss(Learn2pd.odds(network, x), labels, there),
            1e-2,
            400,
        )
        return trainer.judged(Learn2pd(), network, x, right, there)

    told, control = learnt(right), learnt(right[torch.randperm(400)])
    assert told["loss"] < 0.5 * told["constant"] < control["loss"]
    assert told["rightly"] > 0.98 and told["final"] > 0.2


@pytest.mark.long
def test_a_part_is_made_by_the_command(tmp_path):
    folder = models.write(tmp_path / "tiny")
    models.llada().save_pretrained(folder)
    file = tmp_path / "tasks"
    file.write_text(
        "".join(json.dumps({"prompt": f"ab {n}", "answer": "c"}) + "\n" for n in range(3))
    )
    recipe = tmp_path / "own.toml"
    recipe.write_text('[loop]\nuse = "learn2pd"\nblock = 4\n')
    out = tmp_path / "part.safetensors"
    made = train(str(recipe), folder, {"tasks": file, "out": out, "inner": 4, "samples": 3})
    assert made.file == out and "final" in made.message
    with accel.optimize(
        folder, {"loop": {"use": "learn2pd", "block": 4, "trained": str(out)}}, max_context=64
    ) as model:
        assert len(model.generate("ab", 9, eos=[]).tokens[0]) == 9


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is empty"),
        ("{}\n", "line 1 of .* is no task"),
        ('{"prompt": "a", "answer": 1}', "no task"),
    ],
)
def test_tasks_that_are_none_are_refused(tmp_path, text, words):
    (tmp_path / "tasks").write_text(text)
    with pytest.raises(accel.InputError, match=f"tasks: .*{words}.*give"):
        host._tasks(tmp_path / "tasks")
