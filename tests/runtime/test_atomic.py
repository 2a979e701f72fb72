"""An output folder ends as the whole artifact or as nothing, whatever happens."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from accel.ir.errors import ArtifactError
from accel.runtime.artifact import atomic
from accel.runtime.artifact.atomic import AtomicOutputDir


def write(folder, text="1"):
    (folder / "weights.bin").write_text(text)
    (folder / "accel.json").write_text('{"files": {"weights.bin": {}}}')


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_it_appears_whole(tmp_path):
    out = tmp_path / "deep" / "er" / "out"
    with AtomicOutputDir(out) as folder:
        assert folder.parent.parent == out.parent and not out.exists()
        write(folder)
    assert names(out) == ["accel.json", "weights.bin"] and names(out.parent) == ["out"]
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def test_an_exception_leaves_nothing(tmp_path):
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), AtomicOutputDir(tmp_path / "new" / "out") as folder:
            write(folder)
            raise error
    assert names(tmp_path) == []


def test_what_may_be_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for text in ("1", "2"):  # an empty folder, then an artifact
        with AtomicOutputDir(out) as folder:
            write(folder, text)
    assert (out / "weights.bin").read_text() == "2" and names(tmp_path) == ["out"]
    with pytest.raises(ValueError), AtomicOutputDir(out) as folder:
        write(folder, "3")
        raise ValueError
    assert (out / "weights.bin").read_text() == "2", "a failed build keeps the old artifact"


@pytest.mark.parametrize(
    "manifest, other, told",
    [
        ("{}", "thesis.tex", "lists no files"),
        ("not JSON", "thesis.tex", "lists no files"),
        ('{"files": []}', "thesis.tex", "lists no files"),
        ('{"files": {"weights.bin": {}}}', "thesis.tex", "holds thesis.tex beside the files"),
        ('{"files": {"weights.bin": {}}}', "deep/er/notes", "holds deep/er/notes beside the files"),
    ],
)
def test_a_file_that_no_manifest_lists_is_kept(tmp_path, manifest, other, told):
    out = tmp_path / "out"
    (out / other).parent.mkdir(parents=True)
    (out / other).write_text("years of work")
    (out / "accel.json").write_text(manifest)
    (out / "weights.bin").write_text("1")
    with pytest.raises(ArtifactError, match=told), AtomicOutputDir(out):
        raise AssertionError("the body must not run")
    assert (out / other).read_text() == "years of work"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="exchanges two folders")
def test_there_is_no_moment_without_the_destination(tmp_path, monkeypatch):
    """Were renames needed to replace it, it would be gone between them."""
    with AtomicOutputDir(tmp_path / "out") as folder:
        write(folder, "old")
    seen = []
    plain = os.rename
    monkeypatch.setattr(
        os, "rename", lambda a, b: (seen.append(os.path.exists(tmp_path / "out")), plain(a, b))
    )
    with AtomicOutputDir(tmp_path / "out") as folder:
        write(folder, "new")
    assert seen == [] and (tmp_path / "out" / "weights.bin").read_text() == "new"
    assert names(tmp_path) == ["out"]
    monkeypatch.setattr(
        atomic, "_exchanged", lambda *_: False
    )  # the control: elsewhere it takes renames
    with AtomicOutputDir(tmp_path / "out") as folder:
        write(folder, "newer")
    assert seen == [True, False] and (tmp_path / "out" / "weights.bin").read_text() == "newer"


def test_what_may_not_be_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for out, words in [
        ("mine", "holds files but no accel.json"),
        ("file", "is a file"),
        ("file/x", "cannot write"),
    ]:
        with pytest.raises(ArtifactError, match=words), AtomicOutputDir(tmp_path / out):
            raise AssertionError("the body must not run")
    with pytest.raises(ArtifactError, match="below it"), AtomicOutputDir("/"):
        pass
    assert names(tmp_path) == ["file", "mine"]


@pytest.mark.skipif(not os.access("/proc", os.W_OK), reason="no folder claims to be writable")
def test_where_nothing_can_be_written_is_told_before_any_work():
    """`/proc` grants root to write, and lets no one."""
    with pytest.raises(ArtifactError, match="cannot write in /proc: .*another output folder"):
        AtomicOutputDir("/proc/out").check()


def test_the_destination_filled_meanwhile(tmp_path):
    with (
        pytest.raises(ArtifactError, match="holds files"),
        AtomicOutputDir(tmp_path / "out") as folder,
    ):
        write(folder)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other").write_text("x")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["other"]


def test_a_full_disk(tmp_path):
    with (
        pytest.raises(ArtifactError, match="needed.*free"),
        AtomicOutputDir(tmp_path / "out", needs=1 << 60),
    ):
        raise AssertionError("the body must not run")
    for needs, words in ((None, "bytes had been written"), (5, "5 bytes are needed")):
        with (
            pytest.raises(ArtifactError, match=words),
            AtomicOutputDir(tmp_path / "out", needs=needs) as folder,
        ):
            write(folder)
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as full:
                raise RuntimeError("a library's own words") from full
    with pytest.raises(OSError, match="other"), AtomicOutputDir(tmp_path / "out"):
        raise OSError(errno.EIO, "other")
    assert names(tmp_path) == []


KILLED = """
import sys, time
from accel.runtime.artifact.atomic import AtomicOutputDir
with AtomicOutputDir(sys.argv[1]) as folder:
    (folder / "weights.bin").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(60)
"""
KILLED_AT_RENAME = """
import os, sys, time
from accel.runtime.artifact import atomic
def stuck(a, b, plain=os.rename):
    plain(a, b)
    print(b, flush=True)
    time.sleep(60)
with atomic.AtomicOutputDir(sys.argv[1]) as folder:
    (folder / "accel.json").write_text("new")
    os.rename, atomic._exchanged = stuck, lambda *_: False
"""


def kill_in(code, out, after_kill=lambda: None):
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True
    )
    reached = child.stdout.readline().strip()
    assert os.path.isdir(reached)
    after_kill()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    return reached


def eventually(check):
    end = time.monotonic() + 10
    while not check() and time.monotonic() < end:
        time.sleep(0.02)
    assert check()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_kill_9_leaves_nothing(tmp_path):
    kill_in(KILLED, tmp_path / "deep" / "out")
    eventually(lambda: names(tmp_path) == [])


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_kill_9_control(tmp_path):
    """Without the watchdog the folder would stay: the test above can fail."""
    code = KILLED.replace(
        "with AtomicOutputDir",
        "import accel.runtime.artifact.atomic as s\ns._WATCHDOG = ''\nwith AtomicOutputDir",
    )
    folder = kill_in(code, tmp_path / "out")
    time.sleep(0.5)
    assert os.path.isdir(folder)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_kill_9_between_the_renames_brings_the_old_one_back(tmp_path):
    with AtomicOutputDir(tmp_path / "out") as folder:
        write(folder, "old")
    kill_in(KILLED_AT_RENAME, tmp_path / "out")
    eventually(lambda: names(tmp_path) == ["out"])
    assert (tmp_path / "out" / "weights.bin").read_text() == "old"
