"""Text that weights are rounded by: where it comes from, how it runs through a program, what it costs."""

import dataclasses
import re
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import accel
import accel.reference
from accel import cli
from accel.compiler.load.source import open_source
from accel.compiler.pipeline import pipeline
from accel.compiler.quality.calibration import make_calibration, read_calibration
from accel.compiler.quality.loss import loss, storage
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.calibration import Calibration
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError, RecipeError
from accel.ir.facts import Facts
from accel.ir.program import Editor, evaluate
from accel.passes import run
from accel.passes.calibrate import calibrate, feeds
from accel.passes.drive import run_both_ways
from accel.passes.weights._blocks import sites
from accel.passes.weights.int4 import Int4
from accel.passes.weights.int4_awq import Int4Awq, find_folds
from accel.passes.weights.int4_gptq import Int4Gptq
from accel.runtime.inputs.text import Tokenizer

aten = torch.ops.aten


def add_to_logits(program, head, op, args):
    """Another reader of what the head reads, whose result is added to the logits."""
    graph = program.step.graph
    editor = Editor(program, graph)
    with graph.inserting_after(head):
        more = editor.call(op, *args)
    with graph.inserting_after(more):
        both = editor.call(aten.add.Tensor, head, more)
    program.step.set_outputs({**program.step.output_nodes(), "logits": both})


def readers(program):
    return [n for s in sites(program, 64)[0] if not s.embeddings for n in s.linears]


def tokens(program, rows=3, length=20):
    return Calibration.random(program.facts.vocab_size, length, rows).tokens


# How text runs through a program.


def test_a_product_sees_what_it_would(passed):
    program = passed("llama")
    seen = {}
    wanted = readers(program)
    text = tokens(program)
    calibrate(program, text, wanted, lambda node, x: seen.setdefault(node, x))
    assert set(seen) == set(wanted)
    head = next(n for n in program.step.graph.nodes if n in seen)
    (want,) = evaluate([head.args[0]], program.params, feeds(program, "step", text))
    torch.testing.assert_close(seen[head], want)


def test_later_products_see_what_earlier_ones_became(passed):
    program = passed("llama")
    wanted = readers(program)

    def inputs(spoil):
        seen = []

        def visit(node, x):
            seen.append(x)
            if spoil and len(seen) == 1:
                name = str(node.args[1].target)
                program.params[name] = program.params[name] * 0

        calibrate(program, tokens(program), wanted, visit)
        return seen

    plain, spoilt = inputs(False), inputs(True)
    assert torch.equal(plain[0], spoilt[0])
    assert not torch.allclose(plain[-1], spoilt[-1])


def test_a_copy_is_its_own(passed):
    program = passed("llama")
    before = program.text()
    copy = program.copy()
    assert copy.text() == before
    Int4(smallest=64).run(copy)
    assert program.text() == before != copy.text()
    text = tokens(program)
    assert run_both_ways(program, text)[0][0].isfinite().all()


# Where channels may be scaled.


def moved(program, change=lambda fold: fold):
    """How far logits move when every fold scales its channels at random, as a share of the largest."""
    text = tokens(program, 2, 13)
    scaled = program.copy()
    folds = find_folds(scaled, tokens(program), set(readers(scaled)))
    generator = torch.Generator().manual_seed(0)
    for fold in folds:
        change(fold).apply(scaled, (2 * torch.rand(fold.size, generator=generator) - 1).exp())
    worst = 0.0
    for (want, _), (got, _) in zip(
        run_both_ways(program, text), run_both_ways(scaled, text), strict=True
    ):
        worst = max(worst, float((want - got).abs().max() / want.abs().max()))
    return len(folds), worst


# layers have 4 inputs of products, and the head one where its table is its own
FOLDS = {"llama": 9, "qwen2": 8, "gpt2": 6, "phi3": 9, "mamba": 5}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FOLDS)
def test_folded_scales_leave_the_logits(name, passed):
    count, worst = moved(passed(name))
    assert count == FOLDS[name]
    assert worst < 2e-5


@pytest.mark.long
def test_an_encoder_decoder():
    """Both of its graphs are run; keys and values of the cross state stay as the step reads them."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(small_config("t5"))
    program = capture(randomise(model, "t5").eval(), max_context=32)
    run(program, pipeline(True))
    count, worst = moved(program)
    assert count > 4 and worst < 1e-3  # its attention makes much of the last place: 1e-4
    before, found = program.copy(), len(sites(program, 64)[0])
    assert Int4Awq(smallest=64).run(program).changed == found
    assert not readers(program)
    lost = loss(before, program, Calibration.random(program.facts.vocab_size, 20))
    assert 0 < lost["kl"] < 3


def test_a_wrong_fold_is_seen(passed):
    def wrong(fold):
        return dataclasses.replace(fold, channels=fold.channels.roll(1))

    assert moved(passed("llama"), wrong)[1] > 1e-2


def test_a_value_that_others_read_too_is_not_scaled(passed):
    program = passed("llama")
    head = next(n for n in program.step.graph.nodes if n.target is aten.linear.default)
    add_to_logits(program, head, aten.mean.dim, (head.args[0], [-1], True))
    folds = find_folds(program, tokens(program), set(readers(program)))
    assert len(folds) == FOLDS["llama"] - 1
    assert all(head not in fold.readers for fold in folds)


# Where text comes from.

FACTS = Facts("Model", vocab_size=4096, max_context=64)


def reference():
    return Path(next(iter(accel.reference.__path__)))


def test_the_bundled_text_is_read_by_the_models_tokenizer():
    tokenizer = Tokenizer(reference() / "tokenizer.json")
    made = make_calibration(None, tokenizer, FACTS, lambda *_: None)
    assert made.source == "bundled"
    assert made.tokens.shape[1] == made.held_out.shape[1] == 64
    assert made.tokens.numel() > 16000 and made.held_out.numel() > 4000
    assert (made.tokens[:, 0] == 0).all()  # as its prompts begin
    rows = {tuple(row.tolist()) for row in made.tokens}
    assert not rows & {tuple(row.tolist()) for row in made.held_out}


def test_without_a_tokenizer_of_the_models_tokens_are_random():
    tokenizer = Tokenizer(reference() / "tokenizer.json")
    small = Facts("Model", vocab_size=100, max_context=64)
    for given, facts in ((None, FACTS), (tokenizer, small)):
        made = make_calibration(None, given, facts, lambda *_: None)
        assert made.source == "random"
        assert int(made.tokens.max()) < facts.vocab_size


def test_given_text_and_given_tokens(tmp_path):
    tokenizer = Tokenizer(reference() / "tokenizer.json")
    (tmp_path / "mine.txt").write_text("def f(x):\n    return x\n" * 60, encoding="utf-8")
    made = make_calibration(
        read_calibration(tmp_path / "mine.txt"), tokenizer, FACTS, lambda *_: None
    )
    assert made.source == "given" and made.tokens.shape[1] == 64
    array = np.arange(500).reshape(10, 50)
    made = make_calibration(read_calibration(array), None, FACTS, lambda *_: None)
    assert made.tokens.shape == (8, 50) and made.held_out.shape == (2, 50)
    made = make_calibration(read_calibration(list(range(200))), None, FACTS, lambda *_: None)
    assert made.tokens.numel() + made.held_out.numel() == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.txt", "nowhere.txt cannot be read"),
        (3.5, "give the path of a text file"),
        ([[1.0, 2.0]], "give the path of a text file"),
        ([[1, 2], [3]], "rows of equal length"),
    ],
)
def test_what_cannot_be_read(given, message):
    with pytest.raises(InputError, match=message):
        read_calibration(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.arange(5), "5 tokens; give at least 32"),
        (torch.arange(5000), "they come from another tokenizer"),
        (torch.full((4, 9), -1), "they come from another tokenizer"),
        ("some text", "no tokenizer for a text"),
    ],
)
def test_what_a_model_cannot_use(given, message):
    with pytest.raises(InputError, match=message):
        make_calibration(given, None, FACTS, lambda *_: None)


def test_a_recipe_without_use_for_it_says_so(build):
    with pytest.raises(RecipeError, match="does not use calibration"):
        accel.optimize(build("llama").model, calibration=[[1, 2]] * 20)


@pytest.mark.parametrize("option", [{"tokens": 0}, {"damping": 0.0}, {"damping": -1.0}])
def test_options_that_mean_nothing(option):
    with pytest.raises(RecipeError, match="; give"):
        Int4Gptq(**option)


# What a build says of it.


@pytest.mark.few(1)
@pytest.mark.parametrize("verify", [True, False])
def test_a_build_reports_bits_and_loss(verify, build):
    told = []
    recipe = {"weights": {"use": "int4-gptq", "smallest": 256, "block": 16}}
    given = np.random.default_rng(0).integers(0, 90, (20, 30))
    with accel.optimize(
        build("llama").model, recipe, max_context=64, verify=verify, calibration=given,
        progress=lambda name, share: told.append((name, share)),
    ) as compiled:  # fmt: skip
        weights, lost = compiled.report["weights"], compiled.report.get("loss")
    assert 5 <= weights["bits_per_weight"] <= 6  # codes, a scale for every 16, and padding
    if verify:
        assert lost["text"] == "given" and lost["tokens"] == 4 * 30
        assert 0 < lost["kl"] < 2 and lost["perplexity"] > 1 < lost["perplexity_float32"]
        assert 0 < lost["kl_median"] < lost["kl_99"] and lost["kl"] < lost["kl_99"]
    else:
        assert lost is None
    shares = [share for _, share in told]
    assert shares == sorted(shares) and 0 <= shares[0] and shares[-1] == 1
    assert any(name.startswith("rounding weights: ") for name, _ in told)


@pytest.mark.long
def test_the_commands_show_bits_and_loss(tmp_path, monkeypatch):
    """A directory without a tokenizer: `build` on random tokens, and what `inspect` says of it."""
    models.make("llama", 2).save_pretrained(tmp_path / "model")
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[weights]\nuse = "int4-awq"\nsmallest = 256\n', encoding="utf-8")

    def call(*arguments):
        return CliRunner().invoke(cli.app, [str(a) for a in arguments])

    out = tmp_path / "out"
    built = call("build", tmp_path / "model", "--out", out, "--recipe", recipe)
    assert built.exit_code == 0, built.output
    for words in ("choosing scales", "rounding weights"):
        assert re.search(rf"^build:  \d\d% {words}: \d+ of \d+$", built.stderr, re.M)
    for text in (built.stdout, call("inspect", out).stdout):
        assert "bits per weight" in text and "KL " in text and "of random tokens" in text
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "KL from float32" in page and "perplexity" in page
    (tmp_path / "mine.txt").write_text("some text", encoding="utf-8")
    asked = ("--recipe", recipe, "--calibration", tmp_path / "mine.txt")
    refused = call("build", tmp_path / "model", "--out", tmp_path / "other", *asked)
    assert refused.exit_code == 1 and "no tokenizer for a text" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_float16_is_measured_too(build):
    recipe = {"weights": {"use": "float16", "smallest": 256}}
    with accel.optimize(build("llama").model, recipe, max_context=64) as compiled:
        weights, lost = compiled.report["weights"], compiled.report["loss"]
    assert weights["bits_per_weight"] == 16 and lost["text"] == "random"
    assert 0 <= lost["kl"] < 1e-3


def test_a_program_loses_nothing_against_itself(passed):
    program = passed("llama")
    found = loss(program, program, Calibration.random(program.facts.vocab_size, 20))
    assert found["kl"] == 0 and found["perplexity"] == found["perplexity_float32"]
    assert storage(program, program)["bits_per_weight"] == 32


def test_shared_weights_are_rounded_once(passed):
    """ALBERT-like: a weight that two products read."""
    program = passed("llama")
    head = next(n for n in program.step.graph.nodes if n.target is aten.linear.default)
    add_to_logits(program, head, aten.linear.default, (head.args[0], head.args[1]))
    found = len(sites(program, 64)[0])
    assert Int4Gptq(smallest=64).run(program).changed == found
    assert not readers(program)
    assert run_both_ways(program, tokens(program))[0][0].isfinite().all()


# The bundled model: better methods lose less.


@pytest.fixture(scope="module")
def bundled():
    loaded = open_source(reference()).load()
    program = capture(loaded.model, max_context=256, stored=loaded.stored)
    run(program, pipeline())
    tokenizer = Tokenizer(reference() / "tokenizer.json")
    text = make_calibration(None, tokenizer, program.facts, lambda *_: None)
    program.calibration = dataclasses.replace(text, held_out=text.held_out[:8])
    return program


def lost(bundled, method, text=None):
    program = bundled.copy()
    if text is not None:
        program.calibration = dataclasses.replace(program.calibration, tokens=text)
    method.run(program)
    return loss(bundled, program, bundled.calibration)


@pytest.mark.long
def test_calibrated_methods_lose_less_than_rounding(bundled):
    """And on tokens without meaning feedback gains less: it goes by the text."""
    plain = lost(bundled, Int4())
    feedback = lost(bundled, Int4Gptq(tokens=1024))
    for better in (feedback, lost(bundled, Int4Awq(tokens=1024))):
        assert better["kl"] < 0.9 * plain["kl"]
        assert better["perplexity"] < plain["perplexity"]
    random = lost(bundled, Int4Gptq(tokens=1024), tokens(bundled, 4, 256))
    assert feedback["kl"] < random["kl"]


def test_text_ends_where_the_model_does():
    """A pass finds that positions end at 200; the text was made for 256."""
    with accel.optimize(
        models.ARCHITECTURES["plain_sdpa"](), "int4-gptq", max_context=256
    ) as compiled:
        assert compiled.facts.max_context == 200
        assert compiled.report["loss"]["kl"] > 0
