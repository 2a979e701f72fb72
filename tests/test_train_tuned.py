"""Models that are tuned to what a loop asks of them: losses against plain torch, what is saved, what is refused."""

import itertools
import json

import models
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import accel
from accel.compiler.train.runs import cllm, lud, set_block
from accel.compiler.train.train import train
from accel.compiler.train.windows import WindowedRun
from accel.ir.errors import InputError, RecipeError

from .tuned_case import LENGTH, behind, opened, plain, rows, run_of, step_of, write

MASK, WEIGHT = 3, "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tuned") / "model", pad_token_id=MASK)


@pytest.fixture(scope="module")
def source(folder):
    return opened(folder)


@pytest.fixture(scope="module")
def model(folder):
    return plain(folder)


def close(model, found, want, other):
    """A step's loss and gradient are these; a broken variant's loss is not."""
    told, loss, slope = found
    model.zero_grad()
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    by_hand = model.get_parameter(WEIGHT).grad
    assert (slope - by_hand).norm() < 1e-5 * by_hand.norm()
    assert abs(loss.item() - float(other)) > 1e-4
    assert 0 <= told["right"] <= 1


# Set Block Decoding


def of_blocks(model, batch, blocks, sees):
    """The loss of next tokens and of masked ones, block by block in a call of its own."""
    ids, known = batch
    each = F.cross_entropy(model(ids[:, :-1]).logits.mT, ids[:, 1:], reduction="none")
    following = (each * known).sum() / known.sum()
    lost, count = 0.0, 0.0
    for row, (text, weight) in enumerate(zip(ids, known, strict=True)):
        for first in sorted(set(blocks.shown.begins[row].tolist())):
            own = blocks.shown.begins[row] == first
            window, hidden = blocks.shown.tokens[row][own], blocks.hidden[row][own]
            logits = behind(model, text, window, first, sees(len(window)))
            for place in range(1, len(window)):
                if hidden[place]:
                    worth = weight[first + place - 1]
                    lost = lost + worth * F.cross_entropy(logits[place - 1], text[first + place])
                    count += float(worth)
    return following + lost / count


def test_the_loss_of_blocks(source, model, tmp_path):
    """The control: blocks that see one way."""
    run = run_of(set_block.SetBlockRun, set_block.SetBlock(block=6), source, tmp_path / "run")
    batch = next(rows(LENGTH, 2, 0))
    generator = torch.Generator().manual_seed(0)
    blocks = set_block.drawn(batch[0][:, :-1], 6, MASK, generator)
    want = of_blocks(model, batch, blocks, lambda size: np.ones((size, size)))
    with torch.no_grad():
        other = of_blocks(model, batch, blocks, np.tri)
    close(model, step_of(run, batch, WEIGHT), want, other)


def test_blocks_are_whole_and_of_one_size():
    """All but a share of a row's tokens is as it is; the first of a block follows from the text."""
    text = torch.arange(10, 10 + 2 * LENGTH).view(2, LENGTH)
    sizes, shares = set(), []
    for seed in range(60):
        blocks = set_block.drawn(text, 6, MASK, torch.Generator().manual_seed(seed))
        shown, (size,) = (
            blocks.shown,
            set(blocks.shown.begins[0].unique(return_counts=True)[1].tolist()),
        )
        sizes.add(size)
        assert shown.places[0, 0] <= size and shown.places[0].diff().eq(1).all()
        assert LENGTH - size <= shown.places[0, -1] < LENGTH
        seen = text.gather(1, shown.places)
        assert torch.equal(shown.tokens, torch.where(blocks.hidden, MASK, seen))
        firsts = shown.places == shown.begins
        assert not (blocks.asked.roll(1, 1) & firsts).any()
        assert torch.equal(blocks.asked.roll(1, 1) | (firsts & blocks.hidden), blocks.hidden)
        shares += blocks.hidden.float().mean(1).tolist()
    assert sizes == {2, 3, 4, 5, 6} and 0.4 < np.mean(shares) < 0.6 and np.std(shares) > 0.2


# Lexical units


def of_units(model, batch, first, method, sees):
    """The loss of next tokens, and of units' tokens behind their first."""
    ids, known = batch
    logits = model(ids[:, :-1]).logits
    each = F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    odds = (-each).exp().detach()
    lost, count = 0.0, 0
    for row, places in enumerate(first.tolist()):
        for place in places:
            masks = torch.full((method.block - 1,), MASK)
            said = behind(model, ids[row], masks, place + 1, sees(len(masks)))
            for i in range(method.block):
                if odds[row, place + i] < method.sure or not known[row, place + i]:
                    break
                if i:
                    lost = lost + F.cross_entropy(said[i - 1], ids[row, place + i + 1])
                    count += 1
    assert count > 10
    return (each * known).sum() / known.sum() + lost / count


def test_the_loss_of_units(source, model, tmp_path):
    """The control: masks that see both ways."""
    method = lud.Lud(block=4, sure=0.005)
    run = run_of(lud.LudRun, method, source, tmp_path / "run")
    batch, placed = next(rows(LENGTH, 2, 0)), []
    masks = run._masks
    run._masks = lambda first, places: placed.append(first) or masks(first, places)
    found = step_of(run, batch, WEIGHT)
    want = of_units(model, batch, placed[0], method, np.tri)
    with torch.no_grad():
        other = of_units(model, batch, placed[0], method, lambda size: np.ones((size, size)))
    close(model, found, want, other)


def test_a_unit_is_sure_from_its_first_token_on():
    sure = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0]]).bool()
    found = lud.units(sure, 3)[0].int().tolist()
    assert found == [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0]]


# Consistency


@pytest.fixture(scope="module")
def answered(folder):
    """Prompts and the iterates of their answers."""
    prompts, found = [np.arange(20, 32), np.arange(60, 67)], []
    with accel.optimize(folder, {}, target="eager", max_context=64, verify=False) as built:
        for seed, prompt in enumerate(prompts):
            with built.session() as session:
                said = cllm.iterates(session, prompt, 5, 3, [], seed)
            found.append((torch.from_numpy(prompt), [torch.from_numpy(one) for one in said]))
    return found


def test_iterates_are_jacobis(answered, model):
    """By transformers, from the whole row; each is a prefix nearer to plain decoding, where it ends."""
    for prompt, blocks in answered:
        text = prompt
        for states in blocks:
            assert set(states[0][1:].tolist()) <= set(prompt.tolist())
            for before, after in itertools.pairwise(states):
                with torch.no_grad():
                    said = model(torch.cat([text, before])[None]).logits[0, len(text) - 1 : -1]
                assert torch.equal(said.argmax(-1), after)
            last = states[-1]
            for n, state in enumerate(states):
                assert torch.equal(state[: n + 1], last[: n + 1])
            assert 1 <= len(states) <= 5
            for token in last:
                with torch.no_grad():
                    assert int(model(text[None]).logits[0, -1].argmax()) == token
                text = torch.cat([text, token[None]])


def test_an_end_ends_an_answer(folder, answered):
    prompt, blocks = answered[0]
    end = int(blocks[1][-1][2])
    count = 1 + next(n for n, states in enumerate(blocks) if end in states[-1].tolist())
    with accel.optimize(folder, {}, target="eager", max_context=64, verify=False) as built:
        with built.session() as session:
            found = cllm.iterates(session, prompt.numpy(), 5, 3, [end], 0)
    assert len(found) == count < 3


def consistent(model, ids, known, ends, aim_at):
    """The global loss and ten times that of next tokens, an iterate at a time."""
    text, state, block = ids[0], ids[1], known[0].long()
    logits = model(text[None]).logits[0]
    first = int((block > 0).nonzero()[0])
    stop = next((p for p in range(first, len(text)) if int(text[p]) in ends), len(text))
    losses = []
    for number in range(1, int(block.max()) + 1):
        places = (block == number).nonzero()[:, 0].tolist()
        said = model(torch.cat([text[: places[0]], state[places]])[None]).logits[0]
        wrong = [p for p in places if text[p] != state[p]]
        for place in places if wrong else ():
            if wrong[0] <= place < stop:
                aim = logits[place + aim_at].detach().softmax(-1)
                losses.append(-(aim * said[place].log_softmax(-1)).sum())
    targets = text[first : stop + 1]
    follow = F.cross_entropy(logits[first - 1 :][: len(targets)], targets, label_smoothing=0.1)
    return (sum(losses) / len(losses) if losses else 0.0) + 10 * follow


class Plainly(cllm.CllmRun):
    """Asks for no answers when it is opened."""

    opened = classmethod(WindowedRun.opened.__func__)


@pytest.fixture
def tuned(source, tmp_path):
    """A run whose answers are there."""
    return run_of(Plainly, cllm.Cllm(block=5), source, tmp_path / "run")


@pytest.mark.parametrize("ended", [False, True])
def test_the_loss_of_consistency(tuned, answered, model, ended):
    """The control: the logits of the token before."""
    for ids, known in itertools.islice(cllm.drawn(answered, 3), 3):
        ends = (int(ids[0, -4]),) if ended else ()
        tuned.soft.program.facts.eos = ends
        want = consistent(model, ids, known, ends, 0)
        with torch.no_grad():
            other = consistent(model, ids, known, ends, -1)
        close(model, step_of(tuned, (ids, known), WEIGHT), want, other)


def test_an_iterate_that_is_the_last_loses_nothing(tuned, answered):
    prompt, blocks = answered[0]
    ids, known = next(cllm.drawn([(prompt, [states[-1:] for states in blocks])], 0))
    assert torch.equal(ids[0], ids[1])
    assert tuned.learn(ids, known)["consistency"] == 0


def test_it_gets_consistent(tuned, answered):
    found = [tuned.learn(*one)["right"] for one in itertools.islice(cllm.drawn(answered, 1), 40)]
    assert np.mean(found[-8:]) > np.mean(found[:8]) + 0.1


# Runs


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (set_block.SetBlockRun, set_block.SetBlock(block=6)),
        (lud.LudRun, lud.Lud(block=4, sure=0.0)),
    ],
    ids=["set-block", "lud"],
)
def test_a_run_that_was_left_goes_on_as_if_not(kind, method, source, tmp_path):
    whole, left, again = (run_of(kind, method, source, tmp_path / "run") for _ in range(3))
    batches = list(itertools.islice(rows(LENGTH, 2, 0), 6))
    found = [whole.learn(*batch) for batch in batches]
    for batch in batches[:3]:
        left.learn(*batch)
    left.save()
    again.load()
    for batch in batches[3:]:
        again.learn(*batch)
    assert all(torch.equal(again.parts[0][n], t) for n, t in whole.parts[0].items())
    assert sum(found[-1].values()) < sum(found[0].values())
    for name, other in (("rate", {"rate": 2e-3}), ("length", {"length": 20})):
        with pytest.raises(
            InputError, match=f"holds a run with {name} = .*options that it was begun"
        ):
            run_of(kind, method, source, tmp_path / "run", **other).load()
    with pytest.raises(InputError, match="holds a run with block = .*, not 5"):
        run_of(kind, type(method)(block=5), source, tmp_path / "run").load()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "loop"), [("set-block", "sbd"), ("lud", "lud"), ("cllm", "jacobi")]
)
def test_a_build_decodes_with_it(name, loop, folder, tmp_path):
    """At its strict setting, token by token as the tuned model does by plain torch."""
    out, tokens = tmp_path / "out", list(range(20, 32))
    settings = {"out": out, "minutes": 0.01, "length": LENGTH, "rows": 2, "samples": 2, "block": 4}
    made = train(name, folder, settings, rows=rows)
    assert made.file == out and "right" in made.message
    strict = {"sbd": {"block": 1}, "lud": {"threshold": 1.1}, "jacobi": {}}[loop]
    more = {"target": "eager", "max_context": 64, "verify": False}
    with accel.optimize(out, {"loop": {"use": loop, **strict}}, **more) as built:
        found = built.generate(tokens, max_new_tokens=9, eos=[]).tokens[0]
        assert (built.facts.blocks is None) == (name == "cllm")
    text, model = list(tokens), plain(out)
    for _ in found:
        with torch.no_grad():
            said = model(torch.tensor([text])).logits[0, -1]
        said[MASK] = -torch.inf
        text.append(int(said.argmax()))
    assert list(found) == text[len(tokens) :]
    config = json.loads((out / "config.json").read_text())
    told = [config.get(n) for n in ("mask_token_id", "logit_shift", "block_size")]
    assert told == ([None] * 3 if name == "cllm" else [MASK, True, 4])


# What is refused


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("cllm", {"out": None}, "a tuned model is a folder of its own; give out=DIR"),
        (
            "lud",
            {"length": 4},
            "rows of 4 tokens have no room for .* block of 4 says; give length=",
        ),
        ("cllm", {"length": 20}, "answers of 10 tokens have no room for a block of 16"),
        (
            "set-block",
            {"mask": 5},
            "the text has the token 5, which stands .* give mask=… of another",
        ),
        ("set-block", {"mask": 500}, "the model has the token 500 to stand .* give mask=…"),
        ("set-block", {"sure": 0.5}, "set-block has no option sure"),
        ("lud", {"sure": 1.5}, "sure is 1.5; give 0 to 1"),
        ("cllm", {"block": 1}, "block is 1; give 2 to 256"),
    ],
    ids=str,
)
def test_options_that_do_not_do_are_refused(name, settings, why, folder, tmp_path):
    given = {"out": tmp_path / "out", "length": LENGTH, **settings}
    given = {key: value for key, value in given.items() if value is not None}
    with pytest.raises((InputError, RecipeError), match=why):
        train(name, folder, given, rows=rows)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_mask_is_refused(source, tmp_path, monkeypatch):
    facts = source.program.facts
    for config, eos in (({}, ()), ({"pad_token_id": 7}, (7,))):
        monkeypatch.setattr(facts, "config", config)
        monkeypatch.setattr(facts, "eos", eos)
        with pytest.raises(InputError, match="to stand for one that is not known; give mask="):
            run_of(set_block.SetBlockRun, set_block.SetBlock(block=6), source, tmp_path / "run")


def test_loops_refuse_a_model_that_was_not_tuned(folder):
    for loop in ("lud", "sbd"):
        with pytest.raises(RecipeError, match="was not trained to fill blocks"):
            accel.optimize(folder, loop, max_context=64, verify=False)


def test_a_model_with_other_state_is_refused(tmp_path):
    models.make("lfm2", 2).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="cllm: a step runs .* does not take; give a model all of"):
        run_of(Plainly, cllm.Cllm(), opened(tmp_path / "model"), tmp_path / "run")
