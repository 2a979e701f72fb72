"""Draft models that learn what they are most behind in: which tokens count, and where it is plain distillation."""

import shutil

import models
import pytest
import torch

from accel.compiler.train.divergences import forward_kl
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.adaspec import AdaSpec, Selective, SelectiveRun, learnable
from accel.compiler.train.runs.distillspec import DistillRun, DistillSpec, TunedDraft
from accel.compiler.train.source import Source
from accel.compiler.train.train import train
from accel.compiler.train.tuned import Tuned
from accel.compiler.train.whole import Whole
from accel.ir.errors import InputError, RecipeError

VOCAB = 101


def drawn(count, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


# Which tokens count


@pytest.mark.parametrize("keep", [0.1, 0.4, 0.75, 1.0])
def test_the_share_is_kept(keep):
    """Those that are most behind. With ties, more."""
    losses, references = drawn(400, 0).square(), drawn(400, 1).square()
    kept = learnable(losses, references, keep)
    assert abs(int(kept.sum()) - 400 * keep) <= 1
    gaps = losses - references
    assert keep == 1 or gaps[kept].min() > gaps[~kept].max()
    assert learnable(losses, losses, keep).all()


def test_a_constant_added_to_the_reference_changes_nothing():
    """The control: another loss of a single token."""
    losses, references = drawn(400, 0).square(), drawn(400, 1).square()
    kept = learnable(losses, references, 0.4)
    assert torch.equal(learnable(losses, references + 0.5, 0.4), kept)
    references[kept.nonzero()[0]] += 100
    assert not torch.equal(learnable(losses, references, 0.4), kept)


# A step


class Rows:
    """What a model says of tokens: rows of a table [V,V]."""

    def __init__(self, table):
        self.table = table

    def logits(self, tokens):
        return self.table[tokens]


class Draft(Rows):
    """One that learns its table."""

    def logits(self, tokens, weights):
        return weights["table"][tokens]


@pytest.fixture
def run(tmp_path):
    """run(method) -> a run beside tables."""

    def table(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(VOCAB, VOCAB, generator=generator)

    def opened(method):
        target, reference = Rows(table(0)), Rows(table(1))
        pair = (Draft(None), target, method, VOCAB)
        selects = isinstance(method, AdaSpec)
        soft = Selective(*pair, reference) if selects else TunedDraft(*pair)
        options = TrainOptions(out=tmp_path / "out", rate=1e-2)
        kind = SelectiveRun if selects else DistillRun
        return kind(soft, {0: {"table": table(2)}}, options, tmp_path / "run")

    return opened


def batch():
    """Every token once, two of them unknown."""
    ids = torch.arange(VOCAB + 1).clamp(max=VOCAB - 1)[None]
    known = torch.ones(1, VOCAB)
    known[0, 3:5] = 0
    return ids, known


def test_all_tokens_is_plain_distillation(run):
    """The control: 40 % of them."""
    plain, whole, some = (run(m) for m in (DistillSpec(), AdaSpec(keep=1.0), AdaSpec()))
    for _ in range(3):
        found = [one.learn(*batch()) for one in (plain, whole, some)]
    assert found[0] == found[1] != found[2]
    tables = [one.parts[0]["table"] for one in (plain, whole, some)]
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])


def test_other_tokens_have_no_gradient(run):
    """By the rule of the paper, in plain torch."""
    one = run(AdaSpec())
    target, reference = one.soft.target.table, one.soft.reference.table
    table = one.parts[0]["table"].detach().clone()
    where = batch()[1][0] > 0
    losses, references = (forward_kl(target, q, 0.5)[where] for q in (table, reference))
    gaps = losses - references
    kept = where.nonzero()[:, 0][gaps >= gaps.sort().values[round(0.6 * (len(gaps) - 1))]]
    lost = []
    one.descend = lambda loss: lost.append((loss, torch.autograd.grad(loss, one.tensors)[0]))
    told = one.learn(*batch())
    loss, slope = lost[0]
    assert slope.abs().sum(-1).nonzero()[:, 0].tolist() == kept.tolist()
    chosen = forward_kl(target[kept], table[kept], 0.5)
    assert loss.item() == pytest.approx(chosen.mean().item(), rel=1e-5)
    assert told["loss"] == pytest.approx(losses.mean().item(), rel=1e-5) != loss.item()


# What is refused


def rows(length, count, seed):
    while True:
        yield torch.arange(3, 4 + length).repeat(count, 1), torch.ones(count, length)


def test_what_does_not_do_is_refused(tmp_path):
    folders = [tmp_path / name for name in ("draft", "target", "other")]
    for folder, kind in zip(folders, ("llama", "llama", "qwen2"), strict=True):
        models.make(kind, 1).save_pretrained(folder)
    draft, target, other = folders
    given = {"target": target, "reference": draft, "out": tmp_path / "out"}

    def refused(why, error=InputError, **settings):
        every = {n: v for n, v in {**given, **settings}.items() if v is not None}
        with pytest.raises(error, match=why):
            train("adaspec", draft, every, rows=rows)

    refused("give its folder, reference=… .accel-compile train distillspec", reference=None)
    refused("tuned to its target; give the target's folder", target=None)
    refused("keep is 0.0; give more than 0 and at most 1", RecipeError, keep=0.0)
    refused("keep is 1.2; give more than 0 and at most 1", RecipeError, keep=1.2)
    refused("other has 103 tokens and .*draft 101; give a reference", reference=other)
    assert not given["out"].exists()


def test_a_reference_stays_as_it_is(tmp_path):
    """It is read from its folder, and is another model than the one that learns."""
    folder, quiet = tmp_path / "draft", (lambda *_: None,) * 2
    models.make("llama", 1).save_pretrained(folder)
    shutil.copytree(folder, tmp_path / "target")
    source = Source(folder, None, None, *quiet, rows)
    target, captured = source.program.copy(), source.captured
    name = "lm_head.weight"
    target.params[name] = target.params[name].flip(0).contiguous()  # which is another model
    source.captured = lambda path: captured(path) if path == folder else target
    options = TrainOptions(
        target=tmp_path / "target", reference=folder, length=12, rows=1, rate=1e-2
    )
    soft, options = SelectiveRun.opened(AdaSpec(), source, options)
    assert isinstance(soft.draft, Tuned) and isinstance(soft.reference, Whole)
    one = SelectiveRun(soft, soft.start(0, 0), options, tmp_path / "run")
    tokens = torch.arange(3, 12)[None]
    before = [model.logits(tokens) for model in (soft.target, soft.reference)]
    torch.testing.assert_close(soft.draft.logits(tokens, one.parts[0]), before[1])
    for _ in range(3):
        one.learn(*next(rows(12, 1, 0)))
    after = [model.logits(tokens) for model in (soft.target, soft.reference)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (soft.draft.logits(tokens, one.parts[0]) - before[1]).abs().max() > 1e-3
