"""The predictor of specbranch: what it reads, what it decides, and what it learns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import foresight as trainer
from accel.ir.errors import InputError
from accel.runtime.loop._foresight import Fate, Foresight, Heard, classes, taps_of
from accel.runtime.loop.specbranch import Specbranch
from accel.runtime.sample.standard import Standard

from ...draft_case import rows_of
from ...part_case import written
from ...prefill_case import built, module
from .test_specbranch import PROMPTS, beside


def test_the_predictor_is_that_of_the_paper():
    """5E -> 256 -> 64 -> 3 with ReLU, by an implementation in plain PyTorch; without ReLU it differs."""
    generator = torch.Generator().manual_seed(1)
    part = {n: torch.randn(s, generator=generator) / 8 for n, s in Specbranch.sizes(5 * 16).items()}
    x = torch.randn(9, 80, generator=generator)
    plain = nn.Sequential(
        nn.Linear(80, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    with torch.no_grad():
        for layer, name in zip(plain[::2], ("first", "second", "last"), strict=True):
            layer.weight.copy_(part[name].T)
            layer.bias.copy_(part[f"{name}.bias"])
        want, linear = plain(x), plain[4](plain[2](plain[0](x)))
    found = torch.from_numpy(classes({n: t.numpy() for n, t in part.items()}, x.numpy()))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, linear, atol=1e-2)


PAIR = {"loop": {"use": "specbranch", "predictor": True}, "draft": {"use": "model"}}


def opened():
    """A model that was built to give what the predictor reads, and a context with a draft model of the same numbers."""
    own = built("llama", tables=PAIR)
    draft = beside(built("llama", tables={"draft": {"use": "token-recycling"}}).session)
    draft.model.facts = own.facts
    return own, draft


class Pair(SimpleNamespace):
    """One that can be referred to weakly."""

    __hash__ = object.__hash__


def pair_of(own, context):
    """Both as a model."""
    draft = context.model.draft_model
    return Pair(session=own.session, facts=own.facts, draft_model=draft, tokenizer=None)


def test_it_reads_the_last_layers_and_the_new_token():
    """As transformers computes them: the streams behind the last four layers (here all three) of the token before the
    newest, and the embedding of that. The control: the streams of the newest.
    """
    own, context = opened()
    names, count = taps_of(3), []
    whole = module("llama").eval()
    streams = list[torch.Tensor]()
    for layer in whole.model.layers:
        layer.register_forward_hook(
            lambda _, x, y: streams.append(y[0] if isinstance(y, tuple) else y)
        )

    class Checked(Foresight):
        def __init__(self, session, rows):
            self.heard, self.rows = Heard(session, rows, names, 6), rows

        def fate(self, row, token):
            found, seen = self.heard.read(row, token), self.rows[row].seen.tolist()
            streams.clear()
            with torch.no_grad():
                whole(torch.tensor([seen]))
                new = whole.model.embed_tokens.weight[token]
            for place in (-2, -1):
                want = torch.cat([*(s[0, place] for s in streams), new]).detach().numpy()
                assert np.allclose(found, want, atol=1e-4) == (place == -2)
            count.append(token)
            return Fate.ALL

        def close(self):
            self.heard.close()

    class Loop(Specbranch):
        goes_on = True

        def foresight(self, session, rows, context):
            return Checked(session, rows)

    with own.session(2) as session:
        rows = rows_of(PROMPTS[:2], Standard(), limit=12, max_context=64)
        list(Loop(branches=2, ahead=3, predictor=True).tokens(session, rows, context))
    assert len(count) > 2


def part(width=4 * 48, favours=Fate.SOME):
    """Of a predictor that always says the same."""
    found = {n: np.zeros(s, np.float32) for n, s in Specbranch.sizes(width).items()}
    found["last.bias"][favours] = 1
    return found


def test_a_trained_part_decides(tmp_path):
    """One that says that nothing stands has nothing verified; a part of other sizes is refused, and a model that does
    not give what it reads.
    """
    own, context = opened()
    pair = pair_of(own, context)
    drafted = []
    for fate in Fate:
        file = written(pair, "specbranch", part(favours=fate), tmp_path / fate.name)
        loop = Specbranch(branches=2, ahead=3, threshold=0, predictor=True, trained=file)
        loop.fit(pair)
        (row,) = rows_of(PROMPTS[:1], Standard(), limit=12, max_context=64)
        with own.session() as session:
            list(loop.tokens(session, [row], context))
        drafted.append(row.drafting["drafted"])
    assert drafted[0] == 0 < drafted[1] == drafted[2]
    file = written(pair, "specbranch", part(100), tmp_path / "other")
    loop = Specbranch(predictor=True, trained=file)
    (row,) = rows_of(PROMPTS[:1])
    with own.session() as session, pytest.raises(InputError, match="reads 100 numbers, but .* 192"):
        next(loop.tokens(session, [row], context))
    with (
        built("llama").session() as session,
        pytest.raises(InputError, match="reads stream.0, .* predictor = false"),
    ):
        next(loop.tokens(session, [row], context))


def test_the_predictor_learns_what_tells_and_nothing_from_noise(monkeypatch):
    monkeypatch.setattr(trainer, "STEPS", 60)
    generator = torch.Generator().manual_seed(0)
    x = 5 + 3 * torch.randn(600, 20, generator=generator)
    noise = torch.randint(3, (600,), generator=generator)
    for fates, learns in (((x[:, 0] > 4).long() + (x[:, 0] > 6), True), (noise, False)):
        learnt, held = (x[:400], fates[:400]), (x[400:], fates[400:])
        found = trainer.taught(Specbranch, learnt, held, TrainOptions(rate=3e-3))
        told = trainer.judged(found, *held)
        assert (told["loss"] < told["constant"] - 0.2) == learns


def test_what_is_learnt_is_what_became_of_whole_drafts(monkeypatch):
    """Of each draft that was verified what was read before, and its fate."""
    monkeypatch.setattr(trainer, "NEW", 12)
    own, context = opened()
    model = pair_of(own, context)
    loop = Specbranch(branches=2, ahead=3, threshold=0.9)
    found = trainer.logged(model, loop, [np.array(p) for p in PROMPTS[:2]])
    assert len(found) == 2 and len(found[0]) > 1
    assert all(x.shape == (4 * 48,) for x, _ in found[0])
    assert all(fate is Fate.ALL for _, fate in found[0][:-1]), "a greedy draft of the same model"
    assert [Fate.of(4, n) for n in (0, 1, 3, 4)] == [Fate.NONE, Fate.SOME, Fate.SOME, Fate.ALL]
