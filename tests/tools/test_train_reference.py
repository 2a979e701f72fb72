"""The trainer of the bundled model: what a kill, a torn file or a full disk costs, what is refused, what it reads."""

import json
import random
import signal
import subprocess
import sys
import time
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import causal
import checkpoints
import corpus
import losses
import numpy as np
import pytest
import reference
import reference_data
import torch
from ahead import ahead
from checkpoints import Checkpoints, lock
from losses import head_distance, head_loss
from reference_model import Shape
from rows import Rows, Stage
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
SHAPE = Shape(hidden=8, layers=3, heads=2, kv_heads=1, ffn=8, head_dim=4)
PLAN = reference.Plan(SHAPE, (Stage(64, {32: 1.0}),), save=1e9, tell=1e9)
SAVE = 0.15  # seconds between the checkpoints of a process of its own


@pytest.fixture
def folder(tmp_path):
    """Of a run, with a corpus that is made already."""
    rng = np.random.default_rng(0)
    counts = {}
    for name in ("library", "packages", "prose"):
        np.save(tmp_path / f"corpus-{name}.npy", rng.integers(3, 4096, 2000).astype(np.int16))
        counts[name] = {"texts": 1, "tokens": 2000}
    (tmp_path / "corpus.json").write_text(json.dumps({"parts": counts, "licences": {}}))
    return tmp_path


def begun(folder, plan=PLAN):
    return reference.prepare(folder, plan)


def steps(folder):
    return sorted(int(p.stem.split("-")[1]) for p in folder.glob("checkpoint-*.json"))


def after(folder, tokens, plan=PLAN):
    """A run that was trained for so many tokens, and left."""
    run = begun(folder, plan)
    reference.train(run, run.count.tokens + tokens)
    return run


CHILD = f"""
import resource, sys, time
sys.path[:0] = sys.argv[1:3]
import reference, torch
from checkpoints import lock
from pathlib import Path
from reference_model import Shape
from rows import Stage

torch.set_num_threads(1)
folder = Path(sys.argv[3])
plan = reference.Plan(
    Shape(hidden=8, layers=3, heads=2, kv_heads=1, ffn=8, head_dim=4), (Stage(64, {{32: 1.0}}),), save={SAVE}, tell=1e9
)
"""
FOR_EVER = """
with lock(folder), (folder / "heard").open("a", buffering=1) as out:
    run = reference.prepare(folder, plan)
    print("start", run.count.step, time.monotonic(), file=out)
    taken = reference.train_step

    def told_of(run, batch):
        taken(run, batch)
        print("step", run.count.step, time.monotonic(), file=out)

    reference.train_step = told_of
    reference.train(run)
"""
ON_A_FULL_DISK = """
size = (folder / "checkpoint-000000002.pt").stat().st_size // 2
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
run = reference.prepare(folder, plan)
reference.train(run, run.count.tokens + 64)
"""


def started(code, folder):
    """A process of its own: a fork of this one, which has threads, may hang."""
    tools = ROOT / "tools"
    paths = map(str, (tools / "train", tools / "models", folder))
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, *paths], stderr=subprocess.PIPE, text=True
    )


def training(folder):
    """A process that trains for ever; says in `heard` when each step ended."""
    child, heard = started(FOR_EVER, folder), folder / "heard"
    while not heard.exists() or heard.read_text().count("step") < 3:
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.01)
    return child


@pytest.mark.long
def test_a_kill_loses_what_came_since_the_last_checkpoint_and_no_more(folder):
    """Ten times, at moments that chance picks, within a save as well as between two."""
    heard, rng, reached = folder / "heard", random.Random(0), 0
    for _ in range(10):
        heard.write_text("")
        child = training(folder)
        time.sleep(rng.uniform(0.05, 0.8))
        child.kill()
        child.communicate()
        lines = [line.split() for line in heard.read_text().splitlines() if line.count(" ") == 2]
        assert int(lines[0][1]) == reached, "it goes on from the newest checkpoint"
        ended = {int(step): float(at) for _, step, at in lines}
        found = begun(folder)
        reached = max(0, found.saved)
        lost = max(ended.values()) - ended[reached]
        slowest = max(b - a for a, b in zip(ended.values(), list(ended.values())[1:], strict=False))
        assert lost <= SAVE + 3 * slowest, "a save ends in the step after the one that it is due in"
        assert len(list(folder.glob("*.pt"))) <= checkpoints.KEPT + 1
    assert reached > 0


@pytest.mark.long
def test_a_run_that_is_left_goes_on_as_if_nothing_had_been(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("whole")
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    whole = after(other, 12 * 64)
    after(folder, 5 * 64)
    parts = after(folder, 7 * 64)
    assert parts.count.step == whole.count.step == 12
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(a, b)
    fresh = after(folder, 64)
    assert not torch.equal(fresh.model.embed_tokens.weight, whole.model.embed_tokens.weight)


@pytest.mark.long
def test_a_signal_ends_and_saves(folder):
    child = training(folder)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate()
    assert child.returncode == 0, errors
    last = (folder / "heard").read_text().splitlines()[-1].split()
    assert steps(folder)[-1] == int(last[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("harm", ["cut", "changed", "no digest", "gone"])
def test_a_torn_checkpoint_is_passed_over_and_told_of(folder, harm, capsys):
    after(folder, 3 * 64)
    run = after(folder, 2 * 64)
    assert steps(folder) == [3, 5]
    file = folder / "checkpoint-000000005.pt"
    content = file.read_bytes()
    match harm:
        case "cut":
            file.write_bytes(content[: len(content) // 2])
        case "changed":
            file.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
        case "no digest":
            file.with_suffix(".json").write_text("")
        case "gone":
            file.unlink()
    found = begun(folder)
    assert found.count.step == 3 < run.count.step
    assert "checkpoint-000000005.pt is not whole" in capsys.readouterr().out
    for file in folder.glob("checkpoint-*.pt"):
        file.write_bytes(b"")
    assert begun(folder).saved == -1


def test_the_two_newest_are_kept_and_nothing_else(folder):
    for at in (1, 2, 3):
        (folder / ".new").write_bytes(b"of a process that was killed")
        (folder / f"checkpoint-{at:09}.pt").write_bytes(b"without its digest")
        after(folder, 64)
        assert steps(folder)[-1] == at
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == [
        f"checkpoint-{at:09}.{suffix}" for at in (2, 3) for suffix in ("json", "pt")
    ]
    assert not (folder / ".new").exists()


@pytest.mark.long
def test_a_full_disk_ends_it_and_leaves_the_checkpoint_before(folder):
    after(folder, 2 * 64)
    child = started(ON_A_FULL_DISK, folder)
    _, errors = child.communicate()
    assert child.returncode != 0 and "make room, then --resume" in errors
    assert begun(folder).count.step == 2 and not (folder / ".new").exists()
    assert after(folder, 64).count.step == 3


# What is refused


def test_what_is_another_run_is_refused_in_one_line(folder, monkeypatch):
    after(folder, 64)
    with pytest.raises(SystemExit, match="model of another shape.*give another --run") as told:
        begun(
            folder,
            reference.Plan(Shape(hidden=16, layers=3, heads=2, kv_heads=1, ffn=8, head_dim=4)),
        )
    assert "\n" not in str(told.value)
    tokenizer = reference.reference_export.load_tokenizer()
    tokenizer.add_tokens(["<|more|>"])
    monkeypatch.setattr(reference.reference_export, "load_tokenizer", lambda: tokenizer)
    with pytest.raises(SystemExit, match="another tokenizer: give another --run") as told:
        begun(folder)
    assert "\n" not in str(told.value)


def test_a_run_is_trained_by_one_process_and_gone_on_with_on_purpose(folder, monkeypatch):
    after(folder, 64)

    def call(*words):
        monkeypatch.setattr("sys.argv", ["reference.py", "--nice", "0", *map(str, words)])
        reference.main()

    with pytest.raises(SystemExit, match="outside the checkout"):
        call()
    with pytest.raises(SystemExit, match="add --resume"):
        call("--run", folder)
    with lock(folder), pytest.raises(SystemExit, match="trained by another process"):
        call("--run", folder, "--resume")
    empty = folder / "empty"
    empty.mkdir()
    for file in folder.glob("corpus*"):
        (empty / file.name).write_bytes(file.read_bytes())
    with pytest.raises(SystemExit, match="no checkpoint to release: train first"):
        call("--run", empty, "--release", 1, "--no-compile")


# A release


@pytest.mark.long
def test_a_release_decays_a_copy_and_is_gone_on_from(folder, tmp_path_factory, monkeypatch):
    plan = reference.Plan(SHAPE, PLAN.stages, save=1e9, tell=0)
    after(folder, 3 * 64, plan)
    out = tmp_path_factory.mktemp("reference")
    for file in ("tokenizer.json", "training.json"):
        (out / file).write_bytes((reference_data.REFERENCE / file).read_bytes())
    for module in (reference, reference.reference_export):
        monkeypatch.setattr(module, "REFERENCE", out)
    monkeypatch.setattr(reference, "opened", lambda folder, options: begun(folder, plan))
    reference.release(folder, 4 * 64, None)
    told = json.loads((out / "training.json").read_text())
    assert told["trained"]["step"] == 7 and len(told["lines"]) == 7
    assert (out / "curves.png").exists() and not (folder / "release").exists()
    assert begun(folder, plan).count.step == 3, "the run itself goes on as it was"
    shipped = reference.reference_export.load(out)
    assert not torch.equal(
        shipped.embed_tokens.weight, begun(folder, plan).model.embed_tokens.weight
    )
    for file in folder.glob("checkpoint-*"):
        file.unlink()
    monkeypatch.setattr(reference, "Shape", lambda: SHAPE)
    monkeypatch.setattr(reference.reference_export, "load", lambda: shipped)
    anew = begun(folder, plan)
    assert anew.count.tokens == 7 * 64 and torch.equal(
        anew.model.embed_tokens.weight, shipped.embed_tokens.weight
    )


def test_a_decay_ends_with_the_rows_of_the_last_stage(folder):
    """However many tokens the run has seen; before, rows are as long as they would be without it."""
    stages = (
        Stage(64, {16: 1.0}, until=1000),
        Stage(64, {32: 1.0}, until=2000),
        Stage(64, {64: 1.0}),
    )
    run = begun(folder, reference.Plan(SHAPE, stages))

    def lengths():
        found = []
        for tokens in (900, 1100, 1300, 2100):
            found += run.stage(tokens).lengths
        return found

    assert lengths() == [16, 32, 32, 64]
    run.decay = reference.Decay(800, 800)
    assert lengths() == [16, 32, 64, 64]


# What is read


def text(name, lines=40):
    return "".join(f"value_{name}_{i} = compute({i}, name='{name}')\n" for i in range(lines))


@pytest.fixture
def world(monkeypatch, tmp_path):
    """A library of one file, one held-out file, and distributions: name, licence, content of a file."""
    held = text("held_out")

    def made(*distributions):
        found = []
        for name, licence, content in distributions:
            path = tmp_path / f"{name}.py"
            path.write_text(content)
            listed = SimpleNamespace(
                parts=(path.name,), suffix=".py", locate=lambda path=path: path
            )
            metadata = Message()
            metadata["Name"], metadata["License"] = name, licence
            found.append(SimpleNamespace(metadata=metadata, files=[listed]))
        monkeypatch.setattr(corpus.importlib.metadata, "distributions", lambda: found)

    monkeypatch.setattr(corpus, "sources", lambda: ([DOCUMENTED + text("library")], [held]))
    return SimpleNamespace(held=held, made=made)


DOCUMENTED = (
    '"""'
    + "This module explains at length what it is for and how it is used by others\n" * 8
    + '"""\n'
)


def test_held_out_files_are_left_out_by_content(world, monkeypatch):
    """A package that has a copy of one, under another name and indented otherwise; half of it is its own."""
    copied = "\n".join("    " + line for line in world.held.splitlines()) + "\n"
    world.made(("one", "MIT", text("before") + copied + text("after")))
    parts, licences = corpus.collect(0)
    assert licences["one"] == "MIT"
    (read,) = parts["packages"]
    assert "value_before_3" in read and "value_after_3" in read and "held_out" not in read
    monkeypatch.setattr(corpus, "sources", lambda: ([DOCUMENTED + text("library")], []))
    assert "held_out" in corpus.collect(0)[0]["packages"][0], "else this test sees nothing"


def test_what_is_not_permitted_or_double_is_not_read(world):
    world.made(
        ("one", "MIT", text("one")),
        ("two", "GPL-3.0", text("two")),
        ("three", "BSD", text("one") + text("three")),
    )
    parts, licences = corpus.collect(0)
    assert set(licences) == {"python", "one", "three"}
    everything = "".join(t for texts in parts.values() for t in texts)
    assert (
        everything.count("value_one_3 ") == 1
        and "value_two" not in everything
        and "value_three_3" in everything
    )


def test_no_text_is_refused(world, monkeypatch):
    world.made(("two", "GPL-3.0", text("two")))
    with pytest.raises(SystemExit, match="no text found for packages"):
        corpus.collect(0)

    def missing():
        raise FileNotFoundError("no bisect.py")

    monkeypatch.setattr(corpus, "sources", missing)
    with pytest.raises(
        SystemExit, match="no bisect.py: is this Python's library installed with its sources"
    ):
        corpus.collect(0)


def test_rows_follow_the_seed_and_weigh_what_can_be_known(folder):
    tokenizer = reference.reference_export.load_tokenizer()
    texts = corpus.prepare(folder, tokenizer, 0)
    one, same, other = (
        Rows(tokenizer, texts, seed).draw(Stage(4096, {256: 1.0}), 0) for seed in (1, 1, 2)
    )
    assert torch.equal(one.ids, same.ids) and not torch.equal(one.ids, other.ids)
    assert one.ids.shape == (16, 257) and one.weights.shape == one.kinds.shape == (16, 256)
    only = Rows(tokenizer, texts, 1, mix={"pass_key": 1.0}).draw(Stage(1024, {256: 1.0}), 0)
    assert 0 < (only.weights > 0).float().mean() < 0.5, "answers are few"
    begins = only.ids[:, :-1] == reference_data.BOS
    assert begins.sum() > len(only.ids) and (only.weights[:, :-1][begins[:, 1:]] == 0).all()


# The loss


def differs(loss):
    """How far the loss of a head, and its gradients, are from those of the whole logits."""
    generator = torch.Generator().manual_seed(0)
    n, width, vocabulary = 2500, 6, 11  # more positions than two chunks
    states = torch.randn(n, width, generator=generator).requires_grad_()
    head = torch.randn(vocabulary, width, generator=generator).requires_grad_()
    target = torch.randint(vocabulary, (n,), generator=generator)
    weight = torch.rand(n, generator=generator)
    total, each = loss(states, head, target, weight)
    (3 * total).backward()
    found = total.detach(), each, states.grad, head.grad
    states.grad = head.grad = None
    wanted = F.cross_entropy(states @ head.T, target, reduction="none")
    (3 * (wanted * weight).sum()).backward()
    want = (wanted * weight).sum().detach(), wanted.detach(), states.grad, head.grad
    return max(
        float((a - b).norm() / b.norm()) if a is not None else 1.0
        for a, b in zip(found, want, strict=True)
    )


def test_the_loss_is_cross_entropy_with_its_gradients():
    assert differs(head_loss) < 1e-5


@pytest.mark.parametrize(
    "broken",
    [
        lambda s, h, t, w: head_loss(s, h, t, w**2),
        lambda s, h, t, w: head_loss(s, h.detach(), t, w),
        lambda s, h, t, w: head_loss(s.detach() + 0 * s, h, t, w),
        lambda s, h, t, w: head_loss(s, h, t.roll(1), w),
    ],
)
def test_a_broken_loss_is_seen(broken):
    assert differs(broken) > 1e-3


def distance(states, head, teacher):
    """What `head_distance` says, by PyTorch."""
    want, found = ((x @ head.T).log_softmax(-1) for x in (teacher.detach(), states))
    return F.kl_div(found, want.detach(), log_target=True, reduction="batchmean")


@pytest.mark.parametrize("count", [5, losses.CHUNK + 3])
def test_the_distance_of_an_exit_is_the_divergence_with_its_gradients(count):
    torch.manual_seed(0)
    states, head, teacher = (torch.randn(n, 4, requires_grad=True) for n in (count, 9, count))
    found, wanted = head_distance(states, head, teacher), distance(states, head, teacher)
    torch.testing.assert_close(found, wanted)
    slopes, known = (torch.autograd.grad(x, (states, head)) for x in (found, wanted))
    torch.testing.assert_close(slopes, known)
    assert not torch.allclose(found, distance(teacher, head, states)), "the sides differ"
    assert head_distance(states, head, states) == 0


def test_checkpoints_hold_what_is_safe_to_load(tmp_path):
    """Tensors, numbers and texts; nothing that runs code when it is read."""
    Checkpoints(tmp_path).save(1, {"path": Path("x")})
    with pytest.raises(Exception, match="weights_only|Weights only"):
        Checkpoints(tmp_path).load()


@pytest.mark.parametrize("length", [1, 128, 300])
def test_causal_attention_and_its_slopes_are_those_of_pytorch(length):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, requires_grad=True) for heads in (4, 2, 2))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    found = causal.causal_attention(q, k, v)
    torch.testing.assert_close(found, wanted)
    slopes, known = (torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (found, wanted))
    torch.testing.assert_close(slopes, known)


def test_attention_that_sees_what_is_later_is_seen():
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    wrong = F.scaled_dot_product_attention(q, k, v)
    assert not torch.allclose(causal.causal_attention(q, k, v), wrong)


@pytest.mark.long
def test_batches_that_others_draw_ahead_are_those_drawn_when_asked(folder):
    """In order, whatever process draws them; and the global random numbers are left as they are."""
    tokenizer = reference.reference_export.load_tokenizer()
    rows = Rows(tokenizer, corpus.prepare(folder, tokenizer, 0), 0)
    stages = [Stage(512, {64: 1.0}), Stage(512, {128: 1.0})]
    wanted = [(stages[step % 2], step) for step in range(8)]
    before = torch.get_rng_state()
    alone, several = (list(ahead(rows.draw, wanted, workers)) for workers in (0, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(alone, several, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(alone[0].ids, alone[2].ids)
