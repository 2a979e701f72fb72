"""A process that dies while it writes an artifact, at any step or moment: the path holds the old artifact or the new
one, whole, and the next build leaves nothing of the dead one.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from accel.ir.errors import ArtifactError
from accel.runtime.artifact import atomic
from accel.runtime.artifact.artifact import copy_artifact, open_artifact

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks and signals")

# What dies puts a ready artifact over another. Nobody is left to clean up: no watchdog, as after a power cut.
WRITER = """
import os, shutil, subprocess, sys
from pathlib import Path
from accel.runtime.artifact import atomic
from accel.runtime.artifact.artifact import copy_artifact, open_artifact
from accel.runtime.artifact.workspace import put_back

new, out, exchanges, watched = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
if exchanges == "no":
    atomic._exchanged = lambda *_: False
if watched == "no":
    def none(*_, **__):
        raise OSError("no room for another process")
    subprocess.Popen = none

def write():
    with atomic.AtomicOutputDir(out) as folder:
        shutil.copytree(new, folder, dirs_exist_ok=True)
"""
# Dies before the n-th line of the code that replaces an artifact, for each n, in a fork each. With "alone" each finds
# what the one before left behind, so that some die while they put that right.
STEPS = """
def dies_at(step):
    passed = 0
    def trace(frame, event, _):
        nonlocal passed
        code = frame.f_code
        if "runtime/artifact" not in code.co_filename and "rmtree" not in code.co_name:
            return None
        if event == "line":
            passed += 1
            if passed == step:
                os._exit(9)
        return trace
    sys.settrace(trace)
    write()
    os._exit(0)

def text(folder):
    return {p.name: p.read_text() for p in folder.iterdir()}

old, alone, mine = Path(sys.argv[5]), "alone" in sys.argv, out.parent / ".out.mine"
mine.mkdir()
(mine / "thesis").write_text("years of work")
kinds = [text(old), text(new)]
os.fsync = lambda _: None  # no power is cut here
shutil.copytree(old, out)
found, left, step, code = set(), set(), 0, 9
while code:
    step += 1
    child = os.fork()
    if not child:
        dies_at(step)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left |= {name[-6:] for name in os.listdir(out.parent)}
    put_back(out)  # as all that open it do
    found.add(kinds.index(text(out)))
    if not alone:
        with atomic.AtomicOutputDir(out) as folder:
            shutil.copytree(old, folder, dirs_exist_ok=True)
    if not alone or not code:
        assert sorted(os.listdir(out.parent)) == [".out.mine", "out"], (step, os.listdir(out.parent))
assert (mine / "thesis").read_text() == "years of work"
print(step, found, ".accel" in left)
"""


def writer(code, *arguments, **options):
    """A process that runs WRITER and then `code`."""
    command = [sys.executable, "-c", WRITER + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **options)


def names(path):
    return sorted(p.name for p in path.iterdir())


def digest(path):
    return open_artifact(path).manifest.raw["digest"]


@pytest.mark.long
@pytest.mark.parametrize(
    "exchanges, after",
    [
        ("no", "build"),
        *(
            pytest.param(*c, marks=pytest.mark.long)
            for c in [("yes", "build"), ("yes", "alone"), ("no", "alone")]
        ),
    ],
)
def test_death_before_every_line(tmp_path, exchanges, after):
    """Where folders can be exchanged, and where two renames are needed."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").write_text(name)
        (tmp_path / name / "accel.json").write_text('{"files": {"weights.bin": {}}}')
    (tmp_path / "in").mkdir()
    out = tmp_path / "in" / "out"
    child = writer(STEPS, tmp_path / "new", out, exchanges, "no", tmp_path / "old", after)
    told, _ = child.communicate(timeout=300)
    assert child.returncode == 0
    steps, found = told.strip().split(maxsplit=1)
    assert int(steps) > 50 and found == "{0, 1} True", "the control: deaths at all stages"


BETWEEN = """
def stuck(a, b, plain=os.rename):
    plain(a, b)
    os._exit(9)
os.rename = stuck
write()
"""


def between(artifact, out):
    """The state between the two renames: the target is gone."""
    shutil.copytree(artifact("base"), out)
    assert writer(BETWEEN, artifact("int4"), out, "no", "no").wait(60) == 9
    assert not out.exists(), "the control: without what follows it would stay lost"


def test_each_way_to_open_finds_it(artifact, tmp_path):
    """In Python, on the command line, as a source to copy, behind a link."""
    import accel

    out = tmp_path / "out"
    for path in (out, tmp_path / "link"):
        between(artifact, out)
        if path != out:
            path.symlink_to(out)
        with accel.load(path) as model:
            assert len(model.generate([5, 6, 7], 4, eos=[]).tokens[0]) == 4
        shutil.rmtree(out)
    between(artifact, out)
    command = [
        sys.executable,
        "-m",
        "accel.cli",
        "run",
        out,
        "--tokens",
        "5,6",
        "--max-tokens",
        "2",
    ]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    assert digest(out) == digest(artifact("base"))


def test_a_build_finds_it(artifact, tmp_path):
    """A build that fails leaves the old one there, one that does not leaves the new one, both nothing else."""
    out = tmp_path / "out"
    between(artifact, out)
    with pytest.raises(ZeroDivisionError), atomic.AtomicOutputDir(out):
        raise ZeroDivisionError
    assert digest(out) == digest(artifact("base")) and names(tmp_path) == ["out"]
    shutil.rmtree(out)
    between(artifact, out)
    copy_artifact(open_artifact(artifact("int4")), out)
    assert digest(out) == digest(artifact("int4")) and names(tmp_path) == ["out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_what_cannot_be_put_back_is_named(artifact, tmp_path):
    out = tmp_path / "folder" / "out"
    between(artifact, out)
    out.parent.chmod(0o500)
    try:
        with pytest.raises(ArtifactError, match=r"mv .*/old .*/out"):
            open_artifact(out)
    finally:
        out.parent.chmod(0o700)


def test_what_cannot_be_renamed_is_named(artifact, tmp_path, monkeypatch):
    """As above, for root too."""
    out = tmp_path / "out"
    between(artifact, out)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", denied)
    with pytest.raises(ArtifactError, match=r"Permission denied.*mv .*/old .*/out"):
        open_artifact(out)


def test_a_build_under_way_is_left_alone(artifact, tmp_path):
    """Another process writes the same path: its folder is not taken for one of a dead process."""
    out = tmp_path / "out"
    with atomic.AtomicOutputDir(out) as first:
        shutil.copytree(artifact("base"), first, dirs_exist_ok=True)
        copy_artifact(open_artifact(artifact("int4")), out)
        assert first.is_dir() and digest(out) == digest(artifact("int4"))
    assert digest(out) == digest(artifact("base")) and names(tmp_path) == ["out"]


def test_what_a_user_removed_stays_removed(artifact, tmp_path):
    """A process died after the new one was in place; then both were removed by hand."""
    out = tmp_path / "out"
    shutil.copytree(artifact("base"), out)
    code = """
    def dead(*_, **__):
        os._exit(9)
    shutil.rmtree = dead
    write()
    """
    assert writer(code, artifact("int4"), out, "no", "no").wait(60) == 9
    assert digest(out) == digest(artifact("int4")) and len(names(tmp_path)) == 2
    shutil.rmtree(out)
    with pytest.raises(ArtifactError, match="does not exist"):
        open_artifact(out)


def test_a_new_one_reaches_the_disk_before_an_old_one_goes(artifact, tmp_path, monkeypatch):
    """After a power cut a renamed file may be empty; the old artifact must then still be there."""
    order = []
    for module, name in ((os, "fsync"), (atomic, "_exchanged"), (os, "rename")):
        plain = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, n=name, plain=plain: (order.append(n), plain(*a))[1]
        )
    copy_artifact(open_artifact(artifact("base")), tmp_path / "out")
    assert "fsync" not in order, "nothing is at stake"
    order.clear()
    copy_artifact(open_artifact(artifact("int4")), tmp_path / "out")
    assert order.count("fsync") > len(names(artifact("int4"))) and order[-1] != "fsync"


MOMENTS = """
old = open_artifact(sys.argv[5])
for turn in range(10_000):
    write()
    copy_artifact(old, out)
    if turn == 0:  # all that is imported at first use is
        print("ready", flush=True)
"""


def killed(artifact, out, rng, count):
    """Kill a process that writes over and over, `count` times at random moments; how often each artifact was found."""
    mine = out.parent / "mine"
    mine.mkdir(parents=True)
    (mine / "thesis").write_text("years of work")
    kinds = {digest(artifact(name)): name for name in ("base", "int4")}
    found = dict.fromkeys(kinds.values(), 0)
    for turn in range(count):
        shutil.rmtree(out, ignore_errors=True)
        copy_artifact(open_artifact(artifact("base")), out)
        how = rng.choice(["yes", "no"]), rng.choice(["yes", "no", "no"])
        child = writer(MOMENTS, artifact("int4"), out, *how, artifact("base"))
        assert child.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.15)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        found[kinds[digest(out)]] += 1
        copy_artifact(open_artifact(artifact("int4")), out)
        settle = time.monotonic() + 10  # its watchdog may be at work
        while names(out.parent) != ["mine", "out"] and time.monotonic() < settle:
            time.sleep(0.02)
        assert names(out.parent) == ["mine", "out"], f"turn {turn}: {how}"
        assert digest(out) == digest(artifact("int4"))
    assert (mine / "thesis").read_text() == "years of work"
    return found


@pytest.mark.long
def test_kill_9_at_random_moments(artifact, tmp_path):
    killed(artifact, tmp_path / "in" / "out", random.Random(7), 8)


@pytest.mark.long
def test_kill_9_at_two_hundred_moments(artifact, tmp_path):
    found = killed(artifact, tmp_path / "in" / "out", random.Random(11), 200)
    assert min(found.values()) > 0


@pytest.mark.long
def test_kill_9_of_builds(artifact, tmp_path):
    """`accel-compile build` itself, over an older artifact, at moments all through the build."""
    import models

    model, out = tmp_path / "model", tmp_path / "out"
    models.llama().save_pretrained(model)
    command = [sys.executable, "-m", "accel.cli", "build", model, "--out", out, "--no-verify"]
    start = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - start
    rng = random.Random(13)
    for _ in range(6):
        shutil.rmtree(out)
        copy_artifact(open_artifact(artifact("int4")), out)
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.4, 1) * whole)
        child.kill()
        child.wait()
        open_artifact(out)
    subprocess.run(command, check=True, capture_output=True)
    assert names(tmp_path) == ["model", "out"]
