"""Graphs and weights of an artifact are checked once, and again as soon as a file is another."""

import os
import shutil

import pytest

from accel.ir.errors import ArtifactError
from accel.runtime.artifact import artifact as module
from accel.runtime.artifact import checked
from accel.runtime.artifact.artifact import copy_artifact, open_artifact


@pytest.fixture
def copy(toy, tmp_path, monkeypatch):
    """An artifact that counts as settled, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checked, "_SETTLED", 0)
    copy_artifact(open_artifact(toy.path), tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def hashed(monkeypatch):
    """How often sums were computed."""
    found, real = [], module._check_hashes
    monkeypatch.setattr(module, "_check_hashes", lambda *a: (found.append(a[0]), real(*a)))
    return found


def test_what_has_not_changed_is_checked_once(copy, hashed):
    assert open_artifact(copy).manifest == open_artifact(copy).manifest
    assert len(hashed) == 1


def test_what_was_just_written_is_checked_each_time(copy, hashed, monkeypatch):
    monkeypatch.setattr(checked, "_SETTLED", 10**18)
    open_artifact(copy), open_artifact(copy)
    assert len(hashed) == 2


def flip(file):
    """Change a byte in place, and set the file's time back."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(before.st_size // 2)
        byte = opened.read(1)
        opened.seek(before.st_size // 2)
        opened.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["weights.bin", "step.onnx"])
def test_a_byte_that_changed_is_found_though_times_were_set_back(copy, name):
    open_artifact(copy)
    flip(copy / name)
    with pytest.raises(ArtifactError):
        open_artifact(copy)


def test_a_file_put_in_its_place_is_checked(copy, tmp_path):
    open_artifact(copy)
    shutil.copy2(copy / "weights.bin", tmp_path / "other")
    flip(tmp_path / "other")
    os.replace(tmp_path / "other", copy / "weights.bin")
    with pytest.raises(ArtifactError, match=r"weights\.bin"):
        open_artifact(copy)


def test_another_folder_of_the_same_name_is_checked(copy, hashed):
    open_artifact(copy)
    shutil.copytree(copy, copy.with_name("more"))
    shutil.rmtree(copy)
    copy.with_name("more").rename(copy)
    open_artifact(copy)
    assert len(hashed) == 2


def test_without_a_cache_all_is_checked(copy, hashed, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    open_artifact(copy), open_artifact(copy)
    assert len(hashed) == 2
