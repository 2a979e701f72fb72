"""The tool that starts a method: on every axis, one that builds, holds its laws and touches no other file."""

import importlib
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from functools import partial
from pathlib import Path

import kinds
import matrix
import matrix_loops
import models
import new
import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.ir.axis import find_axes
from accel.ir.errors import InputError, PassError, RecipeError
from accel.ir.recipe import Recipe
from accel.runtime.decode.row import Row
from accel.runtime.sample.standard import Standard

from .diffusion_case import BLOCK, decoded, eager, prompts
from .kv_slots import choose, slots

AXES, ROOT = find_axes(), Path(__file__).parents[1]
NAME, STEM = "some-new-one", "some_new_one"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """started(axis, like) -> the files of a new method, which is one of the axis until the test ends."""

    def start(axis, like=""):
        made = new.files_of(AXES[axis], NAME, like)
        assert not any(path.exists() for path in made)
        package = importlib.import_module(AXES[axis].package)
        (tmp_path / f"{STEM}.py").write_text(next(iter(made.values())), encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        return {path.relative_to(new.ROOT): text for path, text in made.items()}

    yield start
    for axis in AXES.values():
        sys.modules.pop(f"{axis.package}.{STEM}", None)
        vars(importlib.import_module(axis.package)).pop(STEM, None)


@pytest.fixture(scope="module")
def matrices():
    return {"matrix": matrix.Matrix(), "matrix_loops": matrix_loops.Loops()}


@pytest.mark.few(2)
@pytest.mark.parametrize("axis", AXES)
def test_a_started_method_builds_and_computes_the_same(axis, started, matrices):
    made = started(axis)
    assert AXES[axis].build(NAME) is not None
    assert not any("emplate" in text for text in made.values())
    for path, text in made.items():
        if path.suffix == ".toml":
            tables = tomllib.loads(text)
            assert tables["papers"] == [] and axis in assemble(Recipe.load(tables)).recipe.tables
        if path.name == f"test_{STEM}.py":
            (kind,) = [kind for kind in matrices if f"import {kind}\n" in text][-1:] or [None]
            if kind is not None:
                outcome = matrices[kind].run(matrix.Case("llama", ((axis, NAME),)))
                assert outcome.kind == "equal", outcome.why


def test_a_started_search_builds_and_finds_what_the_eager_target_finds(started, matrices):
    made = started("loop", "beam-patience")
    method = AXES["loop"].build(NAME)
    assert method.searches and new.options_of(AXES["loop"], "beam-patience") == [
        "beams: int = 4, 1 to 64"
    ]
    (test,) = (text for path, text in made.items() if path.name == f"test_{STEM}.py")
    assert "test_tokens_are_those_of_the_eager_target" in test and "matrix_loops" in test
    outcome = matrices["matrix_loops"].run(matrix.Case("llama", (("loop", NAME),)))
    assert outcome.kind == "equal", outcome.why


def test_a_started_loop_of_masked_diffusion_is_three_files(started):
    """With nothing edited: it builds, and its own test file has the rule that the law compares it with."""
    made = started("loop", "dllm-lowconf")
    assert AXES["loop"].build(NAME).masked_diffusion
    method, recipe, test = made
    assert method == Path("runtime", "loop", f"{STEM}.py")
    assert recipe == Path("recipes", "diffusion", f"{NAME}.toml")
    assert test == Path("tests", "runtime", "loop", f"test_{STEM}.py")
    assert "CASES = [Case({}, surest(1))]" in made[test] and "matrix" not in made[test]


def test_a_started_canvas_is_three_files_and_decodes(started):
    """With nothing edited; its own test file has the rule that the law compares it with."""
    method, recipe, test = started("canvas")
    assert method == Path("runtime", "canvas", f"{STEM}.py")
    assert recipe == Path("recipes", "diffusion", f"{NAME}.toml")
    assert test == Path("tests", "runtime", "canvas", f"test_{STEM}.py")
    out = decoded(eager(True)[1], "dllm-lowconf", prompts(), canvas=NAME, block=BLOCK)
    assert out[0] == out[2] and out[0] != decoded(eager(True)[1], "dllm-lowconf", prompts())[0]


def test_a_started_sampler_is_three_files_and_requests_draw_with_it(started, toy_sampled):
    """With nothing edited: chosen by a request and by a recipe, it gives other tokens than plain sampling."""
    made = started("sample")
    folders = [
        Path("runtime", "sample"),
        Path("recipes", "sampling"),
        Path("tests", "runtime", "sample"),
    ]
    assert [path.parent for path in made] == folders
    assert f"from accel.runtime.sample.{STEM} import SomeNewOne" in list(made.values())[-1]
    assert new.options_of(AXES["sample"]) == ["least: float = 0.1, more than 0 and at most 1"]
    table = {"use": NAME, "least": 0.9}
    plainly, asked, chosen = toy_sampled({}, None), toy_sampled({}, table), toy_sampled(table, None)
    assert plainly != asked == chosen


@pytest.fixture
def toy_sampled():
    """toy_sampled(recipe's table, request's) -> tokens of a tiny model at a high temperature."""

    def get(recipe, request):
        tables = {"sample": recipe} if recipe else {}
        module = models.llama()
        with accel.optimize(module, tables, target="eager", max_context=32) as model:
            out = model.generate([[5, 6, 7]], 8, temperature=3.0, seed=1, eos=[], sampler=request)
            return out.tokens

    return get


def test_a_started_search_refuses_to_sample(started):
    started("loop", "beam-patience")
    row = Row(np.array([5]), Standard(temperature=1.0), None, limit=4, max_context=9)
    with pytest.raises(InputError, match=f"loop.{NAME} does not sample; leave temperature at 0"):
        AXES["loop"].build(NAME).tokens(None, [row], None)


@pytest.mark.long
def test_a_method_of_a_known_kind_adds_pairs_and_no_triples(started):
    before = Counter(len(case.tables) for case in matrix.cases())
    started("kv.score")
    after = Counter(len(case.tables) for case in matrix.cases())
    assert after[2] > before[2] and after[3] == before[3]
    found = {
        m for case in matrix.cases(having=[NAME]) if len(case.tables) == 3 for m in case.methods
    }
    assert NAME in found and "knorm" not in found, "it stands for its kind"


def test_kinds_tell_apart_what_methods_read_and_declare():
    kinds_of = partial(kinds.declared, "kv.score")
    apart = ["knorm", "snapkv", "h2o", "a2sf", "trim-kv", "streaming-llm"]
    assert len({kinds_of(name) for name in apart}) == len(apart)
    assert kinds_of("knorm") == kinds_of("keydiff")


@pytest.mark.long
def test_of_a_method_on_every_axis_all_holds_but_what_its_paper_claims(tmp_path):
    """In a copy of the checkout: laws, builds and types, with no file changed that was there."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def run(*words):
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={
                "PYTHONPATH": str(tmp_path / "build" / "links"),
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path),
            },
            capture_output=True,
            text=True,
        )

    assert run("tools/links.py").returncode == 0
    tests = []
    kinds_of = {"new-search": "beam-patience", "new-diffusion": "dllm-lowconf"}
    asked = [(axis, f"new-{axis.replace('.', '-')}", ()) for axis in AXES]
    asked += [("loop", name, ("--like", like)) for name, like in kinds_of.items()]
    for axis, name, like in asked:
        stem = name.replace("-", "_")
        done = run("tools/new.py", axis, name, *like)
        assert done.returncode == 0, done.stderr
        package = AXES[axis].package.removeprefix("accel.").replace(".", "/")
        tests.append(f"tests/{package}/test_{stem}.py")
    assert all(path.read_bytes() == text for path, text in before.items())
    types = run("-m", "mypy")
    assert types.returncode == 0, types.stdout
    laws = run("-m", "pytest", "-q", "tests/laws", "-k", "new-", "-n", "2", "-m", "")
    assert laws.returncode == 0, laws.stdout[-4000:]
    assert " passed" in laws.stdout
    own = run("-m", "pytest", "-q", "-rf", "-m", "", *tests)
    failed = [line for line in own.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == len(asked), own.stdout[-4000:]
    assert all("test_what_the_paper_claims" in line for line in failed), "\n".join(failed)


def test_a_recipe_is_begun_beside_those_of_its_axis(started):
    """A selection's is not among those of eviction, a loop's not among those of diffusion."""
    for axis, group in (
        ("kv.select", "selection"),
        ("kv.refine", "context"),
        ("loop", "search"),
    ):
        assert Path("recipes", group, f"{NAME}.toml") in started(axis)


def test_scores_of_another_shape_are_refused():
    """The error of a method that takes positions [B,G,S] for [B,S]."""

    class Flat(AXES["kv.score"].method("knorm")):
        def __call__(self, keys):
            return keys.norm(dim=-1)[:, None]

    with pytest.raises(PassError, match=r"Flat gives scores of shape .*, \[B,G,S\]"):
        choose(slots(0), 4, Flat(), AXES["kv.budget"].build("uniform"), most=4)


def test_what_cannot_be_made_is_said(monkeypatch, capsys):
    for words, told in (
        (["kv.scor", "x"], "did you mean 'kv.score'"),
        (["kv.score", "X y"], "is no name of a method"),
        (["kv.score", "my_score"], "lower-case letters, digits and dashes"),
        (["kv.score", "_hidden"], "is no name of a method"),
        (["kv.score", "class"], "'class' is a word of Python"),
        (["kv.score", "knorm"], "is there already"),
        (["draft", "kivi-4"], "a recipe 'kivi-4' is there already"),
    ):
        monkeypatch.setattr("sys.argv", ["new.py", *words])
        assert new.main() == 2
        assert told in capsys.readouterr().err


def test_files_are_written_in_new_folders_and_the_commands_that_test_them_told(
    monkeypatch, capsys, tmp_path
):
    made = {tmp_path / "one.py": "", tmp_path / "tests" / "a" / "b" / f"test_{STEM}.py": "x"}
    monkeypatch.setattr(new, "ROOT", tmp_path)
    monkeypatch.setattr(new, "files_of", lambda *_: made)
    monkeypatch.setattr("sys.argv", ["new.py", "loop", NAME])
    assert new.main() == 0
    assert all(path.read_text(encoding="utf-8") == text for path, text in made.items())
    told = capsys.readouterr().out.splitlines()
    assert f'  .venv/bin/python -m pytest -m "" tests/a/b/test_{STEM}.py' in told
    assert told[-1] == f'  .venv/bin/python -m pytest -m "" tests -k {NAME}'


def test_another_checkout_is_not_written_to(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(new, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["new.py", "kv.score", "my-score"])
    assert new.main() == 2
    assert "run tools/new.py of that checkout" in " ".join(capsys.readouterr().err.split())


def test_a_method_like_a_search_goes_where_searches_are():
    made = new.files_of(AXES["loop"], NAME, "beam-patience")
    folders = {path.parent.name for path in made if path.suffix == ".toml"}
    (test,) = (text for path, text in made.items() if path.name == f"test_{STEM}.py")
    assert folders == {"search"} and "plain_decoding" not in test
    (plain,) = (
        text
        for path, text in new.files_of(AXES["loop"], NAME).items()
        if path.name == f"test_{STEM}.py"
    )
    assert "plain_decoding" in plain, "the control"
    with pytest.raises(RecipeError, match="did you mean 'beam-patience'"):
        new.files_of(AXES["loop"], NAME, "beam-patiense")
