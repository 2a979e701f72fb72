"""What cannot work is refused before any long work, by name: the thing, the place, the reason, the next act."""

import json
from dataclasses import dataclass

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel import AccelError, CaptureError, PassError, RecipeError
from accel.compiler import job as building
from accel.compiler.pipeline import pipeline
from accel.passes import check_order
from accel.passes.clean.clean import Clean
from accel.passes.recognise.attention import Attention
from accel.passes.weights.float16 import Float16


@pytest.fixture(autouse=True)
def nothing_long(monkeypatch):
    """No export is started and no weight is read, unless the test asks for `long_work`."""
    from transformers import AutoModelForCausalLM

    def started(*_, **__):
        pytest.fail("long work was started")

    monkeypatch.setattr(torch.export, "export", started)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", started)


@pytest.fixture
def long_work(nothing_long, monkeypatch):
    monkeypatch.undo()


def refused(model, *words, kind=CaptureError, **options):
    with pytest.raises(kind) as caught:
        accel.optimize(model, target="eager", **options)
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    assert len(text) < 700 and "\n" not in text
    return text


# Model directories, by their config.json


@pytest.fixture
def directory(tmp_path):
    def make(config):
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        (tmp_path / "model.safetensors").write_bytes(b"")
        return tmp_path

    return make


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", ["config.json is not valid JSON"]),
        ("[]", ["is not a configuration: it holds a list"]),
        ({"hidden_size": 8}, ["config.json has no model_type", '"model_type": "llama"']),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            ["own Python code (auto_map in config.json)", "type 'own'", "trust_remote_code=True"],
        ),
        (
            {"model_type": "qwen33"},
            ["model_type", "knows no 'qwen33'; did you mean 'qwen3'", "trust_remote_code=True"],
        ),
        ({"model_type": "zzzz"}, ["knows no 'zzzz'; a model type newer", "upgrade"]),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
            ["'vit' is a vision model, not a causal language model"],
        ),
        (
            {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]},
            ["'distilbert' is a bidirectional encoder", "the nearest causal type is 'bert'"],
        ),
        (
            {"model_type": "kosmos-2", "text_config": {}},
            ["'kosmos-2' is a model of images and text, not a causal language model"],
        ),
        (
            {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
            ["architectures of config.json is LlamaForSequenceClassification", "LlamaForCausalLM"],
        ),
        ({**LLAMA, "architectures": 1}, ["is 1, not a list of class names", "correct it, as in"]),
        (
            {"model_type": "bert", "architectures": ["BertForQuestionAnswering"]},
            ["is BertForQuestionAnswering", "no logits over a vocabulary", "BertLMHeadModel"],
        ),
        (
            {**LLAMA, "_name_or_path": "org/base", "quantization_config": {"quant_method": "hqq"}},
            ["stored in hqq", "it reads awq, bitsandbytes", "(org/base)", "with a recipe"],
        ),
    ],
    ids=str,
)
def test_a_directory_is_refused_by_its_configuration(directory, config, words):
    path = directory(config)
    refused(path, str(path), *words)


def test_a_path_that_is_no_model_directory(tmp_path):
    refused(tmp_path / "none", "none does not exist; give a GGUF file or a model directory")
    refused(tmp_path, "holds no config.json; a Hugging Face model directory holds one")
    (tmp_path / "accel.json").write_text("{}")
    refused(tmp_path, "it is an accel artifact: open it with accel.load")


def test_a_good_configuration_passes_as_far_as_its_weights(directory):
    """The control: what refuses the others lets this one through."""
    path = directory(LLAMA)
    (path / "model.safetensors").unlink()
    refused(path, "holds no *.safetensors; save the model with model.save_pretrained")


@pytest.mark.long
def test_code_of_its_own_is_not_needed_where_transformers_has_the_type(tmp_path, long_work):
    """As published DeepSeek-V3, MiniMax-M2 and Nemotron-H folders are, which are older than transformers' classes."""
    models.llama().save_pretrained(tmp_path)
    plain = accel.optimize(tmp_path, target="eager", max_context=32, verify=False)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    told = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": told}))
    (tmp_path / "own.py").write_text("raise SystemExit('this code must not run')")
    found = accel.optimize(tmp_path, target="eager", max_context=32, verify=False)
    with plain, found, plain.session() as a, found.session() as b:
        assert (a.run([[5, 6, 7]]) == b.run([[5, 6, 7]])).all()
    assert not any("own Python code" in note for note in plain.report["notes"])
    assert any("own llama is used" in note for note in found.report["notes"])


# Modules, before they are exported


def bert(**fields):
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, **fields,
    )  # fmt: skip
    return models.randomise(BertLMHeadModel(config), "bert")


def test_an_encoder_is_refused_by_the_module_that_looks_ahead():
    refused(
        bert(),
        "BertLMHeadModel is bidirectional: bert.encoder.layer.0.attention",
        "BertSelfAttention) lets a token attend to later tokens",
        "config.is_decoder = True, set before loading",
    )


class Both(nn.Module):
    """Attention without a mask, in the second of two blocks."""

    def __init__(self, causal=False):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 8), nn.Linear(8, 29)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Mixes(causal)])

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Mixes(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, x):
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=self.causal)[:, 0]


def test_a_plain_module_that_looks_ahead():
    refused(
        models.randomise(Both(), "both"),
        "Both is bidirectional: blocks.1 (Mixes) lets a token attend to later tokens",
        "give a causal language model",
    )


@pytest.mark.parametrize("make", [lambda: bert(is_decoder=True), lambda: Both(causal=True)])
def test_what_is_causal_is_not_refused(make, long_work):
    accel.optimize(
        models.randomise(make(), "causal"), target="eager", max_context=32, verify=False
    ).close()


def small(name, cls, **fields):
    import transformers

    config = transformers.AutoConfig.for_model(
        name, vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, **fields,
    )  # fmt: skip
    return getattr(transformers, cls)(config).eval()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: small("llama", "LlamaForSequenceClassification", intermediate_size=32),
            ["LlamaForSequenceClassification: its head gives no logits", "give LlamaForCausalLM"],
        ),
        (
            lambda: small("gpt2", "GPT2ForTokenClassification"),
            ["GPT2ForTokenClassification: its head", "give GPT2LMHeadModel"],
        ),
        (
            lambda: small("llama", "LlamaModel", intermediate_size=32),
            ["LlamaModel.forward returned BaseModelOutputWithPast, not logits", "LlamaForCausalLM"],
        ),
    ],
)
def test_a_head_that_is_none_over_a_vocabulary(make, words):
    refused(make(), *words)


def test_a_model_that_takes_no_tokens():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = ViTForImageClassification(config)
    refused(model, "ViTForImageClassification.forward takes pixel_values, not token ids [B,T]")


def test_weights_without_values():
    refused(models.tiny().to("meta"), "on the meta device, which hold no values; load them first")


@pytest.mark.parametrize("what", [3, "", None, object()])
def test_what_is_no_model_at_all(what):
    refused(what, kind=AccelError)


# Recipes


def test_a_recipe_that_cannot_take_the_model(monkeypatch):
    """A method says so by the model's configuration, before its weights are used."""
    asked = []

    def needs_rope(self, facts):
        asked.append(facts.config)
        return None if "rope_parameters" in facts.config else "it turns keys by position (rope)"

    monkeypatch.setattr(Float16, "refuse", needs_rope)
    refused(
        models.gpt2(), "recipe 'float16': weights = 'float16' cannot take GPT2LMHeadModel: it turns keys",
        "leave it out", recipe="float16", kind=RecipeError,
    )  # fmt: skip
    assert asked[0]["model_type"] == "gpt2"
    with pytest.raises(pytest.fail.Exception, match="long work"):
        accel.optimize(models.llama(), "float16", target="eager")


def test_passes_out_of_order_are_refused_before_the_model_is_touched(monkeypatch):
    @dataclass(frozen=True)
    class Early(Clean):
        after = (Attention,)

    before = pipeline()
    monkeypatch.setattr(building, "pipeline", lambda *_: [Early(), *before])
    refused("no/such/model", "Early runs after Attention; move it", kind=PassError)
    with pytest.raises(PassError, match="Early runs after Attention"):
        check_order([Early()])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "bse"}, "did you mean 'base'"),
        ({"recipe": {"weights": {"use": "flaot16"}}}, "did you mean 'float16'"),
        ({"max_context": 0}, "max_context is 0; give a whole number of at least 1"),
        ({"out": "somewhere"}, "target 'eager' writes no files; use target='onnx'"),
    ],
)
def test_options_are_checked_first(options, words):
    refused("no/such/model", words, kind=AccelError, **options)


# While exporting


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = models.tiny()

    def forward(self, tokens):
        logits = self.inner(tokens)
        return logits * 2 if logits.sum() > 0 else logits


def test_a_branch_on_values_says_one_thing_and_prints_nothing(capfd, long_work):
    """torch prints the graph that it gives up on."""
    refused(Branch(), "Branch cannot be captured: model (Branch.forward, line", "torch.where")
    out, err = capfd.readouterr()
    assert out == err == ""
