"""The adapter of dparallel: what it learns from, its losses, and that a build merges it."""

import itertools

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import accel
from accel.compiler.over_state import over_state
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.dparallel import CertainRun, Tuned, _drawn
from accel.compiler.train.train import train
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError
from accel.runtime.loop.dparallel import Dparallel

from .diffusion_case import BLOCK, MASK, Filler

TEXTS = [
    (torch.arange(1, 8), torch.arange(10, 31)),
    (torch.arange(30, 35), torch.arange(5, 22)),
]


def run_of(shift, tmp_path, rate=1e-2):
    """A run beside a small model, and its module."""
    module = Filler(shift)
    tuned = Tuned(over_state(capture(module)), Dparallel(block=BLOCK))
    options = TrainOptions(out=tmp_path / "out", inner=4, rate=rate)
    return CertainRun(tuned, tuned.start(4, 0), options, tmp_path / "run"), module


def losses_of(module, ids, known, shift):
    """Cross-entropy of the masks of a block, and the entropy of those that are right at half the temperature, a mean
    of both passes; and the share that is right.
    """
    loss, entropy, right = [], [], []
    for shown, where in zip(ids[1:], known.bool(), strict=True):
        if not where.any():
            continue
        logits = module(shown[None])[0]
        if shift:
            logits = torch.cat([logits[:1], logits[:-1]])
        odds, want = logits[where], ids[0][where]
        loss.append(float(F.cross_entropy(odds, want)))
        chances = (odds / 0.5).softmax(-1)
        each, hits = -(chances * chances.log()).sum(-1), odds.argmax(-1) == want
        right.append(float(hits.float().mean()))
        entropy += [float(each[hits].mean())] if hits.any() else []
    return {"loss": np.mean(loss), "entropy": np.mean(entropy or [0.0]), "right": np.mean(right)}


@pytest.mark.parametrize("shift", [False, True])
def test_losses_are_those_of_the_paper(shift, tmp_path):
    """Before anything is learnt. The control: logits of the token beside."""
    run, module = run_of(shift, tmp_path, rate=1e-9)
    for ids, known in itertools.islice(_drawn(TEXTS, BLOCK, MASK, 0), 12):
        with torch.no_grad():
            want = losses_of(module, ids, known, shift)
            other = losses_of(module, ids, known, not shift)
        assert run.learn(ids, known) == pytest.approx(want, rel=1e-4, abs=1e-5)
        assert abs(want["loss"] - other["loss"]) > 1e-3


def test_each_mask_of_a_block_is_in_one_pass():
    for ids, known in itertools.islice(_drawn(TEXTS, BLOCK, MASK, 3), 40):
        text, where = ids[0], known.bool()
        prompt = next(p for p, a in TEXTS if len(p) + len(a) == len(text))
        block = where.any(0).nonzero()[:, 0]
        assert not (where[0] & where[1]).any() and len(block) <= BLOCK
        assert (block[0] - len(prompt)) % BLOCK == 0
        assert (block.diff() == 1).all()
        for shown, own in zip(ids[1:], where, strict=True):
            assert shown[: block[0]].equal(text[: block[0]])
            assert (shown[block[-1] + 1 :] == MASK).all()
            assert (shown[own] == MASK).all()
            rest = block[~own[block]]
            assert shown[rest].equal(text[rest])


def test_it_gets_certain_of_its_answers(tmp_path):
    run, _ = run_of(True, tmp_path)
    found = [run.learn(*one) for one in itertools.islice(_drawn(TEXTS, BLOCK, MASK, 1), 120)]
    first, last = found[:20], found[-20:]
    assert np.mean([f["loss"] for f in last]) < 0.5 * np.mean([f["loss"] for f in first])
    assert np.mean([f["right"] for f in last]) > 0.5 > np.mean([f["right"] for f in first])


def filler(folder):
    """A llama that fills masks, in a folder."""
    torch.manual_seed(0)
    model = models.make("llama", 2)
    model.config.update({"is_causal": False, "mask_token_id": 2, "logit_shift": True})
    model.save_pretrained(folder)
    return folder


def rows(length, count, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(3, 90, (count, length + 1), generator=generator)
        yield ids, torch.ones(count, length)


@pytest.mark.long
def test_a_build_merges_the_adapter(tmp_path):
    folder, out = filler(tmp_path / "model"), tmp_path / "adapter"
    settings = {"out": out, "minutes": 0.02, "samples": 2, "length": 32, "inner": 4, "rate": 1e-2}
    made = train("dparallel", folder, settings, rows=rows)
    assert made.file == out and "right" in made.message
    ids = np.random.default_rng(0).integers(3, 90, (1, 12))
    more = {"target": "eager", "max_context": 64, "verify": False}
    with (
        accel.optimize(folder, "dparallel", **more) as base,
        accel.optimize(folder, "dparallel", merge_adapter=out, **more) as tuned,
    ):
        tuned.generate([ids[0].tolist()], max_new_tokens=16)
        with base.session() as before, tuned.session() as after:
            apart = np.abs(before.write(ids, 0) - after.write(ids, 0)).max()
    assert apart > 1e-3


def test_what_it_refuses(tmp_path):
    with pytest.raises(InputError, match="an adapter is a folder of its own; give out=DIR"):
        train("dparallel", filler(tmp_path / "m"), {}, rows=rows)
    torch.manual_seed(0)
    models.make("llama", 2).save_pretrained(tmp_path / "causal")
    with pytest.raises(InputError, match="decodes token by token; give a masked-diffusion model"):
        train("dparallel", tmp_path / "causal", {"out": tmp_path / "o"}, rows=rows)
