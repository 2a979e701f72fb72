"""Training of heads that draft: losses fall, a run that is left goes on as if it had not been, the model stays as it
is, and a build takes what comes out.
"""

import models
import pytest
import torch

import accel
from accel.compiler.load.source import open_source
from accel.compiler.train import stated
from accel.compiler.train.kind import kind_of, trained_methods
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.precision import products_in
from accel.compiler.train.runs import longspec, moa_spec
from accel.compiler.train.runs.glide import BLOCK, block_mask
from accel.compiler.train.source import Source
from accel.compiler.train.train import train
from accel.ir.axis import find_axes
from accel.ir.errors import InputError

from .heads_case import Eagle1
from .runtime.draft.test_dovetail import Plain as Dovetail
from .runtime.draft.test_longspec import Plain as Longspec
from .runtime.draft.test_moa_spec import Plain as MoaSpec

METHODS = ("eagle1", "dovetail", "eagle3", "medusa", "bpd", "glide", "longspec", "moa-spec")
OPTIONS = {"length": 16, "rows": 2, "inner": 64, "threads": 1, "minutes": 100.0, "rate": 5e-3}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A model of four layers, as heads are trained for it."""
    tiny = models.write(tmp_path_factory.mktemp("heads") / "tiny")
    models.make("llama", 4).save_pretrained(tiny)
    quiet = (lambda *_: None,) * 2
    return Source(tiny, open_source(tiny).tokenizer, None, *quiet)


def run_of(source, name, tmp_path):
    """A run that has learnt nothing, and its rows."""
    method, options = find_axes()["draft"].build(name), TrainOptions(**OPTIONS)
    kind = kind_of(type(method))
    beside, options = kind.opened(method, source, options)
    run = kind(beside, beside.start(options.inner, 0), options, tmp_path / "run")
    return run, source.rows(options.length, options.rows, 0)


def learnt(run, rows, steps):
    return [run.learn(*next(rows)) for _ in range(steps)]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.few(4)
def test_a_run_learns_and_the_model_stays(opened, tmp_path, name):
    run, rows = run_of(opened, name, tmp_path)
    before = {n: t.clone() for n, t in run.soft.program.params.items()}
    one = next(rows)
    losses = [run.learn(*one)["loss"] for _ in range(30)]
    assert losses[-1] < losses[0] - 0.1
    for n, tensor in run.soft.program.params.items():
        assert torch.equal(tensor, before[n]), n


def test_a_run_learns_in_bfloat16(opened, tmp_path):
    run, rows = run_of(opened, "eagle3", tmp_path)
    one, losses = next(rows), []
    for _ in range(20):
        with products_in("bfloat16"):
            losses.append(run.learn(*one)["loss"])
    assert losses[-1] < losses[0] - 0.1
    assert all(t.dtype == torch.float32 for t in run.tensors)
    exact, _ = run_of(opened, "eagle3", tmp_path)
    assert exact.learn(*one)["loss"] == pytest.approx(losses[0], rel=0.01)
    assert exact.learn(*one)["loss"] != losses[1]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.few(2)
def test_a_run_that_was_left_goes_on_as_if_not(opened, tmp_path, name):
    whole, rows = run_of(opened, name, tmp_path)
    learnt(whole, rows, 4)
    first, rows = run_of(opened, name, tmp_path)
    learnt(first, rows, 2)
    first.save()
    second, more = run_of(opened, name, tmp_path)
    second.load()
    learnt(second, rows, 2)
    for mine, other in zip(whole.tensors, second.tensors, strict=True):
        assert torch.equal(mine, other)
    third, more = run_of(opened, name, tmp_path)
    learnt(third, more, 4)
    assert all(map(torch.equal, whole.tensors, third.tensors)), "and of a seed"


@pytest.mark.parametrize("name", ["medusa", "bpd"])
def test_a_head_learns_what_the_model_says_so_much_further(opened, tmp_path, name):
    """By the paper: head i of place t learns token t + 2 + i, here what the model says of it. The control: of one
    further.
    """
    run, rows = run_of(opened, name, tmp_path)
    learnt(run, rows, 2)
    ids, _ = next(rows)
    h, says = run.soft.read(ids)
    found = [loss.detach() for loss, _ in run.drafts(ids)]
    assert len(found) == 4

    @torch.no_grad()
    def by_hand(i, ahead):
        losses = []
        for b in range(len(ids)):
            for t in range(ids.shape[1] - ahead):
                p = says[b, t + ahead][run.soft.ids].softmax(-1)
                q = run.soft.head.said(h[b : b + 1, t : t + 1])[0, 0, i].log_softmax(-1)
                losses.append(-(p * q).sum())
        return torch.stack(losses).mean()

    for i, loss in enumerate(found):
        torch.testing.assert_close(loss, by_hand(i, i + 1), atol=1e-5, rtol=1e-5)
        assert abs(float(loss - by_hand(i, i + 2))) > 1e-3


def test_a_head_of_eagle_learns_states_and_what_is_said_of_them(opened, tmp_path, monkeypatch):
    """By the paper, without noise: the distance of its states from the model's, and a tenth of the cross-entropy. The
    control: states of the token before.
    """
    monkeypatch.setattr(stated, "NOISE", 0.0)
    run, rows = run_of(opened, "eagle1", tmp_path)
    learnt(run, rows, 2)
    ids, _ = next(rows)
    h, says = run.soft.read(ids)
    module = models.make("llama", 4)
    plain = Eagle1(
        {n: p.detach() for n, p in run.parts[0].items()}, module, run.soft.layer.num_attention_heads
    )
    plain.table = run.soft.program.params["model.embed_tokens.weight"].detach()

    @torch.no_grad()
    def by_hand(ahead):
        losses = []
        for tokens, states, said in zip(ids, h, says, strict=True):
            found = plain.states(tokens[1:], states[:-1])[: len(states) - ahead]
            near = (found - states[ahead:]).abs()
            apart = torch.where(near < 1, near**2 / 2, near - 0.5).mean()
            p = said[ahead:][:, run.soft.ids].softmax(-1)
            q = (found @ run.soft.output_head.T).log_softmax(-1)
            losses.append(apart - 0.1 * (p * q).sum(-1).mean())
        return torch.stack(losses).mean()

    ((loss, _),) = run.drafts(ids)
    torch.testing.assert_close(loss.detach(), by_hand(1), atol=1e-5, rtol=1e-5)
    assert abs(float(loss - by_hand(2))) > 1e-3


def test_a_head_of_dovetail_learns_by_the_same_losses(opened, tmp_path, monkeypatch):
    """By the paper's formulas: the distance of its states from the model's, and a tenth of the cross-entropy. The
    control: states of the token before.
    """
    monkeypatch.setattr(stated, "NOISE", 0.0)
    run, rows = run_of(opened, "dovetail", tmp_path)
    learnt(run, rows, 2)
    ids, _ = next(rows)
    h, says = run.soft.read(ids)
    layer = run.soft.layer
    tensors = {n: t.detach() for n, t in run.saved().items()}
    plain = Dovetail(tensors, run.soft.embedded, layer.num_attention_heads, layer.rms_norm_eps)

    @torch.no_grad()
    def by_hand(ahead):
        losses = []
        for tokens, states, said in zip(ids, h, says, strict=True):
            found = plain.states(tokens[1:], states[:-1])[: len(states) - ahead]
            near = (found - states[ahead:]).abs()
            apart = torch.where(near < 1, near**2 / 2, near - 0.5).mean()
            p = said[ahead:][:, run.soft.ids].softmax(-1)
            q = (found @ run.soft.output_head.T).log_softmax(-1)
            losses.append(apart - 0.1 * (p * q).sum(-1).mean())
        return torch.stack(losses).mean()

    ((loss, _),) = run.drafts(ids)
    torch.testing.assert_close(loss.detach(), by_hand(1), atol=1e-5, rtol=1e-5)
    assert abs(float(loss - by_hand(2))) > 1e-3


def test_a_block_sees_what_was_there_before_it(opened, tmp_path):
    """GliDe's mask: token q sees key k only where it lies in an earlier block, floor((k + 4) / 5) < floor((q + 4) / 5),
    of blocks that begin at token 1. What is learnt at each place of a block is what the model says there, by a forward
    pass of each block by itself. The control: all keys before a token.
    """
    seen = block_mask(12, BLOCK)
    for t, row in enumerate(seen):
        for k, sees in enumerate(row):
            assert bool(sees) == ((k + 4) // 5 < (t + 1 + 4) // 5)
    run, rows = run_of(opened, "glide", tmp_path)
    learnt(run, rows, 2)
    ids, _ = next(rows)
    read, says = run.soft.read(ids)
    found = [loss.detach() for loss, _ in run.drafts(ids)]

    @torch.no_grad()
    def by_hand(whole):
        """Of drafts behind each fifth token: its head sees zeros in place of keys that come later."""
        losses = [[] for _ in range(BLOCK)]
        x, count = run.soft.embedded(ids[:, 1:]), ids.shape[1] - 1
        for first in range(0, count, BLOCK):
            known = read[:, :-1].clone()
            if not whole:
                known[:, first + 1 :] = 0
            logits = run.soft.head.said(x, known, torch.arange(count)[None])
            for n in range(min(BLOCK, count - first)):
                p = says[:, first + n + 1][:, run.soft.ids].softmax(-1)
                losses[n].append(-(p * logits[:, first + n].log_softmax(-1)).sum(-1))
        return [torch.cat(one).mean() for one in losses]

    for loss, want in zip(found, by_hand(False), strict=True):
        torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-5)
    assert abs(float(found[-1] - by_hand(True)[-1])) > 1e-4


def test_keys_are_missing_and_places_are_moved(opened, tmp_path, monkeypatch):
    """LongSpec's losses, by a forward pass of the formulas in which the target ran at the same places: the first keys
    are anchors, and a token does not see the last few before it. The controls: one key more is missing, and the target
    ran at other places.
    """
    monkeypatch.setattr(longspec, "LEFT", 10)
    run, rows = run_of(opened, "longspec", tmp_path)
    learnt(run, rows, 2)
    ids, _ = next(rows)
    generator = torch.Generator().manual_seed(run.step)
    places = longspec.moved(ids.shape[1], 512, generator)
    stale = int(torch.randint(1, 5, (), generator=generator))
    assert places[-1] > ids.shape[1]
    ((loss, _),) = run.drafts(ids)
    module = models.make("llama", 4).eval()
    plain = Longspec(module, {n: p.detach() for n, p in run.parts[0].items()}, window=512)

    @torch.no_grad()
    def by_hand(stale, held):
        losses = []
        for row in ids:
            ran = module(row[None], position_ids=held[None], use_cache=True)
            cache = [
                s[0]
                for s in (
                    ran.past_key_values.layers[-1].keys,
                    ran.past_key_values.layers[-1].values,
                )
            ]
            q = (run.soft.size * plain.of(row.tolist(), cache, stale, places)).log_softmax(-1)
            losses.append(-(ran.logits[0, 1:].softmax(-1) * q).sum(-1).mean())
        return torch.stack(losses).mean()

    loss = loss.detach()
    torch.testing.assert_close(loss, by_hand(stale, places), atol=1e-4, rtol=1e-4)
    assert abs(float(loss - by_hand(stale + 1, places))) > 1e-3
    assert abs(float(loss - by_hand(stale, torch.arange(len(places))))) > 1e-3


def test_short_rows_are_moved_behind_their_anchors():
    """By the paper: the first 0 to 4 places stay, the others are moved together, within the context less 1000; rows of
    more than 1200 tokens stay. A mask of r missing keys is causal attention of all queries but the first r to all keys
    but the last r.
    """
    generator, anchors = torch.Generator().manual_seed(0), set()
    for _ in range(60):
        places = longspec.moved(50, 1200, generator)
        by = places - torch.arange(50)
        assert (by[1:] >= by[:-1]).all() and len(by.unique()) <= 2 and 0 <= by[-1] <= 150
        anchors.add(int((by == 0).sum()))
    assert anchors - {50} == {0, 1, 2, 3, 4}
    for count, context in ((1201, 40_000), (50, 1050)):
        assert torch.equal(longspec.moved(count, context, generator), torch.arange(count))
    for r in (1, 4):
        seen = longspec.stale_mask(9, r)  # of tokens 1 .. 9 and keys 0 .. 8
        causal = torch.ones(10 - r, 10 - r).tril().bool()
        assert torch.equal(seen[r - 1 :, : 10 - r], causal)
        assert not seen[: r - 1].any() and not seen[:, 10 - r :].any()


def test_summaries_are_those_before_a_draft(opened, tmp_path):
    """Losses of moa-spec by the formulas: the distance of what it says from what the model's output head reads, and a
    tenth of the cross-entropy. The controls: another draw of the drafts, and all tokens of the text are seen.
    """
    run, rows = run_of(opened, "moa-spec", tmp_path)
    learnt(run, rows, 2)
    ids, _ = next(rows)
    generator = torch.Generator().manual_seed(run.step)
    begin = moa_spec.begins(ids.shape[1] - 1, generator)
    ((loss, _),) = run.drafts(ids)
    module = models.make("llama", 4).eval()
    plain = MoaSpec(module, {n: p.detach() for n, p in run.parts[0].items()}, layers=4, theta=1e4)
    plain.size = module.config.head_dim

    @torch.no_grad()
    def by_hand(begin, near):
        losses = []
        for row in ids:
            final = module.get_decoder()(row[None]).last_hidden_state[0, 1:]
            found = run.soft.size * plain.of(
                row.tolist(), plain.summaries(row.tolist()[:-1]), begin, near
            )
            apart = (found - final).abs()
            apart = torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
            words = module.lm_head.weight[run.soft.ids]
            p, q = ((z @ words.T) for z in (final, found))
            losses.append(apart - 0.1 * (p.softmax(-1) * q.log_softmax(-1)).sum(-1).mean())
        return torch.stack(losses).mean()

    found = float(loss.detach())
    assert abs(found - by_hand(begin, begin)) < 1e-4
    assert abs(found - by_hand(begin.clamp(max=3), begin)) > 1e-4
    assert abs(found - by_hand(begin, torch.zeros_like(begin))) > 1e-4


def test_drafts_are_of_six_to_fourteen_tokens():
    """And a token sees those before it, with stairs only of its own draft."""
    begin = moa_spec.begins(300, torch.Generator().manual_seed(0))
    first, sizes = begin.unique(return_counts=True)
    assert first[0] == 1 and torch.equal(first[1:], (first + sizes)[:-1])
    assert sizes[:-1].min() == 6 and sizes[:-1].max() == 14
    whole, stairs = (moa_spec.near_mask(begin, one) for one in (False, True))
    assert torch.equal(whole, torch.ones(300, 300).tril().bool())
    for t in (0, 17, 299):
        assert stairs[t].nonzero()[:, 0].tolist() == list(range(int(begin[t]) - 1, t + 1))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.long
def test_a_build_takes_what_comes_out(opened, tmp_path, name):
    given = {**OPTIONS, "minutes": 0.005, "out": tmp_path / "head"}
    made = train(name, opened.path, given)
    assert made.file == tmp_path / "head" and sorted(f.name for f in made.file.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    more = {"target": "eager", "max_context": 48, "max_batch": 1}
    with accel.optimize(opened.path, draft=made.file, **more) as model:
        assert model.draft_model.facts.draft_head.drafter == name
        drafted = model.generate([5, 9, 3, 11], max_new_tokens=12).tokens
    with accel.optimize(opened.path, **more) as model:
        assert model.generate([5, 9, 3, 11], max_new_tokens=12).tokens == drafted
    with pytest.raises(InputError, match="a head is a folder of its own; give out=DIR"):
        train(name, opened.path, OPTIONS)


def test_three_depths_need_three_layers(tmp_path):
    tiny = models.write(tmp_path / "tiny")
    models.make("llama", 2).save_pretrained(tiny)
    with pytest.raises(InputError, match="of 3 layers or more, and this one has 2; train eagle1"):
        train("eagle3", tiny, {**OPTIONS, "out": tmp_path / "head"})


def test_keys_that_are_turned_otherwise_are_refused(tmp_path):
    tiny = models.write(tmp_path / "tiny")
    models.make("gpt2", 2).save_pretrained(tiny)
    source = Source(tiny, open_source(tiny).tokenizer, None, *(lambda *_: None,) * 2)
    with pytest.raises(InputError, match="does not turn its keys as Llama does"):
        run_of(source, "glide", tmp_path)


def test_every_head_that_is_trained_here_is_tested_here():
    heads = {n for n, (_, m) in trained_methods().items() if getattr(m, "head", False)}
    assert heads == set(METHODS)
