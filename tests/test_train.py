"""Training and measuring parts: kinds, the command line, what is kept for builds, and what is refused."""

import os
import signal
from dataclasses import dataclass

import models
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from typer.testing import CliRunner

import accel
from accel import cli
from accel.compiler import measure
from accel.compiler.train import kind, source
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import absorb, aimed, fit, head, rounds, soft, table
from accel.compiler.train.train import train
from accel.ir.errors import InputError, PassError
from accel.ir.trained import Part, how, part, parts
from accel.runtime.length import Base
from accel.runtime.length._head import OfTokens
from accel.runtime.length._of_rounds import OfRounds

KINDS = {
    "trim-kv": soft.SoftRun, "threshold-evict": aimed.AimedRun, "less": absorb.AbsorbRun,
    "tokenbutler": fit.FitRun, "specdec-pp": head.HeadRun, "q-filter": table.Measured,
}  # fmt: skip
SMALL = {"samples": 2, "length": 16, "rows": 1}
PLAIN = {"target": "eager", "verify": False, "max_context": 64}


# Kinds


def test_each_method_is_of_one_kind():
    methods = kind.trained_methods()
    assert all(sum(k.takes(m) for k in kind.kinds()) == 1 for _, m in methods.values())
    assert {name: kind.kind_of(methods[name][1]) for name in KINDS} == KINDS
    assert "knorm" not in methods
    assert set(methods) == set(parts()), "each comes with accel for the bundled model"
    measured = {n for n, (_, m) in methods.items() if kind.kind_of(m) is table.Measured}
    assert measured == {name for name, one in parts().items() if one.measured}
    heads = {n for n, (axis, _) in methods.items() if axis == "length"}
    assert heads == {name for name, one in parts().items() if one.of_two}


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
    told = parts()["trim-kv"].told
    options = TrainOptions.of("trim-kv", {"rate": 0.5})
    assert (options.rate, options.length) == (0.5, int(told["length"])) != (0.5, 768)
    assert TrainOptions.of("own-method", {}) == TrainOptions()
    with pytest.raises(InputError, match="minutes is 0; give more than 0"):
        TrainOptions.of("trim-kv", {"minutes": 0})


# The command line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model directory: a Llama of two layers with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("train") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "LAYERS", 2)
        models.llama().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:100]
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["ab"], trainers.BpeTrainer(vocab_size=101, initial_alphabet=alphabet)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """kept() -> the parts in a cache that begins empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: sorted((tmp_path / "cache" / "accel" / "parts").glob("*"))


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def built(tiny, recipe="q-filter", **options):
    accel.optimize(tiny, recipe, **PLAIN, **options).close()


def test_a_build_finds_what_the_command_measured(tiny, kept, tmp_path):
    out = tmp_path / "artifact"
    refused = call("build", tiny, "--recipe", "q-filter", "--no-verify", "--out", out)
    assert refused.exit_code == 1 and not out.exists()
    assert "measure it: accel-compile train q-filter MODEL (reads 49,152 tokens)" in refused.stderr
    assert "or build with --train" in refused.stderr
    made = call("train", "q-filter", tiny, "--samples", 3, "--length", 16)
    assert made.exit_code == 0, made.output
    assert "3 batches take about" in made.stderr and "3 rows of 16 tokens" in made.stdout
    (file,) = kept()
    assert str(file) in made.stdout and file.stat().st_mode & 0o022 == 0
    built(tiny)


def test_what_is_wrong_is_said(tiny, kept, tmp_path):
    out, short = tmp_path / "x.safetensors", tmp_path / "short"
    short.write_text("one")
    for arguments, why in (
        (["knorm", tiny], "'knorm' does not exist"),
        (["trim_kv", tiny], "did you mean 'trim-kv'"),
        (["trim-kv", tmp_path / "none"], "does not exist"),
        (["trim-kv", tiny, "--resume", "--out", out], "is not there: leave --resume out"),
        (["trim-kv", tiny, "--rate", 0], "rate is 0.0; give more than 0"),
        (["trim-kv", tiny, "--text", tmp_path], "cannot read"),
        (["q-filter", tiny, "--text", short], "smaller --length"),
        (["specdec-pp", tiny], "--draft DRAFT"),
        (["q-filter", tiny, "--aux", tiny], "goes by no smaller model; leave --aux out"),
    ):
        said = call("train", *arguments)
        assert said.exit_code == 1 and why in said.stderr, said.output
    assert not out.exists() and not kept()


def test_a_recipe_file_gives_the_options(tiny, kept, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[kv.score]\nuse = "expected-attention-stats"\nsinks = 3\n')
    train(str(recipe), tiny, SMALL)
    with safe_open(kept()[0], "pt") as file:
        assert file.metadata()["options"] == '{"sinks": 3}'
    recipe.write_text('[kv.score]\nuse = "knorm"\n')
    with pytest.raises(accel.RecipeError, match="names 0 methods with a part"):
        train(str(recipe), tiny, SMALL)


# What is kept


def stats(**options):
    """A recipe whose table depends on an option."""
    return {
        "kv.score": {"use": "expected-attention-stats", **options},
        "kv.budget": {"use": "uniform", "tokens_kept": 8},
    }


def test_a_part_of_other_options_is_not_taken(tiny, kept):
    train("expected-attention-stats", tiny, SMALL)
    built(tiny, stats())
    with pytest.raises(PassError, match="is for sinks = 4 and not 2; .* measure it: accel-compile"):
        built(tiny, stats(sinks=2))
    built(tiny, stats(sinks=2), train=True)
    assert len(kept()) == 2
    built(tiny, stats(sinks=2))
    built(tiny, stats())


def test_a_damaged_part_is_refused(tiny, kept):
    train("q-filter", tiny, SMALL)
    (file,) = kept()
    whole = file.read_bytes()
    file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]]))
    with pytest.raises(PassError, match="is damaged: its numbers.*accel-compile train q-filter"):
        built(tiny)
    file.write_bytes(whole[:40])
    with pytest.raises(PassError, match="not a complete safetensors file.*remove it, and measure"):
        built(tiny)
    file.write_bytes(whole)
    file.chmod(0o666)
    with pytest.raises(PassError, match="others may write it; remove it, and measure"):
        built(tiny)
    file.chmod(0o600)
    built(tiny)


def test_a_part_of_another_model_is_not_taken(tiny, kept, tmp_path):
    """And one of near weights is named, for a recipe that takes it."""
    train("q-filter", tiny, SMALL)
    (file,) = kept()
    tensors = load_file(tiny / "model.safetensors")
    for name, changed, words in (
        ("near", lambda t: (t / t.abs().max() * 7).round() / 7 * t.abs().max(), "near weights"),
        ("other", lambda t: t.flip(0), "the bundled file was measured for another model; for"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for one in tiny.iterdir():
            (folder / one.name).write_bytes(one.read_bytes())
        moved = {n: changed(t).contiguous() if t.ndim == 2 else t for n, t in tensors.items()}
        save_file(moved, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(PassError, match=words):
            built(folder)
        named = {
            "kv.score": {"use": "q-filter", "table": str(file)},
            "kv.budget": {"use": "uniform", "tokens_kept": 8},
        }
        if name == "near":
            built(folder, named)
        else:
            with pytest.raises(PassError, match="measured for another model.*leave `table` out"):
                built(folder, named)


def test_a_build_measures_what_is_missing_once(tiny, kept, monkeypatch):
    few = {**parts()["q-filter"].told, **{name: str(value) for name, value in SMALL.items()}}
    monkeypatch.setattr(measure, "part", lambda key, _: Part(key, few, False))
    built(tiny, train=True)
    (file,) = kept()
    monkeypatch.setattr(measure, "measured", None)
    built(tiny, train=True)
    file.unlink()
    with pytest.raises(TypeError):
        built(tiny, train=True)


def test_an_error_tells_the_command_and_the_time():
    assert how(part("disco", False)) == (
        "train it: accel-compile train disco MODEL --draft DRAFT (continues 160 texts)"
    )
    assert "(30 minutes (--minutes))" in how(part("trim-kv", False))
    assert how(part("own", True)).startswith("measure it: accel-compile train own MODEL")


# Runs that are left


def test_a_run_can_be_left_and_taken_up(tiny, kept):
    given = {"minutes": 0.02, "length": 16, "inner": 4, "threads": 1}
    left = train("trim-kv", tiny, given, say=lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert left.file is None and "--resume goes on" in left.told
    assert [file.suffix for file in kept()] == [".run"]
    with pytest.raises(InputError, match="holds a run that was left: add --resume"):
        train("trim-kv", tiny, given)
    with pytest.raises(InputError, match="holds no run of this model with these options"):
        train("trim-kv", tiny, {**given, "inner": 5, "resume": True})
    steps = []
    whole = train("trim-kv", tiny, {**given, "resume": True}, progress=lambda n, _: steps.append(n))
    assert [file.suffix for file in kept()] == [".safetensors"] and whole.file == kept()[0]
    assert not any(step.startswith("step 1 ") for step in steps), "the first one was done"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    tables = {"kv.score": {"use": "trim-kv"}, "kv.budget": {"use": "uniform", "tokens_kept": 8}}
    built(tiny, tables)


def test_a_text_that_would_be_read_too_often_is_refused(tiny, kept, monkeypatch, tmp_path):
    monkeypatch.setattr(source, "MOST_READINGS", 1e-4)
    given = {"minutes": 0.02, "length": 16, "inner": 4}
    with pytest.raises(InputError, match="accel's own text has .* give a longer one, as --text"):
        train("trim-kv", tiny, given)
    text = tmp_path / "text"
    text.write_text("def f(x): return x " * 9)
    assert train("trim-kv", tiny, {**given, "text": text}).file


def test_a_head_is_kept_for_its_two_models(tiny, kept):
    given = {"draft": tiny, "minutes": 0.01, "length": 16, "rows": 1, "inner": 4}
    recipe = {
        "loop": {"use": "speculative"}, "draft": {"use": "model", "path": str(tiny)},
        "length": {"use": "specdec-pp"}, "tree": {"use": "chain"},
        "verify": {"use": "sample-match"},
    }  # fmt: skip
    with pytest.raises(InputError, match="train it: accel-compile train specdec-pp MODEL --draft"):
        built(tiny, recipe)
    made = train("specdec-pp", tiny, given)
    with accel.optimize(tiny, recipe, **PLAIN) as model:
        assert model.recipe["tables"]["length"]["trained"] == str(made.file)
        tokens = model.generate([torch.arange(3, 9).tolist()], max_new_tokens=4)
        assert tokens
