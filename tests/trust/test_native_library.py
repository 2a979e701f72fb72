"""The compiled operators are code that is loaded: from where, whose, whole; and how they are made."""

import io
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import accel
from accel.ir.user_cache import private_folder
from accel.lowering.onnx import native
from accel.lowering.onnx.native import compile as compiling

posix = pytest.mark.skipif(os.name != "posix", reason="rights of POSIX systems")
needs_compiler = pytest.mark.skipif(
    compiling.find_compiler() is None, reason="no C++ compiler was found"
)
LIBRARY = b"\x7fELF, as it was compiled"


class Compiler:
    """A stand-in for a compiler: writes LIBRARY, or fails as told; notes how it was called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.path, self.calls, self._then = folder / "c++", folder / "calls", folder / "then"
        self.then("")
        self.path.write_text(
            "#!/bin/sh\n"
            '[ "$1" = --version ] && exit 0\n'
            f'echo "$*" >> {self.calls}\n'
            f". {self._then}\n"
            'for out; do :; done\nprintf "%s" "' + LIBRARY.decode() + '" > "$out"\n'
        )
        self.path.chmod(0o755)
        monkeypatch.setenv("CXX", str(self.path))

    def then(self, script: str) -> None:
        self._then.write_text(script + "\n")

    @property
    def links(self) -> int:
        return sum("-shared" in line for line in self._lines())

    @property
    def asked(self) -> int:
        return len(self._lines())

    def _lines(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.forget()
    yield tmp_path / "cache" / "accel"
    native.forget()


@pytest.fixture
def compiler(tmp_path, monkeypatch, cache):
    return Compiler(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def artifact(build):
    """Built before a test takes another cache."""
    return build("llama").compiled.artifact


def again() -> tuple[Path | None, str]:
    """What a new process finds."""
    native.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return native.library()


@posix
def test_what_is_made_is_the_users_alone_and_found_again(compiler, cache):
    path, reason = again()
    assert path is not None and not reason and path.read_bytes() == LIBRARY
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(not file.stat().st_mode & 0o022 for file in cache.iterdir())
    assert not list(cache.glob("*.parts"))
    asked = compiler.asked
    assert again() == (path, "") and compiler.asked == asked


@posix
def test_the_language_of_the_compiler_makes_no_other_library(compiler, cache, monkeypatch):
    """Its version is told in the user's language, maybe in bytes that Python cannot read."""
    script = compiler.path.read_text().splitlines(keepends=True)
    told = """[ "$1" = --version ] && { [ "$LC_ALL" = C ] || printf 'f\\374r %s' "$LANG"; exit 0; }\n"""
    compiler.path.write_text("".join([script[0], told, *script[1:]]))
    monkeypatch.delenv("LC_ALL", raising=False)
    paths = set()
    for language in ("C", "de_DE"):
        monkeypatch.setenv("LANG", language)
        paths.add(again())
    assert len(paths) == 1 and compiler.links == 1


def cut(path: Path) -> None:
    path.write_bytes(LIBRARY[:5])


def swapped(path: Path) -> None:
    path.write_bytes(LIBRARY[::-1])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def unrecorded(path: Path) -> None:
    path.with_suffix(".sha256").unlink()


def recorded_at_length(path: Path) -> None:
    path.with_suffix(".sha256").write_bytes(b"0" * 100_000)


def linked(path: Path) -> None:
    """To a file of the right content."""
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def writable(path: Path) -> None:
    path.chmod(0o722)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def left_over(path: Path) -> None:
    """By a process that was killed while it compiled."""
    path.unlink()
    path.with_suffix(".parts").mkdir()
    (path.with_suffix(".parts") / "library.so").write_bytes(b"half")


DAMAGES = [
    cut, swapped, emptied, unrecorded, recorded_at_length, linked, writable, a_pipe, left_over,
]  # fmt: skip


@posix
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_library_that_is_not_what_was_compiled_is_compiled_anew(damage, compiler, cache):
    path, _ = again()
    damage(path)
    links = compiler.links
    assert again() == (path, "") and compiler.links == links + 1
    assert path.read_bytes() == LIBRARY and not path.is_symlink()
    assert again() == (path, "") and compiler.links == links + 1


@posix
def test_a_damaged_library_that_cannot_be_made_again_is_not_loaded(compiler, cache):
    path, _ = again()
    cut(path)
    compiler.then("echo no such flag >&2; exit 1")
    found, reason = again()
    assert found is None and "no such flag" in reason


@posix
def test_a_library_that_another_user_owns_is_not_loaded(compiler, cache, monkeypatch):
    path, _ = again()
    real, links = os.fstat, compiler.links

    def foreign(handle):
        found = real(handle)
        same = os.path.samestat(found, path.stat())
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:])) if same else found

    monkeypatch.setattr(os, "fstat", foreign)
    again()
    assert compiler.links == links + 1


def owned_by_another(cache, monkeypatch):
    user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: user)


def group_writable(cache, monkeypatch):
    cache.chmod(0o770)


def world_writable(cache, monkeypatch):
    cache.chmod(0o707)


def a_link(cache, monkeypatch):
    other = cache.with_name("other")
    cache.rename(other)
    cache.symlink_to(other)


def under_an_open_folder(cache, monkeypatch):
    cache.parent.chmod(0o777)


@posix
@pytest.mark.parametrize(
    ("spoil", "next_act"),
    [
        (owned_by_another, "XDG_CACHE_HOME"),
        (group_writable, "chmod 700"),
        (world_writable, "chmod 700"),
        (a_link, "XDG_CACHE_HOME"),
        (under_an_open_folder, "chmod o-w"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_cache_that_others_can_fill_is_refused_and_the_user_told(
    spoil, next_act, compiler, cache, monkeypatch
):
    again()
    asked = compiler.asked
    spoil(cache, monkeypatch)
    native.forget()
    with pytest.warns(UserWarning, match="portable kernels run instead"):
        path, reason = native.library()
    assert path is None and str(cache) in reason and next_act in reason
    assert compiler.asked == asked, "nothing is compiled into it either"


@posix
def test_a_cache_under_a_sticky_folder_is_fine(compiler, cache):
    again()
    cache.parent.chmod(0o1777)
    assert again()[0] is not None


def test_one_process_asks_and_warns_once(compiler, cache):
    compiler.then("echo no such flag >&2; exit 1")
    with pytest.warns(UserWarning, match="no such flag"):
        first = native.library()
    asked = compiler.asked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is first and compiler.asked == asked


LASTING = "echo error: no such flag >&2; exit 1"
PASSING = {
    "killed": "kill -9 $$",
    "of_memory": "echo 'virtual memory exhausted: Cannot allocate memory' >&2; exit 1",
    "its_child_was_killed": "echo 'fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
    "full_disk": "echo 'error writing: No space left on device' >&2; exit 1",
}


def test_a_failure_of_the_compilers_own_is_remembered_for_a_day(compiler, cache):
    compiler.then(LASTING)
    path, reason = again()
    assert path is None and "no such flag" in reason and "CXX" in reason
    asked = compiler.asked
    assert again() == (None, reason) and compiler.asked == asked
    (failed,) = cache.glob("*.failed")
    assert str(failed) in reason
    compiler.then("")
    day = time.time() - 24 * 3600 - 1
    os.utime(failed, (day, day))
    assert again()[0] is not None


@pytest.mark.parametrize("script", PASSING.values(), ids=PASSING.keys())
def test_a_failure_of_the_machines_is_not_remembered(script, compiler, cache):
    compiler.then(script)
    assert again()[0] is None and not list(cache.glob("*.failed"))
    compiler.then("")
    assert again()[0] is not None


def test_a_compiler_that_hangs_is_given_up_and_not_remembered(compiler, cache, monkeypatch):
    monkeypatch.setattr(compiling, "SECONDS", 1)
    compiler.then("exec sleep 60")
    start = time.monotonic()
    path, reason = again()
    assert path is None and "timed out" in reason and time.monotonic() - start < 20
    assert not list(cache.glob("*.failed"))


ONE_LOAD = "from accel.lowering.onnx import native; path, why = native.library(); assert path, why"


@pytest.mark.long
def test_processes_that_start_together_compile_once(compiler, cache):
    compiler.then("sleep 0.3")
    loads = [
        subprocess.Popen([sys.executable, "-c", ONE_LOAD], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    told = [load.communicate(timeout=120)[1] for load in loads]
    assert [load.returncode for load in loads] == [0, 0, 0], told
    assert compiler.links == 1
    assert sum("compiling kernels" in text for text in told) == 1


def test_progress_is_on_stderr_and_nothing_is_on_stdout(compiler, cache, capsys):
    again()
    out, err = capsys.readouterr()
    assert out == "" and err == "accel: compiling kernels for this processor, once\n"
    again()
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_it_is_one_line(compiler, cache, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    again()
    text = terminal.getvalue()
    assert text.endswith("100%\n") and text.count("\n") == 1 and text.count("\r") > 5


def test_without_stderr_it_is_silent(compiler, cache, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert again()[0] is not None


def test_a_caller_sees_how_far_it_is(compiler, cache, capsys):
    native.forget()
    told = []
    native.library(lambda step, done: told.append(done))
    assert told[0] == 0 and told[-1] == 1 and told == sorted(told) and len(told) > 5
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_without_a_compiler_there_is_a_reason_and_no_warning(path, cache, monkeypatch):
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("CXX", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, reason = native.library()
    assert found is None and "no C++ compiler" in reason and not cache.exists()


def test_where_the_system_has_no_user_ids_nothing_is_asked_of_them(compiler, cache, monkeypatch):
    """As on Windows; the rest of it cannot be run here."""
    monkeypatch.delattr(os, "getuid")
    assert again()[0] is not None and private_folder() == cache


@needs_compiler
@posix
def test_a_model_runs_all_the_same_and_its_tuning_says_why(artifact, cache, monkeypatch):
    assert "native" in artifact.entries["step"].graphs
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match="chmod 700"), accel.load(artifact.path) as model:
        assert len(model.generate([1, 2], 2).tokens[0]) == 2
        assert "chmod 700" in model.tuning.refused["native"] and model.tuning.kernels != "native"
    cache.chmod(0o700)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    native.forget()
    for _ in range(2):  # measured, then remembered: the reason is today's
        with accel.load(artifact.path) as model:
            assert "no C++ compiler" in model.tuning.refused["native"]
    with (
        pytest.raises(accel.ArtifactError, match="no C\\+\\+ compiler"),
        accel.load(artifact.path, kernels="native") as model,
    ):
        model.generate([1, 2], 2)


@needs_compiler
@pytest.mark.long
def test_the_real_library_cut_off_is_made_again_and_loads(cache):
    """A mapped file that is too short ends the process, so in one of its own."""
    script = "import onnxruntime as ort; from accel.lowering.onnx import native; native.register(ort.SessionOptions())"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
        (path,) = cache.glob("*.so")
        os.truncate(path, 100_000)
