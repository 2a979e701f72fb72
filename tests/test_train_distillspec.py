"""Draft models that are tuned to their target: divergences, text of their own, what is saved, what is refused."""

import json
import shutil

import models
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import accel
from accel.compiler.load.shards import read_shards
from accel.compiler.train.divergences import DIVERGENCES, stands
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.distillspec import DistillRun, DistillSpec
from accel.compiler.train.source import Source
from accel.compiler.train.train import train
from accel.ir.errors import InputError, RecipeError
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import Tree
from accel.runtime.verify import Chance, Target
from accel.runtime.verify.spec_chain import SpecChain

VOCAB = 101


def logits(count, seed, spread=2.0):
    return spread * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


def kl(p, q):
    """KL(p, q) of probabilities [N,V], by torch."""
    return F.kl_div(q.log(), p, reduction="none").sum(-1)


# Divergences


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_divergences_are_the_papers(beta):
    p, q = logits(6, 0), logits(6, 1)
    a, b = p.softmax(-1), q.softmax(-1)
    m = beta * a + (1 - beta) * b
    want = {
        "forward-kl": kl(a, b),
        "reverse-kl": kl(b, a),
        "jsd": beta * kl(a, m) + (1 - beta) * kl(b, m),
        "tvd": (a - b).abs().sum(-1) / 2,
    }
    assert want.keys() == DIVERGENCES.keys()
    for name, expected in want.items():
        found = DIVERGENCES[name](p, q, beta)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (found > 0).all() and DIVERGENCES[name](p, p, beta).abs().max() < 1e-5
    assert (want["forward-kl"] - want["reverse-kl"]).abs().min() > 1e-3  # they are four
    torch.testing.assert_close(stands(p, q), 1 - want["tvd"])


def test_jsd_is_near_the_two_kls_at_its_ends():
    p, q = logits(6, 2, 1.0), logits(6, 3, 1.0)
    for beta, name in ((1e-4, "forward-kl"), (1 - 1e-4, "reverse-kl")):
        found = DIVERGENCES["jsd"](p.double(), q.double(), beta) / min(beta, 1 - beta)
        torch.testing.assert_close(
            found, DIVERGENCES[name](p.double(), q.double(), 0.5), rtol=0.01, atol=0
        )


def test_what_stands_is_what_the_rule_accepts():
    """The control: another draft model."""
    p, q, other = logits(1, 4, 1.0), logits(1, 5, 1.0), logits(1, 6, 0.2)
    rng, count, sampler = np.random.default_rng(0), 1500, Standard(temperature=1.0)
    law = q.softmax(-1).numpy().astype(np.float64)
    seen, rows = np.zeros(1, np.int64), np.repeat(p.numpy(), 2, 0)
    stood = 0
    for token in rng.choice(VOCAB, count, p=law[0] / law[0].sum()):
        tree = Tree(np.array([token]), np.array([-1]), law)
        stood += len(SpecChain()(Target(tree, rows, seen, sampler), Chance(rng)).path)
    error = 4 * (0.25 / count) ** 0.5
    assert abs(stood / count - float(stands(p, q))) < error
    assert abs(stood / count - float(stands(p, other))) > error


# A step


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folders of a draft model and its target."""
    path = tmp_path_factory.mktemp("pair")
    models.write(path / "target")
    models.make("llama", 1).save_pretrained(path / "draft")
    return path / "draft", path / "target"


def rows(length, count, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(3, 90, (count, length + 1), generator=generator)
        known = torch.ones(count, length)
        known[:, :3] = 0
        yield ids, known


@pytest.fixture(scope="module")
def opened(pair):
    """opened(method) -> a run that has not begun; the two are captured once."""
    quiet = (lambda *_: None,) * 2
    sources = [Source(folder, None, None, *quiet, rows) for folder in pair]
    sources[0].captured = lambda folder: sources[1].program
    draft = Source(pair[0], None, None, *quiet, rows).program
    sources[0].program = draft

    def run_of(method):
        options = TrainOptions(target=pair[1], length=16, rows=2, rate=1e-2)
        soft, options = DistillRun.opened(method, sources[0], options)
        return DistillRun(soft, soft.start(0, 0), options, pair[0].parent / "run")

    return run_of


def steps(run, count, skip=0):
    """The losses of so many steps."""
    batches = rows(16, 2, 0)
    found = [(n, next(batches)) for n in range(count)]
    return [run.learn(*batch) for n, batch in found if n >= skip]


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_a_step_has_the_loss_of_known_places(name, pair, opened):
    """Against transformers' own models; the gradient, too."""
    run = opened(DistillSpec(divergence=name))
    ids, known = next(rows(16, 2, 0))
    draft, target = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in pair)
    with torch.no_grad():
        p = target(ids[:, :-1]).logits[known > 0]
    q = draft(ids[:, :-1]).logits[known > 0]
    loss = DIVERGENCES[name](p, q, 0.5).mean()
    loss.backward()
    slope = draft.get_parameter("model.layers.0.mlp.up_proj.weight").grad
    gradients = []
    run.descend = lambda lost: gradients.append(
        torch.autograd.grad(lost, run.parts[0]["model.layers.0.mlp.up_proj.weight"])[0]
    )
    found = run.learn(ids, known)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-6)
    assert found["stands"] == pytest.approx(stands(p, q).mean().item(), rel=1e-3)
    torch.testing.assert_close(gradients[0], slope, rtol=1e-2, atol=1e-6)


def test_it_learns_and_the_target_stays(opened):
    run = opened(DistillSpec())
    target = run.soft.target.program
    before = {name: target.params[name].clone() for name in target.params}
    found = [one["stands"] for one in steps(run, 25)]
    assert np.mean(found[-5:]) > np.mean(found[:3]) + 0.1
    assert all(torch.equal(target.params[name], value) for name, value in before.items())
    fixed = run.soft.draft.fixed
    assert not any(torch.equal(fixed[name], value) for name, value in run.parts[0].items())


def test_text_of_its_own_is_drawn_from_it(opened):
    """Token by token from whole rows, by plain torch; learnt from as a text that was given."""
    run, plain = (opened(DistillSpec(on_policy=share)) for share in (1, 0))
    ids, known = next(rows(16, 2, 0))
    generator = torch.Generator().manual_seed(0)
    torch.rand((), generator=generator)  # whether it draws
    text = ids[:, :8]
    with torch.no_grad():
        for _ in range(8):
            odds = run.soft.draft.logits(text, run.parts[0])[:, -1].softmax(-1)
            text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)], 1)
    assert not torch.equal(text, ids[:, :-1])
    where = torch.zeros(2, 16)
    where[:, 7:15] = 1  # what foretells a drawn token
    given = plain.learn(torch.cat([text, text[:, :1]], 1), where)
    assert run.learn(ids, known) == pytest.approx(given)
    for name, value in plain.parts[0].items():
        torch.testing.assert_close(run.parts[0][name], value)


def test_a_run_that_was_left_goes_on_as_if_not(opened):
    method = DistillSpec(divergence="jsd", on_policy=0.5)
    whole, left, again = (opened(method) for _ in range(3))
    steps(whole, 4)
    steps(left, 2)
    left.save()
    again.load()
    steps(again, 4, skip=again.step)
    assert again.step == whole.step == 4
    for name, value in whole.parts[0].items():
        assert torch.equal(again.parts[0][name], value)
    left.file.unlink()


# What is saved


@pytest.mark.long
def test_a_build_drafts_with_it(pair, tmp_path):
    """Greedy tokens are the target's, whatever drafts."""
    out = tmp_path / "tuned"
    settings = {"target": pair[1], "out": out, "minutes": 0.01, "length": 16, "rows": 1}
    made = train("distillspec", pair[0], settings, rows=rows)
    assert made.file == out and "stands" in made.message
    before, after = (read_shards(folder).tensors for folder in (pair[0], out))
    assert before.keys() == after.keys()
    assert all(after[n].dtype == t.dtype and not after[n].equal(t) for n, t in before.items())
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 1
    more = {"target": "eager", "max_context": 64, "verify": False}
    prompt = list(range(5, 12))
    with accel.optimize(pair[1], "draft-model", draft=out, **more) as drafted:
        found = drafted.generate(prompt, 12, eos=[]).tokens[0]
    plain = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32)
    for _ in range(12):
        with torch.no_grad():
            prompt.append(int(plain(torch.tensor([prompt])).logits[0, -1].argmax()))
    assert list(found) == prompt[-12:]


# What is refused


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"target": None}, "tuned to its target; give the target's folder, target=…"),
        ({"out": None}, "is a folder of its own; give out=DIR"),
        ({"divergence": "reverse-k"}, "did you mean 'reverse-kl'"),
        ({"on_policy": 1.5}, "on_policy is 1.5; give 0 to 1"),
        ({"beta": 1.0}, "beta is 1.0; give more than 0 and less than 1"),
        ({"keep": 0.5}, "distillspec has no option keep; leave keep=… out"),
    ],
    ids=str,
)
def test_options_that_do_not_do_are_refused(settings, why, pair, tmp_path):
    given = {"target": pair[1], "out": tmp_path / "out", **settings}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises((InputError, RecipeError), match=why):
        train("distillspec", pair[0], given, rows=rows)
    assert not (tmp_path / "out").exists()


def test_pairs_that_do_not_do_are_refused(pair, tmp_path):
    def refused(draft, target, why):
        with pytest.raises(InputError, match=why):
            train("distillspec", draft, {"target": target, "out": tmp_path / "out"}, rows=rows)

    models.make("qwen2", 1).save_pretrained(tmp_path / "qwen")
    refused(tmp_path / "qwen", pair[1], "qwen has 103 tokens and .*target 101; give a target with")
    shutil.copytree(pair[0], tmp_path / "other")
    told = json.loads((pair[1] / "tokenizer.json").read_text())
    words = list(told["model"]["vocab"])
    told["model"]["vocab"] = {w: n for n, w in enumerate(words[1:] + words[:1])}
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(told))
    refused(tmp_path / "other", pair[1], "has another tokenizer than .*other")
