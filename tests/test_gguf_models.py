"""Small models of every architecture of GGUF files: their logits and tokens are llama.cpp's."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

import accel
from accel.compiler.load.gguf import ARCHITECTURES, _blocks, open_gguf
from accel.compiler.load.gguf._file import GgufFile, read_gguf
from accel.compiler.load.source import open_source
from accel.ir.errors import CaptureError
from accel.ir.weights import Pages, reading

from .gguf_case import bpe, metadata, words, write
from .gguf_models import MODELS, SIZES

lib = pytest.importorskip("llama_cpp")

from llama_logits import Peer  # noqa: E402 -- which imports llama_cpp

IDS = [3, 5, 9, 20, 41, 7, 60, 62, 12, 17, 33]
CONVERTER = "LLAMA_CPP"  # an environment variable: a folder with llama.cpp's source


def tensors(case, model):
    """Those of a file that are no weights, or that the model does not have."""
    if (
        case.arch == "gemma3n"
        and "model.layers.20.self_attn.k_proj.weight" not in model.state_dict()
    ):
        shapes = {"attn_k": (16, 32), "attn_v": (16, 32), "attn_k_norm": (16,)}
        layers = range(20, case.sizes["num_hidden_layers"])
        zeros = {k: torch.zeros(shape).numpy() for k, shape in shapes.items()}
        return [(f"blk.{i}.{k}.weight", zero) for i in layers for k, zero in zeros.items()]
    if case.kind == "Gemma4TextConfig":
        factors = torch.tensor([1.0] * 4 + [1e30] * 12)
        return [("rope_freqs.weight", factors.numpy())]
    if "short_factor" in case.sizes.get("rope_parameters", {}):
        rope = case.sizes["rope_parameters"]
        kinds = ("long", "short")
        return [
            (f"rope_factors_{k}.weight", torch.tensor(rope[f"{k}_factor"]).numpy()) for k in kinds
        ]
    return []


def written(name, folder, kind="F32"):
    """A model, and its file."""
    case = MODELS[name]
    if case.missing:
        pytest.skip(f"transformers {hf.__version__} has no {case.kind}")
    model, more = case.made(), [*bpe(), *metadata(case.arch, case.told)]
    path = write(model, case.arch, folder / "m.gguf", kind, more=more, tensors=tensors(case, model))
    return model, path


def logits(model, stored=None):
    with torch.no_grad(), reading(stored or {}):
        return model.eval()(torch.tensor([IDS])).logits[0]


DEEP = ("command-r-plus", "exaone4-windows")  # 64 layers, as llama.cpp knows such models by
SLOW = ("gemma3n", *DEEP)
NAMES = [pytest.param(n, marks=pytest.mark.long) if n in SLOW else n for n in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, tmp_path):
    """The model that is read is the one that was written, and llama.cpp computes with the file what it does."""
    model, path = written(name, tmp_path)
    loaded = open_source(path).load()
    assert not loaded.notes
    found, wanted = logits(loaded.model, loaded.stored), logits(model)
    size = float(wanted.abs().max())
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * size)
    theirs = Peer(path).logits(IDS)
    assert torch.allclose(found, theirs, rtol=0, atol=MODELS[name].near * size)


@pytest.mark.parametrize("name", NAMES)
def test_codes(name, tmp_path, monkeypatch):
    """Of matrices in Q8_0, put where the model has them: the same numbers as of their floats."""
    _, path = written(name, tmp_path, "Q8_0")
    loaded = open_source(path).load()
    (note,) = loaded.notes
    assert "are quantised (Q8_0)" in note
    found = logits(loaded.model, loaded.stored)
    monkeypatch.setattr(_blocks, "FORMS", {})
    floats = open_source(path).load()
    assert "are computed in float32" in floats.notes[1]
    wanted = logits(floats.model, floats.stored)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if name not in DEEP])
def test_tokens(name, tmp_path):
    _, path = written(name, tmp_path)
    wanted = Peer(path).continued(IDS, 32)
    with accel.optimize(path, "base", max_context=64, verify=False) as compiled:
        found = compiled.generate([IDS], max_new_tokens=32, eos=[]).tokens[0]
    assert list(found) == wanted
    assert len(set(wanted)) > 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_experts_of_gpt_oss_stay_codes(kind, tmp_path):
    """Although its matrices are transposed, with gates and ups in turn. The build compares it with the model."""
    _, path = written("gpt-oss", tmp_path, kind)
    loaded = open_source(path).load()
    wanted = logits(loaded.model, loaded.stored)
    with accel.optimize(path, "base", max_context=64) as compiled, compiled.session() as session:
        (kept,) = [step for step in compiled.report["steps"] if step["name"] == "Kept"]
        found = torch.from_numpy(session.run([IDS]))[0]
    assert not kept["refused"]
    assert float((found - wanted).abs().max()) < 0.1 * float(wanted.abs().max())


def test_what_is_left_out_is_said(tmp_path):
    """Layers that draft, which come last, and what reads images."""
    case = MODELS["glm4moe"]
    model, told = case.made(), {**case.told, "block_count": 3, "nextn_predict_layers": 1}
    blank = torch.zeros(64, 64).numpy()
    names = ("blk.2.attn_q.weight", "blk.2.nextn.eh_proj.weight", "v.blk.0.attn_q.weight")
    extra = [(name, blank) for name in names]
    path = write(
        model, case.arch, tmp_path / "m.gguf", more=metadata(case.arch, told), tensors=extra
    )
    loaded = open_source(path).load()
    assert loaded.notes == [
        "left out of the file: 2 of layers that draft (nextn) (blk.2.attn_q.weight, …), "
        "1 of what reads images or sounds (v.blk.0.attn_q.weight, …)"
    ]
    found, wanted = logits(loaded.model, loaded.stored), logits(model)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


WRONG = {
    "drafts": ({"nextn_predict_layers": 2}, "nextn_predict_layers is 2 of 2 layers"),
    "lacks": ({"block_count": 3}, "block_count is 3, and it holds 2 layers"),
    "rotation": ({"rope.dimension_count": 34}, "rope.dimension_count is 34 for heads of 32"),
    "norm": ({"expert_weights_norm": 1}, "expert_weights_norm is 1, not yes or no"),
    "used": ({"expert_used_count": 9}, "expert_used_count is 9 of 4 experts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_does_not_fit_is_refused(name, tmp_path):
    case, (told, why) = MODELS["glm4moe"], WRONG[name]
    more = metadata(case.arch, {**case.told, **told})
    path = write(case.made(), case.arch, tmp_path / "m.gguf", more=more)
    with pytest.raises(CaptureError) as error:
        open_source(path).load()
    assert why in str(error.value) and str(path) in str(error.value)


def test_half_of_a_joined_parameter_is_refused(tmp_path):
    case = MODELS["granitemoe"]
    path = write(case.made(), case.arch, tmp_path / "m.gguf", more=metadata(case.arch, case.told))
    file = read_gguf(path)
    del file.tensors["blk.1.ffn_up_exps.weight"]
    with pytest.raises(CaptureError, match="it lacks blk.1.ffn_up_exps.weight"):
        open_gguf(file).weights()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"general.architecture": "clip"}, "reads images or sounds .mmproj.; give the file of the"),
        (
            {"general.architecture": "llama", "general.type": "adapter"},
            "it is a LoRA adapter; give the",
        ),
        ({"general.architecture": "qwen36"}, "did you mean 'qwen3'"),
        (
            {"general.architecture": "bloom"},
            "known: .*command-r, .*; give the Hugging Face checkpoint",
        ),
    ],
)
def test_files_that_hold_no_such_model_are_refused(fields, why, tmp_path):
    file = GgufFile(tmp_path / "m.gguf", fields, {}, Pages())
    with pytest.raises(CaptureError, match=why):
        open_gguf(file)


@pytest.mark.skipif(not MODELS["gemma4"].missing, reason="this transformers has it")
def test_a_type_that_transformers_lacks_is_refused(tmp_path):
    case = MODELS["gemma4"]
    factors = torch.tensor([1.0] * 4 + [1e30] * 12).numpy()
    told = {**case.told, "attention.head_count_kv": 2}
    blank = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "num_hidden_layers": 6}))
    path = write(
        blank,
        "gemma4",
        tmp_path / "m.gguf",
        more=metadata("gemma4", told),
        tensors=[("rope_freqs.weight", factors)],
    )
    with pytest.raises(CaptureError, match="knows no 'gemma4_text'.*pip install -U transformers"):
        open_source(path).load()


def test_every_architecture_has_a_model():
    """Those without one here are in test_gguf.py, or its parts."""
    from .test_gguf import MODELS as OTHERS

    held = {case.arch for case in MODELS.values()} | {arch for arch, *_ in OTHERS.values()}
    assert {name.replace("_", "-") for name in held} == set(ARCHITECTURES.names())


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_the_writer_of_these_tests_is_llama_cpps(name, tmp_path, monkeypatch):
    """Against the converter itself: the same tensors, and the same metadata where both tell of something."""
    if CONVERTER not in os.environ:
        pytest.skip(f"set {CONVERTER} to a folder with llama.cpp's source")
    model, path = written(name, tmp_path)
    theirs = _converted(model, MODELS[name], tmp_path, monkeypatch)
    mine, other = read_gguf(path), read_gguf(theirs)
    assert mine.tensors.keys() == other.tensors.keys()
    for key, tensor in mine.tensors.items():
        assert tensor.shape == other.tensors[key].shape, key
        a, b = (one.tensors[key].data.view(torch.float32) for one in (mine, other))
        assert torch.allclose(a, b, rtol=1e-6, atol=0), key
    arch = MODELS[name].arch
    for key, value in mine.fields.items():
        if key.startswith(f"{arch}.") and key in other.fields:
            numbers = not isinstance(value, str)
            assert value == (
                pytest.approx(other.fields[key], rel=1e-5) if numbers else other.fields[key]
            ), key
    untold = {key for key in other.fields if key.startswith(f"{arch}.")} - mine.fields.keys()
    assert not {key.removeprefix(f"{arch}.") for key in untold} - {
        "vocab_size",
        "rope.dimension_count",
    }


def _converted(model, case, folder, monkeypatch):
    """A model's file as the converter writes it."""
    for part in ("gguf-py", ""):
        monkeypatch.syspath_prepend(str(Path(os.environ[CONVERTER]) / part))
    kept = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "gguf"
    }
    try:
        import conversion
        from conversion import base, gemma, llama, qwen

        monkeypatch.setattr(base.TextModel, "get_vocab_base_pre", lambda *_: "llama-bpe")
        for kind in (gemma.Gemma4Model, qwen.Qwen3NextModel, *qwen.Qwen3NextModel.__subclasses__()):
            monkeypatch.setattr(kind, "no_mtp", True, raising=False)
        _save(model, case, folder / "hf")
        found = base.ModelBase.load_hparams(folder / "hf", False)
        kind = conversion.get_model_class(base.get_model_architecture(found, base.ModelType.TEXT))
        for one in (kind, llama.LlamaModel):
            monkeypatch.setattr(one, "set_vocab", lambda self: self._set_vocab_gpt2())
        kind(
            folder / "hf", base.gguf.LlamaFileType.ALL_F32, folder / "theirs.gguf", eager=True
        ).write()
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
            del sys.modules[name]
        sys.modules |= kept
    return folder / "theirs.gguf"


def _save(model, case, folder):
    """A folder as transformers writes it, with the tokenizer of these tests."""
    whole = case.kind == "Gemma3nTextConfig"  # some of whose names transformers writes wrong
    model.save_pretrained(folder, save_original_format=not whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **case.patch}))
    tokens, pairs, _ = words()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(pair.split(" ")) for pair in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(tokens[:5])
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    if case.arch == "phi3":  # Phi-4's tokenizer, which the converter knows by its class
        told = folder / "tokenizer_config.json"
        told.write_text(
            json.dumps({**json.loads(told.read_text()), "tokenizer_class": "GPT2Tokenizer"})
        )
