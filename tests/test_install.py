"""An installation without the extra `compile` runs artifacts; a wheel of this checkout works elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import models
import pytest

import accel
from accel.commands import demo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BROUGHT = {"huggingface_hub"}  # by tokenizers, in a base installation too
EXTRAS = PROJECT["project"]["optional-dependencies"]
EXTRA = sorted({re.match(r"[\w-]+", d)[0] for d in EXTRAS["compile"]} - BROUGHT)

# A base installation, as far as imports can tell: packages of the extra are not there.
PLAIN = """
import contextlib, importlib.abc, io, json, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

blocked, calls = json.loads(sys.argv[1])
sys.meta_path.insert(0, Missing())
from accel.cli import app

def run(words):
    out, error = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            app(words, prog_name="accel-compile")
        code = 0
    except SystemExit as end:
        code = end.code
    return [code, out.getvalue(), error.getvalue()]

told = [run(words) for words in calls]
print(json.dumps(told))
"""
README_LOADS = """
import accel
with accel.load("artifact") as model:
    print("".join(model.stream("import os", max_new_tokens=8, temperature=0.8, seed=7)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with `my-model`, two layers of random weights with the bundled tokenizer, and its artifact."""
    folder = tmp_path_factory.mktemp("install")
    models.wordy("install").save_pretrained(folder / "my-model")
    shutil.copy(demo.reference() / "tokenizer.json", folder / "my-model")
    accel.optimize(
        folder / "my-model", out=folder / "artifact", max_context=128, verify=False
    ).close()
    return folder


def plain(folder, calls, blocked=EXTRA, code=PLAIN):
    """[exit code, stdout, stderr] of each command in a Python that lacks packages."""
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps([blocked, calls])],
        capture_output=True, text=True, cwd=folder, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_commands_of_the_engine_need_only_the_base(folder):
    calls = [
        ["--help"], ["--version"], ["recipes"], ["build", "--help"], ["inspect", "artifact", "--measure"],
        ["inspect", "artifact", "--picture", "layers.svg", "--json"],
        ["run", "artifact", "--prompt", "import os", "--json"],
        ["bench", "artifact", "--context", "4", "--tokens", "2", "--repeat", "1", "--json"],
    ]  # fmt: skip
    for call, (code, out, error) in zip(calls, plain(folder, calls), strict=True):
        assert code == 0 and out, f"{call}: {error}"
        if "run" in call:
            assert len(json.loads(out)["tokens"]) == 64


@pytest.mark.long
def test_commands_of_the_compiler_name_the_extra(folder):
    calls = [
        ["build", "my-model", "--out", "made"], ["run", "my-model", "--prompt", "x"], ["demo"], ["explain", "snapkv"],
        ["smoke", "llama"], ["choose", "model", "--prompts", "p.txt"], ["recipes", "float16"],
    ]  # fmt: skip
    for call, (code, out, error) in zip(calls, plain(folder, calls), strict=True):
        assert code == 1 and not out, call
        assert re.fullmatch(
            r"error: this needs the package torch.* pip install .*'\.\[compile\]'\n", error
        ), f"{call}: {error}"
    assert not (folder / "made").exists()


def test_what_is_not_there_is_named_as_with_the_extra(folder):
    ((code, _, error),) = plain(folder, [["run", "artifaxt", "--prompt", "x"]])
    assert code == 1 and "did you mean artifact?" in error


def test_artifacts_run_where_posix_calls_are_missing(folder):
    """As on Windows, as far as a POSIX system can show: these modules and functions are not there."""
    code = "import os, signal\n" + "".join(
        f"{name.partition('.')[0]}.__dict__.pop('{name.partition('.')[2]}', None)\n"
        for name in ("os.getuid", "os.sched_getaffinity", "signal.SIGHUP", "signal.SIGALRM")
    )
    calls = [["inspect", "artifact"], ["run", "artifact", "--prompt", "x"], ["recipes"]]
    modules = [*EXTRA, "fcntl", "resource", "pwd", "grp", "termios"]
    for call, (status, out, error) in zip(
        calls, plain(folder, calls, modules, code + PLAIN), strict=True
    ):
        assert status == 0 and out, f"{call}: {error}"


def test_a_missing_package_of_the_base_is_no_missing_extra(folder):
    ((code, _, error),) = plain(folder, [["run", "artifact", "--prompt", "x"]], ["tokenizers"])
    assert code == 1 and "[compile]" not in error


def test_the_front_door_names_the_extra():
    code = PLAIN.partition("from accel.cli")[0] + (
        "import accel\n"
        "for name in ('optimize', 'smoke'):\n"
        "    try:\n"
        "        getattr(accel, name)\n"
        "    except ImportError as error:\n"
        "        assert isinstance(error, accel.ExtraError), error\n"
        "        print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps([EXTRA, []])], capture_output=True, text=True
    )
    assert run.stdout.count("'.[compile]'") == 2, run.stderr


def tracked(*folders):
    """Files that git holds or would hold, relative to the checkout."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z", *folders],
        capture_output=True, check=True,
    )  # fmt: skip
    return [n for n in listed.stdout.decode().split("\0") if n and (ROOT / n).is_file()]


@pytest.fixture(scope="module")
def packaged():
    """Every file of the packages, as a wheel names it."""
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    return {
        f"{package.replace('.', '/')}/{Path(name).relative_to(folder).as_posix()}"
        for package, folder in mapped.items()
        for name in tracked(folder)
        if not name.endswith("_template.toml")  # of a checkout's tools
    }


def test_setuptools_takes_every_file(packaged):
    code = """
from setuptools import Distribution
project = Distribution({"script_name": "setup.py"})
project.parse_config_files()
command = project.get_command_obj("build_py")
command.ensure_finalized()
print("build/lib", *command.get_outputs(include_bytecode=False), sep="\\n")
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    top = found.index("build/lib")
    assert {Path(n).relative_to("build/lib").as_posix() for n in found[top + 1 :]} == packaged


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, made from its sdist, as `python -m build` does."""
    place = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (place / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place / "tree" / name)

    def built(kind, source):
        code = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])"
        command = [sys.executable, "-c", code, str(place)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)

    built("sdist", place / "tree")
    with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
        archive.extractall(place / "sdist", filter="data")
    built("wheel", next((place / "sdist").iterdir()))
    return next(place.glob("*.whl"))


def without_compiler(**added):
    """The environment of this process, where no C++ compiler is found and nothing of this checkout."""
    names = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONPATH", "PYTHONHOME")}
    return {**names, "PATH": os.path.dirname(sys.executable), **added}


@pytest.mark.long
def test_the_wheel_through_the_sdist_has_every_file(wheel, packaged):
    with zipfile.ZipFile(wheel) as archive:
        found = {n for n in archive.namelist() if n.startswith("accel/")}
    assert found == packaged


@pytest.mark.long
def test_the_readme_works_with_the_wheel(wheel, folder, tmp_path):
    """In another project, with the compiler's packages and without a C++ compiler."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    shutil.copytree(folder / "my-model", tmp_path / "my-model")
    example = re.search(
        r"^## Python\n+```python\n(.*?)^```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.M | re.S,
    )
    code = f"{example[1]}\nprint()\nprint(accel.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, capture_output=True, text=True,
        env=without_compiler(PYTHONPATH=str(tmp_path / "site")),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1].startswith(str(tmp_path / "site"))


@pytest.mark.long
def test_the_base_alone_runs_an_artifact(wheel, folder, tmp_path):
    """A clean environment from the package index, without torch and a C++ compiler."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        str(ROOT / "constraints.txt"),
        str(wheel),
    ]
    subprocess.run(command, check=True, env=without_compiler())
    listed = subprocess.run([str(python), "-m", "pip", "list"], capture_output=True, text=True)
    assert not re.search(r"^(torch|transformers|onnx)\s", listed.stdout, re.M), listed.stdout
    shutil.copytree(folder / "artifact", tmp_path / "artifact")
    for command in (
        [str(python), "-c", README_LOADS],
        [str(python), "-m", "accel.cli", "run", "artifact", "--prompt", "import os"],
    ):
        found = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=without_compiler()
        )
        assert found.returncode == 0 and found.stdout, found.stderr
