"""explain: every recipe told or refused with a way out; bytes as sessions take them; pictures that can be read."""

import json
import re
import sys
from xml.etree import ElementTree

import models
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from accel import cli
from accel.compiler import explain as package
from accel.compiler.assemble import assemble
from accel.compiler.explain import costs, explain, layer, page
from accel.compiler.explain import rates as measuring
from accel.compiler.explain import subject as sketching
from accel.compiler.explain.drawing import picture
from accel.compiler.explain.explain import _Work
from accel.compiler.explain.page import rests, write_page
from accel.compiler.explain.rates import Rates
from accel.compiler.explain.subject import subject
from accel.compiler.facts_json import model_facts
from accel.ir.axis import find_axes
from accel.ir.errors import AccelError, CaptureError, RecipeError
from accel.ir.recipe import Recipe, bundled
from accel.ir.tables import Tables
from accel.passes.trained import Trained

from .select_case import measured_for
from .session_case import session_of

CONTEXT = 2048
REFUSED = {  # no rope; no gates or table for this model; no masks to fill
    "yoco": "read only caches of lower layers",
    "window-cache": "no layer sees a window",
    **dict.fromkeys(("pie", "cacheblend", "kvshare"), "kv.reuse"),
    **dict.fromkeys(
        ("trim-kv", "tokenbutler", "attention-predictor", "cache-augment"),
        "trained for another model",
    ),
    **dict.fromkeys(
        (
            *("q-filter", "expected-attention-stats", "double-sparsity"),
            *("headkv-r2", "duo-heads", "prefixkv"),
        ),
        "measured for another model",
    ),
    "dllm-lowconf": "decodes masked-diffusion models",
}  # fmt: skip
FAST = Rates(
    {k: (4e9, 2e9) for k in measuring.KINDS},
    dict.fromkeys(measuring.CACHES, (1e9, 1e9)),
    1e-6,
    True,
)


@pytest.fixture(scope="module")
def captured():
    """A decoder of four layers, captured once for all tests."""
    return subject(
        models.randomise(models.PlainSdpa(layers=4), "four"), CONTEXT, lambda facts: None
    )


@pytest.fixture(scope="module")
def tiny():
    """One of a single layer."""
    return subject(models.tiny(), CONTEXT, lambda facts: None)


def told(captured, recipe, **options):
    return explain(recipe, None, max_context=CONTEXT, captured=captured, speed=False, **options)


def measured(methods):
    return any(isinstance(one, Tables | Trained) for one in methods.values())


def kinds():
    """One recipe of each set of axes, without constants of another model where there is one, and those that are
    refused here.
    """
    methods = {name: assemble(Recipe.load(name)).methods for name in bundled()}
    found = {
        tuple(Recipe.load(name).tables): name
        for name in sorted(methods, key=lambda n: not measured(methods[n]))
        if (loop := methods[name].get("loop")) is None or not (loop.masked_diffusion or loop.blocks)
    }
    return sorted({*found.values(), *REFUSED})


@pytest.mark.few(1)
@pytest.mark.parametrize("name", kinds())
def test_every_kind_of_recipe_is_told(captured, name, tmp_path):
    e = told(captured, name)
    if name in REFUSED:
        assert REFUSED[name] in e.refused and e.nearest.recipe is not None
        return
    assert not e.refused and e.recipe.name == name
    assert e.grade == assemble(Recipe.load(name)).grade
    tables = Recipe.load(name).tables
    assert set(tables) <= {m.axis for m in e.methods}
    for method in e.methods:
        assert method.about and method.use
        values = {o["name"]: o["value"] for o in method.options}
        chosen = {k: v for k, v in tables.get(method.axis, {}).items() if k != "use"}
        assert chosen.items() <= values.items()
    assert e.cache.bytes(max(e.cache.tokens)) > 0 and e.weights.total > 0
    write_page(tmp_path / "e.html", e)
    text = (tmp_path / "e.html").read_text(encoding="utf-8")
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    assert all(m.use in text for m in e.methods) and "<script" not in text
    assert ("accel-compile bench measures it" in text) == ({"loop", "draft"} & set(tables) != set())


def test_base_changes_nothing_and_others_do(captured):
    same, other = told(captured, "base"), told(captured, "kv-int8")
    assert same.changed_layers == [] and same.rewrites == []
    assert other.changed_layers == [0, 1, 2, 3]
    (rewrite,) = other.rewrites
    assert (
        rewrite.operators["encode_rows"] == (0, 8)
        and rewrite.bytes_per_token[1] < rewrite.bytes_per_token[0]
    )


def held(program, plan, prompt):
    """What a session of the recipe holds after a prompt and a token."""
    facts = model_facts(program)
    with session_of(program, tables=plan.recipe.tables) as session:
        session.prompt(np.random.default_rng(0).permutation(prompt)[None] % facts.vocab_size)
        session.run([[1]])
        return session.stats["kv_bytes"]


CODEC = find_axes()["kv.codec"]
KEPT = {"kv.budget": {"use": "uniform", "tokens_kept": 60}}
LESS = {"kv.budget": {"use": "uniform", "tokens_kept": 59}}
CASES = {
    "dense": {},
    "int8": {"kv.codec": {"use": "kv-int8"}},
    "kivi": {"kv.codec": {"use": "kivi", "group": 4, "residual": 8}},
    "knorm": {"kv.score": {"use": "knorm"}, **KEPT},
    "streaming": {
        "kv.score": {"use": "streaming-llm"},
        "kv.when": {"use": "every", "tokens": 32},
        **KEPT,
    },
    "int8 and knorm": {"kv.codec": {"use": "kv-int8"}, "kv.score": {"use": "knorm"}, **KEPT},
    "pyramid": {
        "kv.score": {"use": "knorm"},
        "kv.budget": {"use": "pyramidkv", "tokens_kept": 60, "window": 4, "beta": 3.0},
    },
    "ada-kv": {
        "kv.codec": {"use": "kv-int8"},
        "kv.score": {"use": "snapkv"},
        "kv.budget": {"use": "ada-kv", "tokens_kept": 60},
    },
    "mikv": {"kv.score": {"use": "knorm"}, "kv.keep": {"use": "mikv"}, **KEPT},
    "zipcache": {
        "kv.score": {"use": "knorm"},
        "kv.keep": {"use": "zipcache", "ratio": 0.3},
        **KEPT,
    },
}


def options_of(subject, use, folder):
    """Small options of a codec, with constants of the model where it has some."""
    options = CODEC.small(use)
    base = _Work(subject, lambda *_: None).run(assemble(Recipe.load("base"))).program
    made = measured_for(CODEC.build(use, **options), base, folder)
    files = {
        n: str(folder / f"{made.key}.safetensors")
        for n in ("table", "trained")
        if getattr(made, n, None)
    }
    return options | {n: file for n, file in files.items() if getattr(made, n) == file}


@pytest.mark.few(1)
@pytest.mark.parametrize("use", CODEC.names())
def test_bytes_of_a_codec_are_what_a_session_holds(tiny, use, tmp_path):
    """No token behind a prompt fills a block: then a buffer is as small as what is left in it."""
    tables = {"kv.codec": {"use": use, **options_of(tiny, use, tmp_path)}}
    plan = assemble(Recipe(tables=tables))
    program = _Work(tiny, lambda *_: None).run(plan).program
    found = costs.cache(program, None, plan.methods, (44, 150), 0)
    for prompt in (44, 150):
        assert found.bytes(prompt) == held(program, plan, prompt)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_what_a_session_holds(tiny, name):
    plan = assemble(Recipe(tables=CASES[name]))
    program = _Work(tiny, lambda *_: None).run(plan).program
    found = costs.cache(program, None, plan.methods, (40, 150), 0)
    for prompt in (40, 150):
        assert found.bytes(prompt) == held(program, plan, prompt)
    if name == "knorm":  # the control: by another budget other bytes
        other = {
            **plan.methods,
            "kv.budget": assemble(Recipe(tables={**CASES[name], **LESS})).methods["kv.budget"],
        }
        assert costs.cache(program, None, other, (150,), 0).bytes(150) != held(program, plan, 150)


def test_a_refused_recipe_has_a_reason_and_a_way_out(tiny):
    e = told(tiny, ["batch-invariant", "knorm"])
    assert (
        "batch-invariant cannot be combined with kv.score = knorm" in e.refused and e.cache is None
    )
    near = e.nearest.recipe
    assert near is not None and set(near.tables) == {"kv.score", "kv.budget"}
    assert not told(tiny, near).refused


def test_a_value_that_is_refused_gets_the_default(tiny):
    tables = {"kv.score": {"use": "knorm"}, "kv.budget": {"use": "uniform", "tokens_kept": 0}}
    e = told(tiny, tables)
    assert "tokens_kept is 0" in e.refused
    assert e.nearest.recipe.tables["kv.budget"] == {"use": "uniform"}


def test_what_does_not_exist_is_an_error_with_the_near_name(captured):
    with pytest.raises(RecipeError, match="did you mean 'snapkv'"):
        told(captured, "snapvk")
    with pytest.raises(RecipeError, match="did you mean 'knorm'"):
        told(captured, {"kv.score": {"use": "knrom"}})
    with pytest.raises(CaptureError, match="did you mean 'llama'"):
        explain("base", "lama", speed=False)


def test_what_no_change_helps_is_said(tiny, monkeypatch):
    def never(work, recipe):
        raise RecipeError("no")

    monkeypatch.setattr(sys.modules["accel.compiler.explain.explain"], "_try", never)
    e = told(tiny, ["batch-invariant", "knorm"])
    assert e.nearest.recipe is None and e.nearest.tried > 5


def config(**changes):
    from transformers import LlamaConfig

    return LlamaConfig(**{
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True, **changes,
    })  # fmt: skip


@pytest.mark.long
def test_a_large_model_is_counted_from_a_sketch(tmp_path, monkeypatch):
    monkeypatch.setattr(sketching, "DEEP", 2)
    config().save_pretrained(tmp_path)
    found = subject(tmp_path / "config.json", CONTEXT, lambda facts: None)
    assert found.program.facts.parameters < 10_000_000
    e = told(found, "kv-int8")
    assert e.cache_base.slot == 12 * 2 * 8 * 64 * 4 + 8
    assert e.cache.slot == 12 * 2 * 8 * (64 + 4) + 8
    one = 1024 * (16 + 2 * 8) * 64 + 1024 * 1024 + 3 * 1024 * 2816
    want = 4 * (12 * one + 32000 * 1024)
    assert e.weights_base.total == pytest.approx(
        want, rel=2e-3
    )  # norms are counted with the products
    assert any("estimated from 2 of its 12 layers" in note for note in e.notes)


def test_pictures_mark_what_is_new(captured):
    e = told(captured, ["int4", "kv-float32"])
    before, after = e.pictures
    assert {before.boxes[i].label for i in before.new} == {"linear"}
    assert {after.boxes[i].label for i in after.new} == {"quantized_linear"}
    same = told(captured, "base").pictures
    assert layer.compare(*same) == 0
    drawn = ElementTree.fromstring(picture(after))
    boxes = [r for r in drawn.iter() if r.tag.endswith("rect")]
    assert len(boxes) == len(after.boxes)
    places = [[float(r.get(k)) for k in ("x", "y", "width")] for r in boxes]
    for i, (x, y, wide) in enumerate(places):
        for u, v, _ in places[:i]:
            assert y != v or x + wide <= u or u < x, "boxes of a rank lie apart"


def test_a_layer_under_a_condition_has_two_pictures(captured, tmp_path):
    e = told(captured, "unified-skip")
    assert e.pictures[1].otherwise is not None
    write_page(tmp_path / "e.html", e)
    assert "where the layer is skipped" in (tmp_path / "e.html").read_text()
    full = told(captured, "base")
    assert e.weights.total < full.weights.total, "layers that are left out read no weights"
    assert ["layers run for a token", "100%", "50%", "0.50"] in page.costs(e)[1]
    assert not any("run for a token" in line[0] for line in page.costs(full)[1])


@pytest.mark.parametrize(
    ("recipe", "names", "rest"),
    [
        ("by-branch", ["attentions", "MLPs"], None),
        ("sublayer-skip", ["attentions"], None),
        ("skipdecode", ["layers"], "after the prompt on; more run before"),
        ({"depth": {"use": "calm", "threshold": 0.5}}, ["layers"], "depends on the text"),
    ],
)
def test_what_a_token_runs_is_told(captured, recipe, names, rest):
    e = told(captured, recipe)
    assert [line[0] for line in page.costs(e)[1] if "run for" in line[0]] == [
        f"{name} run for a token" for name in names
    ]
    assert any(rest in line for line in rests(e)) if rest else len(rests(e)) == 1


def test_speed_follows_from_bytes(captured):
    told(captured, "base")
    program = captured.base
    read = costs.Reading({"float32": 1e7}, {})
    near = costs.predict(program, None, read, costs.Held(0.0, 10), FAST)
    far = costs.predict(program, None, read, costs.Held(0.0, 2000), FAST)
    assert near.weights > 1e7 / 4e9 and far.cache > 100 * near.cache
    assert far.tokens_per_second < near.tokens_per_second
    few = costs.predict(program, None, costs.Reading({"int4": 1e6}, {}), costs.Held(0.0, 10), FAST)
    assert few.tokens_per_second > near.tokens_per_second
    odd = costs.Reading({"int3": 1e6}, {})
    assert "int3" in costs.predict(program, None, odd, costs.Held(0.0, 10), FAST)


@pytest.mark.parametrize("native", [True, False])
def test_rates_are_measured_once(native, monkeypatch, tmp_path):
    if native and measuring.library()[0] is None:
        pytest.skip("no compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "SETS", (1 << 18, 1 << 21))
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    monkeypatch.setattr(measuring, "WIDTH", 128)
    if not native:
        monkeypatch.setattr(measuring, "library", lambda: (None, "none"))
    found = measuring.rates(1)
    assert found.native == native and found.node > 0
    assert found.weight("int4", 1) == found.weights["int4"][0]
    monkeypatch.setattr(measuring, "_measured", lambda *_: pytest.fail("measured again"))
    assert measuring.rates(1) == found


def test_the_command(tmp_path):
    threads = torch.get_num_threads()
    models.make("llama", 1).save_pretrained(tmp_path / "m")
    run = CliRunner().invoke
    page = tmp_path / "e.html"
    shown = run(
        cli.app, ["explain", "knorm", str(tmp_path / "m"), "--no-speed", "--out", str(page)]
    )
    assert shown.exit_code == 0, shown.output
    for word in ("approximate", "kv.score", "tokens_kept", "KV of a token", "pass Compress"):
        assert word in shown.stdout, word
    assert page.read_text().startswith("<!doctype html>")
    found = run(
        cli.app, ["explain", "batch-invariant+knorm", str(tmp_path / "m"), "--no-speed", "--json"]
    )
    assert found.exit_code == 1
    value = json.loads(found.stdout)
    assert value["refused"] and value["nearest"]["recipe"]["tables"]
    assert torch.get_num_threads() == threads


def test_a_plus_merges_names_and_files(tmp_path, monkeypatch):
    """A file whose own name has a plus is one recipe."""
    found = []

    def told(recipe, *args, **options):
        found.append(Recipe.load(recipe).tables)
        raise AccelError("no more is needed")

    monkeypatch.setattr(package, "explain", told)
    mine, plus = tmp_path / "my.toml", tmp_path / "a+b.toml"
    for path in (mine, plus):
        path.write_text('[kv.codec]\nuse = "kv-int8"\n')
    for recipe in (f"int4+{mine}", f"{mine}+int4", str(plus)):
        assert CliRunner().invoke(cli.app, ["explain", recipe]).exit_code == 1
    both = {"weights": {"use": "int4"}, "kv.codec": {"use": "kv-int8"}}
    assert found == [both, both, {"kv.codec": {"use": "kv-int8"}}]
