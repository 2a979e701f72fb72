"""Training and measuring parts: kinds, the command line, what is kept for builds, and what is refused."""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import models
import pytest
import torch
from typer.testing import CliRunner

import accel
from accel import cli
from accel.compiler import measure
from accel.compiler.assemble import assemble
from accel.compiler.load.source import open_source
from accel.compiler.over_state import keys_of
from accel.compiler.train import kind, source
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import absorb, aimed, fit, head, rounds, routers, soft, table
from accel.compiler.train.source import Source
from accel.compiler.train.train import method_of, train
from accel.ir import trained as ir_trained
from accel.ir.errors import InputError, PassError
from accel.ir.parts import Part, how, part, parts
from accel.ir.recipe import Recipe
from accel.ir.user_cache import cache_folder
from accel.passes.kv.score.expected_attention_stats import ExpectedAttentionStats
from accel.passes.kv.score.q_filter import QFilter
from accel.passes.kv.score.trim_kv import TrimKV
from accel.passes.prefill.prune.kv_prediction import KvPrediction
from accel.passes.trained import constants, sample
from accel.runtime.length import Base
from accel.runtime.length._head import OfTokens
from accel.runtime.length._of_rounds import OfRounds

KINDS = {
    "mod": routers.RoutersRun, "trim-kv": soft.SoftRun, "threshold-evict": aimed.AimedRun, "less": absorb.AbsorbRun,
    "tokenbutler": fit.FitRun, "specdec-pp": head.HeadRun, "q-filter": table.Measured,
}  # fmt: skip
SMALL = {"samples": 2, "length": 16, "rows": 1}


# Kinds


def test_each_method_is_of_one_kind():
    methods = kind.trained_methods()
    assert all(sum(k.takes(m) for k in kind.kinds()) == 1 for _, m in methods.values())
    assert {name: kind.kind_of(methods[name][1]) for name in KINDS} == KINDS
    assert "knorm" not in methods
    files = {name for name, (_, m) in methods.items() if not kind.kind_of(m).folder}
    assert files == set(parts()), "each comes with accel for the bundled model"
    bundled = Path(accel.__file__).parent / "reference"
    for name in (n for n, (_, m) in methods.items() if getattr(m, "head", False)):
        assert (bundled / name / "model.safetensors").is_file(), "a head has a folder of its own"
    measured = {n for n, (_, m) in methods.items() if kind.kind_of(m) is table.Measured}
    assert measured == {name for name, one in parts().items() if one.measured}
    of_two = {n for n, (_, m) in methods.items() if "draft" in getattr(m, "models", ())}
    assert of_two == {name for name, one in parts().items() if one.of_two}


def test_a_length_with_a_head_is_found_by_its_base():
    assert kind.kind_of(type("Own", (OfRounds,), {})) is rounds.Logged
    assert kind.kind_of(type("Own", (OfTokens,), {})) is head.HeadRun
    assert kind.kind_of(type("Own", (Base,), {"trained": "", "key": "own"})) is None


def test_a_file_is_a_kind(tmp_path, monkeypatch):
    (tmp_path / "rote.py").write_text(
        "from accel.compiler.train.kind import Kind\n\n\nclass Rote(Kind):\n    @classmethod\n"
        "    def takes(cls, method):\n        return method is dict\n\n    make = None\n"
    )
    import accel.compiler.train.runs as runs

    assert kind.kind_of(dict) is None
    kind.kinds.cache_clear()
    monkeypatch.setattr(runs, "__path__", [*runs.__path__, str(tmp_path)])
    assert kind.kind_of(dict).__name__ == "Rote"
    kind.kinds.cache_clear()


TUNING = """
from dataclasses import dataclass

from accel.compiler.train.kind import Kind, Made, Tuning
from accel.ir.axis import option


@dataclass(frozen=True)
class Rote(Tuning):
    share: float = option(0.5, least=0, most=1)

    key = "rote"


class RoteKind(Kind):
    tunes, usual = Rote, {"rate": 3.0, "length": 7}

    @classmethod
    def takes(cls, method):
        return method is Rote

    @classmethod
    def make(cls, method, source, options):
        return Made(None, f"{method.share} {options.rate} {options.length}")
"""


def test_a_tuning_is_of_no_method(tiny, tmp_path, monkeypatch):
    """Its options are its own, and some of the general ones are usual with it."""
    import accel.compiler.train.runs as runs

    (tmp_path / "rote_tuning.py").write_text(TUNING)
    kind.kinds.cache_clear()
    monkeypatch.setattr(runs, "__path__", [*runs.__path__, str(tmp_path)])
    try:
        assert "rote" in kind.tunings() and "rote" not in kind.trained_methods()
        assert train("rote", tiny, {}).message == "0.5 3.0 7"
        assert train("rote", tiny, {"share": 0.25, "length": 9}).message == "0.25 3.0 9"
        with pytest.raises(accel.RecipeError, match=r"rote: share is 2; give 0 to 1"):
            train("rote", tiny, {"share": 2})
        with pytest.raises(InputError, match="trim-kv has no option share; leave share=… out"):
            train("trim-kv", tiny, {"share": 0.25})
        with pytest.raises(InputError, match="did you mean 'rote'"):
            train("rode", tiny, {})
    finally:
        kind.kinds.cache_clear()


def test_the_options_that_are_read_are_noted():
    @dataclass(frozen=True)
    class Method:
        table: str = ""
        width: int = 3
        unused: int = 4

        def size(self):
            return self.width if not self.table else 0

    one, read = measure.watched(Method(width=5))
    assert isinstance(one, Method) and not read
    assert one.size() == 5 and read == {"width"}
    assert measure.made_by(Method(width=5), read) == {"width": 5}


def test_options_that_are_not_given_are_those_of_the_bundled_part():
    told = parts()["trim-kv"].settings
    options = TrainOptions.of("trim-kv", {"rate": 0.5})
    assert (options.rate, options.length) == (0.5, int(told["length"])) != (0.5, 768)
    assert TrainOptions.of("own-method", {}) == TrainOptions()
    with pytest.raises(InputError, match="minutes is 0; give more than 0"):
        TrainOptions.of("trim-kv", {"minutes": 0})


# The command line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model directory: a Llama of two layers with a byte-level tokenizer."""
    return models.write(tmp_path_factory.mktemp("train") / "tiny")


@pytest.fixture(scope="module")
def opened(tiny):
    """It as parts are made for it, captured once."""
    quiet = (lambda *_: None,) * 2
    return Source(tiny, open_source(tiny).tokenizer, None, *quiet)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """kept() -> the parts in a folder of the cache that begins empty."""
    monkeypatch.setattr(ir_trained, "_FOLDER", f"parts-{tmp_path.name}")
    return lambda: sorted((cache_folder() / f"parts-{tmp_path.name}").glob("*"))


def changed(source, **options):
    """The same model, with other options."""
    other = replace(source, **options)
    other.program = source.program
    return other


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def made(source, method, **options):
    """The file of a table."""
    return table.Measured.make(method, source, TrainOptions(**{**SMALL, **options})).file


def find(method, program):
    """What a build reads."""
    return constants(method, program, keys_of(program))


@pytest.mark.long
def test_a_build_finds_what_the_command_measured(tiny, kept, tmp_path):
    out = tmp_path / "artifact"
    build = "build", tiny, "--recipe", "q-filter", "--no-verify", "--max-context", 64, "--out", out
    refused = call(*build)
    assert refused.exit_code == 1 and not out.exists()
    assert "measure it: accel-compile train q-filter MODEL (reads 49,152 tokens)" in refused.stderr
    assert "or build with --train" in refused.stderr
    measured = call("train", "q-filter", tiny, "--samples", 3, "--length", 16)
    assert measured.exit_code == 0, measured.output
    assert "3 batches take about" in measured.stderr and "3 rows of 16 tokens" in measured.stdout
    (file,) = kept()
    assert str(file) in measured.stdout and file.stat().st_mode & 0o022 == 0
    assert call(*build).exit_code == 0 and out.exists()
    file.unlink()
    assert call(*build, "--train").exit_code == 0 and kept() == [file]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["knorm", "TINY"], "'knorm' does not exist"),
        (["trim_kv", "TINY"], "did you mean 'trim-kv'"),
        (["trim-kv", "nowhere"], "nowhere"),
        (["trim-kv", "TINY", "--rate", 0], "rate is 0.0; give more than 0"),
        (["specdec-pp", "TINY"], "--draft DRAFT"),
        (["q-filter", "TINY", "--aux", "TINY"], "goes by no smaller model; leave --aux DIR out"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(arguments, why, tiny, kept):
    said = call("train", *(tiny if one == "TINY" else one for one in arguments))
    assert said.exit_code == 1 and why in said.stderr, said.output
    assert not kept()


def test_a_text_that_does_not_do_is_refused(opened, tmp_path):
    short = tmp_path / "short"
    short.write_text("one")
    for text, why in ((tmp_path, "cannot read"), (short, "smaller length=…")):
        with pytest.raises(InputError, match=why):
            made(changed(opened, text=text), QFilter())
    with pytest.raises(InputError, match="has no tokenizer for a text; give tokenizer="):
        made(changed(opened, tokenizer=None), QFilter())


def test_a_recipe_file_gives_the_method_and_its_options(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[kv.score]\nuse = "expected-attention-stats"\nsinks = 3\n')
    assert method_of(str(recipe), {}) == ExpectedAttentionStats(sinks=3)
    assert method_of("kv-prediction", {"aux": tmp_path}) == KvPrediction(aux=str(tmp_path))
    recipe.write_text('[kv.score]\nuse = "knorm"\n')
    with pytest.raises(accel.RecipeError, match="names 0 methods with a part"):
        method_of(str(recipe), {})


# What is kept


def test_a_part_of_other_options_is_not_taken(opened, kept):
    file = made(opened, ExpectedAttentionStats())
    assert kept() == [file]
    find(ExpectedAttentionStats(epsilon=0.5), opened.program)  # which it does not depend on
    other = ExpectedAttentionStats(sinks=2)
    with pytest.raises(PassError, match="is for sinks = 4 and not 2; .* measure it: accel-compile"):
        find(other, opened.program)
    second = made(opened, other)
    assert kept() == sorted([file, second])
    mine = [find(m, opened.program)[0]["mean"] for m in (other, ExpectedAttentionStats())]
    assert not torch.equal(*mine)


def test_a_damaged_part_is_refused(opened, kept):
    file = made(opened, QFilter())
    whole = file.read_bytes()
    for content, why in (
        (whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]]), "is damaged: its numbers"),
        (whole[:40], "not a complete safetensors file.*remove it, and measure"),
    ):
        file.write_bytes(content)
        with pytest.raises(PassError, match=f"{why}.*accel-compile train q-filter"):
            find(QFilter(), opened.program)
    file.write_bytes(whole)
    find(QFilter(), opened.program)  # the control
    file.chmod(0o666)
    with pytest.raises(PassError, match="others may write it; remove it, and measure"):
        find(QFilter(), opened.program)


def test_a_part_of_another_model_is_not_taken(opened, kept):
    """And one of near weights is named, for a recipe that takes it."""
    file = made(opened, QFilter())
    keys = keys_of(opened.program)
    name = str(next(n for n in opened.program.params if "k_proj" in n or "layers.0.k" in n))
    for other, words, taken in (
        (lambda t: (t / t.abs().max() * 7).round() / 7 * t.abs().max(), "near weights", True),
        (lambda t: t.flip(0), "the bundled file was measured for another model; for", False),
    ):
        program = opened.program.copy()
        program.params[name] = other(opened.program.params[name]).contiguous()
        assert sample(program, keys_of(program)) != sample(opened.program, keys)
        with pytest.raises(PassError, match=words):
            find(QFilter(), program)
        if taken:
            find(QFilter(str(file)), program)
            continue
        with pytest.raises(PassError, match="measured for another model.*leave `table` out"):
            find(QFilter(str(file)), program)


def test_a_build_measures_what_is_missing_once(opened, kept, monkeypatch):
    few = {**parts()["q-filter"].settings, **{name: str(value) for name, value in SMALL.items()}}
    monkeypatch.setattr(measure, "part", lambda key, _: Part(key, few, False))
    monkeypatch.setattr(measure, "over_state", lambda program: program)
    plan = assemble(Recipe.load("q-filter"))

    def missing(reader=opened.tokenizer):
        measure.measure_missing(plan, opened.program, reader, lambda *_: None)

    with pytest.raises(InputError, match="no tokenizer for the text that its table"):
        missing(None)
    missing()
    (file,) = kept()
    find(plan.methods["kv.score"], opened.program)
    monkeypatch.setattr(measure, "measured", None)
    missing()
    file.unlink()
    with pytest.raises(TypeError):
        missing()


def test_an_error_tells_the_command_and_the_time():
    assert how(part("disco", False)) == (
        "train it: accel-compile train disco MODEL --draft DRAFT (goes through 160 texts)"
    )
    assert "(30 minutes (minutes=…))" in how(part("trim-kv", False))
    assert how(part("own", True)).startswith("measure it: accel-compile train own MODEL")


# Runs that are left


def trained(source, **given):
    """A run of trim-kv."""
    options = {"minutes": 0.01, "length": 16, "inner": 4, "threads": 1, **given}
    return soft.SoftRun.make(TrimKV(), source, TrainOptions(**options))


def test_a_run_can_be_left_and_taken_up(opened, kept):
    stop = changed(opened, say=lambda _: os.kill(os.getpid(), signal.SIGINT))
    left = trained(stop)
    assert left.file is None and "resume=True goes on" in left.message
    assert [file.suffix for file in kept()] == [".run"]
    with pytest.raises(InputError, match="holds a run that was left: add resume=True"):
        trained(opened)
    with pytest.raises(InputError, match="holds no run of this model with these options"):
        trained(opened, inner=5, resume=True)
    steps = []
    again = changed(opened, progress=lambda name, _: steps.append(name))
    whole = trained(again, resume=True)
    assert [file.suffix for file in kept()] == [".safetensors"] and whole.file == kept()[0]
    assert not any(step.startswith("step 1 ") for step in steps), "the first one was done"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    TrimKV().tensors(opened.program, keys_of(opened.program))
    with pytest.raises(InputError, match="is not there: leave resume=True out"):
        trained(opened, resume=True)


def test_a_text_that_would_be_read_too_often_is_refused(opened, kept, monkeypatch, tmp_path):
    monkeypatch.setattr(source, "MOST_READINGS", 1e-4)
    with pytest.raises(InputError, match="accel's own text has .* give a longer one, text=…"):
        trained(opened)
    text = tmp_path / "text"
    text.write_text("def f(x): return x " * 9)
    assert trained(changed(opened, text=text)).file


@pytest.mark.long
def test_a_head_is_kept_for_its_two_models(tiny, kept):
    recipe = {
        "loop": {"use": "speculative"}, "draft": {"use": "model", "path": str(tiny)},
        "length": {"use": "specdec-pp"}, "tree": {"use": "chain"},
        "verify": {"use": "sample-match"},
    }  # fmt: skip
    plain = {"target": "eager", "verify": False, "max_context": 64}
    with pytest.raises(InputError, match="train it: accel-compile train specdec-pp MODEL --draft"):
        accel.optimize(tiny, recipe, **plain)
    given = {"draft": tiny, "minutes": 0.01, "length": 16, "rows": 1, "inner": 4}
    file = train("specdec-pp", tiny, given).file
    with accel.optimize(tiny, recipe, **plain) as model:
        assert model.recipe["tables"]["length"]["trained"] == str(file)
        assert model.generate([list(range(3, 9))], max_new_tokens=4)
    with accel.optimize(tiny, recipe, **{**plain, "target": "onnx"}) as model:
        named = model.recipe["tables"]["length"]["trained"]
        assert named != str(file), "the artifact has a copy"
        file.unlink()
        assert model.generate([list(range(3, 9))], max_new_tokens=4)
