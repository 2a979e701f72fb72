"""smoke: what it takes, what it says of a recipe on a target, and that nothing wrong passes for right."""

import json
import sys

import models
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import accel
from accel import CaptureError, RecipeError, cli
from accel.compiler.assemble import assemble
from accel.compiler.smoke import smoke as smoke_module
from accel.compiler.smoke.clone import clone, depth, shrunk
from accel.compiler.smoke.source import small_model
from accel.compiler.smoke.tiny_models import small_config
from accel.ir.capture.rounding import Float64
from accel.passes.check import NumericCheck
from accel.passes.weights.float16 import Float16
from accel.runtime.session.modes.canvas import CanvasState


def call(*arguments):
    return CliRunner().invoke(cli.app, ["smoke", *map(str, arguments)])


def config_of(name, **fields):
    from transformers import AutoConfig

    return AutoConfig.for_model(name, **fields)


def built(config):
    from transformers import AutoModelForCausalLM

    return clone(config, AutoModelForCausalLM.from_config)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A real model's configuration and not one weight."""
    folder = tmp_path_factory.mktemp("model")
    config = config_of(
        "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }, max_position_embeddings=131072, eos_token_id=[128001, 128009],
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


# The clone


def test_sizes_shrink_and_proportions_stay(directory):
    source = small_model(directory)
    config = source.model.config
    assert source.layers == 2 == len(source.model.model.layers)
    assert config.num_attention_heads == 8 and config.num_key_value_heads == 2
    assert (config.head_dim, config.hidden_size, config.intermediate_size) == (16, 128, 448)
    assert config.rope_parameters["rope_type"] == "llama3"
    assert source.notes == [] and sum(p.numel() for p in source.model.parameters()) < 1e6
    assert max(config.eos_token_id) < config.vocab_size == 256


@pytest.mark.parametrize(
    "config, layers, says",
    [
        (lambda: config_of("gemma3_text"), 6, "layer_types"),
        (lambda: config_of("gemma2"), 2, ""),
        (lambda: config_of("jamba"), 8, "attn_layer_period"),
        (lambda: config_of("bamba", attn_layer_indices=[4, 9]), 5, "layers_block_type"),
        (lambda: config_of("deepseek_v3"), 4, "first_k_dense_replace"),
        (lambda: config_of("qwen3_next"), 4, "layer_types"),
        (lambda: config_of("gpt2", n_layer=1), 1, "all of them"),
    ],
)
def test_a_clone_has_every_kind_of_layer(config, layers, says):
    found, why = depth(config())
    assert found == layers and says in why


def test_a_long_pattern_is_kept_and_said():
    found = built(config_of("gemma3_text"))
    assert found.notes == ["6 layers: its layer pattern is that long (layer_types)"]
    assert set(found.model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert found.model.config.sliding_window == 8


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "deepseek_v3", "mamba2", "gpt_neo", "phi3"])
def test_types_of_many_kinds_shrink(name):
    found = built(config_of(name, **({"pad_token_id": 0} if name == "phi3" else {})))
    assert sum(p.numel() for p in found.model.parameters()) < 2e6
    assert not any("full size" in note for note in found.notes)


def test_a_size_that_must_not_shrink_stays_full():
    def picky(config):
        if config.vocab_size < 500:
            raise ValueError("500 words at least")
        return models.randomise(nn.Sequential(), "none") if config is None else make(config)

    def make(config):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(config)

    found = clone(config_of("llama", vocab_size=500), picky)
    assert found.notes == ["full size, because smaller values fail: vocab"]
    with pytest.raises(CaptureError, match="no small model of LlamaConfig: ValueError: 500 words"):
        clone(config_of("llama", vocab_size=400), picky)


def test_a_clone_is_the_same_each_time():
    """What a type's own code draws, too, such as the decays of its states."""
    found = [built(config_of("qwen3_next")).model.state_dict() for _ in range(2)]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_every_layer_matters():
    """A layer that changes nothing would let a wrong one pass."""
    model = built(config_of("llama")).model
    tokens = torch.arange(20).reshape(2, 10)
    want = model(tokens).logits
    for layer in model.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            kept, part.weight.data = part.weight.data, torch.zeros_like(part.weight)
            assert (model(tokens).logits - want).abs().max() > 0.05 * want.abs().max()
            part.weight.data = kept


def test_fields_are_found_by_what_they_count():
    small = shrunk(config_of("mistral", sliding_window=4096), 2, ("head", "window"))
    assert small.sliding_window == 8 and small.vocab_size == 32000 and small.num_hidden_layers == 2
    moe = shrunk(config_of("deepseek_v3"), 4, ("head", "experts"))
    assert (moe.n_routed_experts, moe.n_group, moe.topk_group) == (8, 2, 1)


# What it says


@pytest.mark.long
def test_a_directory_without_weights_through_the_command(directory):
    result = call(directory, "--recipe", "base", "--target", "onnx", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (cell,) = found["cells"]
    assert found["ok"] and (cell["recipe"], cell["target"]) == ("base", "onnx")
    assert cell["status"] == "right" and 0 < cell["error"] < 1e-4 and found["layers"] == 2
    assert "smoke: 100% done" in result.stderr


SOME = ["base", "float16", "snapkv", "kivi-2", "quest", "calm", "gemfilter", "token-recycling"]


@pytest.mark.long
@pytest.mark.parametrize("recipes", [SOME, pytest.param(None, marks=pytest.mark.long)])
def test_every_recipe_in_its_own_sizes(recipes):
    """A plain module, taken as it is."""
    found = accel.smoke(models.tiny().eval(), recipes, ["onnx"])
    assert found.ok and found.seconds > 0
    assert {c.recipe for c in found.cells} >= set(SOME)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "fields"),
    [("gemma2", {"attn_logit_softcapping": 2.0}), ("gpt2", {"scale_attn_by_inverse_layer_idx": True})],
)  # fmt: skip
@pytest.mark.long
def test_what_the_fused_attention_leaves_out_is_in_the_reference(name, fields):
    found = accel.smoke(small_config(name, **fields), ["base"], ["eager"])
    assert [c.status for c in found.cells] == ["right"], found.cells


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.few(1)
def test_a_model_in_half_precision_is_compared_in_float32(own):
    given = models.tiny().bfloat16() if own else small_config("llama", dtype="bfloat16")
    found = accel.smoke(given, ["base"], ["eager"])
    assert [c.status for c in found.cells] == ["right"], found.cells
    assert not own or next(given.parameters()).dtype is torch.bfloat16, "the user's stays as it was"


def test_every_target():
    """A lossy recipe is approximate and says by how much."""
    found = accel.smoke(models.tiny().eval(), ["base", "float16"])
    by = {(c.recipe, c.target): c for c in found.cells}
    assert set(by) == {(r, t) for r in ("base", "float16") for t in ("onnx", "eager")}
    assert by["base", "onnx"].status == by["base", "eager"].status == "right"
    assert by["float16", "eager"].status == "approximate"


@pytest.mark.long
def test_a_model_that_fills_masks_is_written_over(monkeypatch):
    """And where a session leaves in sight what was forgotten, that is seen."""
    found = accel.smoke(models.FILLERS["dream"](), ["base", "dllm-threshold"], ["eager"])
    assert [c.status for c in found.cells] == ["refused", "approximate"], found.cells
    own = CanvasState.write
    monkeypatch.setattr(
        CanvasState,
        "write",
        lambda s, calls, tokens, start, *_: own(s, calls, tokens, start, None, None),
    )
    (cell,) = accel.smoke(models.FILLERS["dream"](), ["dllm-lowconf"], ["eager"]).cells
    assert cell.status == "wrong" and "shorter" in cell.reason


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_an_encoder_decoder_is_compared_with_its_encoders_input(name):
    source = small_model(name)
    found = accel.smoke(source.model, ["base"], ["eager"])
    assert [c.status for c in found.cells] == ["right"], found.cells


def test_a_model_that_cannot_be_compiled_is_refused_and_crashes_are_placed(monkeypatch):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = models.tiny()

        def forward(self, tokens):
            return self.inner(tokens) + self.inner(tokens).cumsum(1)

    (cell,) = accel.smoke(Sums().eval(), ["base"], ["eager"]).cells
    assert cell.status == "refused" and "mixes tokens outside attention" in cell.reason

    def broken(self, program):
        raise TypeError("no such thing")

    monkeypatch.setattr(Float16, "run", broken)
    found = accel.smoke(models.tiny(), ["float16"], ["eager"])
    assert not found.ok and found.cells[0].status == "crashed"
    assert found.cells[0].reason == "TypeError: no such thing"
    assert found.cells[0].where.startswith("__init__.py:"), "the pass manager, which called it"


def sessions(model, change):
    """Sessions that give a module's own logits, in float64; `change(part, logits)` may change those of a call."""

    class Session:
        def __init__(self, batch):
            self.rows, self.calls, self.rewound = [[] for _ in range(batch)], 0, False

        def run(self, ids, lengths=None):
            logits = np.zeros((*ids.shape, 31), np.float32)
            for row, new in enumerate(ids):
                kept = list(new) if lengths is None else list(new[: lengths[row]])
                self.rows[row] += kept
                with Float64():
                    whole = smoke_module.own_logits(model, torch.tensor([self.rows[row]]))[0]
                logits[row, : len(kept)] = whole[len(whole) - len(kept) :].numpy()
            self.calls += 1
            now = "ragged" if len(self.rows) > 1 else "rewind" if self.rewound else "steps"
            change("prefill" if self.calls == 1 and now == "steps" else now, logits)
            return logits

        def rewind(self, length):
            self.rows, self.rewound = [row[:length] for row in self.rows], True

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    class Compiled:
        facts = type(
            "Facts", (), {"max_context": 64, "encoder": None, "depth": None, "diffusion": None}
        )
        session = staticmethod(Session)

    return Compiled


class Cancels(nn.Module):
    """Logits of some tokens are what is left of two large terms, so float32 knows four of their digits."""

    def __init__(self):
        super().__init__()
        self.inner = models.tiny()

    def forward(self, tokens):
        x = self.inner(tokens)
        large = torch.where(tokens[..., None] % 3 == 0, 3e4, 0.0) * (x + 1.1)
        return x + large - large


@pytest.mark.parametrize("size", [0.0, 1.5e-4])
def test_what_rounding_moves_is_right_and_a_fault_beside_it_is_not(size):
    """The control: a fault of little more than the bound in the tokens that float32 does know."""
    model, before = Cancels().eval(), []

    def wrong(part, logits):
        before.append(part)
        if part == "steps" and before.count("steps") == 2:
            logits[0, 0, 3] += size * max(1.0, np.abs(logits).max())

    errors = smoke_module.compare(model, sessions(model, wrong))
    assert {p for p, e in errors.items() if e > 1e-4} == ({"steps"} if size else set()), errors
    plain = smoke_module.compare(model, sessions(model, wrong), bound=0.1)
    assert max(plain.values()) > 3e-4, "without that, the module's rounding is an error"


@pytest.mark.parametrize("part", ["prefill", "steps", "rewind", "ragged"])
def test_a_wrong_number_anywhere_is_seen(part, monkeypatch):
    """The control: a session that goes wrong in one way of calling it only."""
    model = models.tiny()

    def wrong(now, logits):
        if now == part:
            logits[-1, -1, 3] += 0.1

    Compiled = sessions(model, wrong)
    errors = smoke_module.compare(model, Compiled)
    assert {p for p, e in errors.items() if e > 1e-4} == {part}
    medians = smoke_module.compare(model, Compiled, turns=True)
    seen = {p.removeprefix("median token of ") for p, e in medians.items() if e > 1e-4}
    assert seen == ({part} if part == "steps" else set()), "the other calls are wrong in one token"
    found = smoke_module.judge(assemble(accel.Recipe.load("base")), errors)
    assert found["status"] == "wrong" and found["where"] == part and part in found["reason"]
    lossy = smoke_module.judge(assemble(accel.Recipe.load("float16")), {part: 0.03})
    assert lossy["status"] == "wrong"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_rounded_mixtures_are_judged_by_the_median_token(kind):
    """In which some tokens' experts turn: their largest errors are 0.34 and 0.77."""
    cells = accel.smoke(kind, ["int8"]).cells
    assert all(c.status == "approximate" and c.where.startswith("median token") for c in cells)
    assert all(c.error is not None and c.error < 0.1 for c in cells)


def test_a_check_of_the_build_that_fails_is_wrong_not_refused(monkeypatch):
    def shifted(self, program, step):
        self.cases = [(tokens, want + 1) for tokens, want in self.cases]
        return before(self, program, step)

    before = NumericCheck.__call__
    monkeypatch.setattr(NumericCheck, "__call__", shifted)
    found = accel.smoke(models.tiny(), ["base"], ["eager"])
    assert not found.ok and found.cells[0].status == "wrong"
    assert "changed what the program computes" in found.cells[0].reason


# What it takes, and what it does not


def test_a_reference_to_a_callable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text(
        "import models\nmake = models.tiny\nnumber = lambda: 3\n", encoding="utf-8"
    )
    before = list(sys.path)
    source = small_model("own_net:make")
    assert isinstance(source.model, models.PlainSdpa) and sys.path == before
    for name, words in {
        "own_net:mak": "did you mean 'make'",
        "own_net:number": "returned a int, not an nn.Module",
        "no_such_net:make": "importing no_such_net failed: ModuleNotFoundError",
    }.items():
        with pytest.raises(CaptureError, match=words):
            small_model(name)


@pytest.mark.parametrize(
    "given, words",
    [
        ("lama", "knows no 'lama'; did you mean 'llama'"),
        ("vit", "'vit' is a vision model, not a causal language model"),
        ("./none", "does not exist; give a directory with a config.json"),
        (3, "cannot make a small model of a int; give a model directory"),
    ],
)
def test_what_is_no_model(given, words):
    with pytest.raises(CaptureError, match=words):
        small_model(given)


def test_unknown_recipes_and_targets_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(smoke_module, "small_model", None)
    with pytest.raises(RecipeError, match="did you mean 'float16'"):
        accel.smoke("llama", ["float15"])
    with pytest.raises(RecipeError, match="'float15' does not exist; did you mean 'float16'"):
        accel.smoke("llama", "float15")
    with pytest.raises(RecipeError, match="'onx' does not exist"):
        accel.smoke("llama", targets="onx")
    with pytest.raises(RecipeError, match="did you mean 'onnx'"):
        accel.smoke("llama", targets=["onx"])


def test_the_command_leaves_with_1_where_something_is_wrong(monkeypatch):
    cells = [smoke_module.Cell("base", "onnx", "wrong", 0.5, "steps", "more than 1e-04: steps")]
    found = smoke_module.Smoke("Llama", 2, 9, ["a note"], 1.0, cells)
    monkeypatch.setattr(smoke_module, "smoke", lambda *_, **__: found)
    result = call("llama")
    assert result.exit_code == 1
    for word in ("WRONG", "steps", "5.0e-01", "a note", "base for onnx: wrong", "more than"):
        assert word in result.stdout, word
