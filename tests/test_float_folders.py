"""A GGUF file as floats: a folder that transformers and accel load, with the numbers that are in the GGUF file."""

import bench_floats
import pytest
import torch
import transformers as hf
from safetensors import safe_open

from accel.compiler.load import floats
from accel.compiler.load.gguf import _paired
from accel.compiler.load.source import open_source
from accel.ir.errors import AccelError, CaptureError

from .gguf_case import bpe, write
from .test_gguf import LLAMA3, MODELS, SIZES, logits, made


@pytest.fixture
def file(tmp_path):
    """A llama in Q8_0 with a tokenizer."""
    config = hf.LlamaConfig(**{**SIZES, "vocab_size": 320})
    return write(made(config), "llama", tmp_path / "m.gguf", "Q8_0", bpe("smollm"))


@pytest.mark.few(8)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_what_the_file_holds(name, tmp_path):
    arch, config, more = MODELS[name]
    model = made(config())
    floats.write(write(model, arch, tmp_path / "m.gguf", more=more), tmp_path / "m")
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info.values()), info
    wanted = logits(model)
    assert (logits(loaded) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_rows_in_the_order_of_the_file_are_another_model(tmp_path, monkeypatch):
    """What the test above would see of a mistake."""
    monkeypatch.setattr(_paired, "paired", lambda rows, heads: torch.arange(rows))
    model = made(hf.LlamaConfig(**SIZES))
    floats.write(write(model, "llama", tmp_path / "m.gguf"), tmp_path / "m")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    wanted = logits(model)
    assert (logits(loaded) - wanted).abs().max() > 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_those_of_accels_own_reading(dtype, file, tmp_path):
    floats.write(file, tmp_path / "m", dtype)
    ours, theirs = (open_source(path).load() for path in (file, tmp_path / "m"))
    kept = dict(theirs.model.state_dict(keep_vars=True))
    for name, tensor in ours.model.state_dict(keep_vars=True).items():
        wanted, found = (
            loaded.stored[one].read() if one in loaded.stored else one
            for loaded, one in ((ours, tensor), (theirs, kept[name]))
        )
        assert torch.equal(found, wanted.to(dtype).float()), name
    assert hf.AutoConfig.from_pretrained(tmp_path / "m").dtype is dtype


def test_the_tokenizer_its_template_and_what_ends_a_text_come_along(file, tmp_path):
    floats.write(file, tmp_path / "m")
    ours, theirs = open_source(file).tokenizer, hf.AutoTokenizer.from_pretrained(tmp_path / "m")
    text, turns = "the theory <|im_end|> of 12 things", [{"role": "user", "content": "the thing"}]
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode(theirs.encode(text, add_special_tokens=False)) == text
    assert theirs.apply_chat_template(turns, tokenize=False) == "the thing"
    ends = hf.GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id
    assert {theirs.convert_ids_to_tokens(i) for i in ends} == {"</s>", "<|im_end|>"}


def test_large_models_are_written_in_parts(file, tmp_path, monkeypatch):
    monkeypatch.setattr(floats, "SHARD", 50_000)
    floats.write(file, tmp_path / "m")
    parts = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(parts) > 3
    for part in parts:
        with safe_open(part, "pt") as inside:
            names = list(inside.keys())
            size = sum(inside.get_tensor(name).nbytes for name in names)
        assert size <= 50_000 or len(names) == 1, part
    whole = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    loaded = open_source(file).load()
    wanted = logits(loaded.model, loaded.stored)
    assert (logits(whole) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_written_whole_or_not_at_all(file, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        floats.write(file, tmp_path / "m", watch=stop)
    assert left(tmp_path) == ["m.gguf"]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").touch()
    with pytest.raises(AccelError, match="name another folder"):
        floats.write(file, tmp_path / "m")
    assert left(tmp_path / "m") == ["mine"]


def test_what_no_configuration_says_is_refused(tmp_path):
    config = hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3)
    factors = ("rope_freqs.weight", torch.ones(8).numpy())
    path = write(made(config), "llama", tmp_path / "m.gguf", tensors=[factors])
    with pytest.raises(CaptureError, match="rope_freqs.weight"):
        floats.write(path, tmp_path / "m")
    assert left(tmp_path) == ["m.gguf"]


def test_numbers_that_a_type_cannot_hold_are_named(tmp_path):
    model = made(hf.LlamaConfig(**SIZES))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    path = write(model, "llama", tmp_path / "m.gguf")
    with pytest.raises(CaptureError, match="layers.1.mlp.up_proj.weight.*bfloat16"):
        floats.write(path, tmp_path / "m", torch.float16)


def test_agreement_is_counted_token_by_token(monkeypatch):
    monkeypatch.setattr(bench_floats, "_ROWS", 3)  # of 8, in parts
    torch.manual_seed(0)
    ours = torch.randn(8, 11)
    theirs, ids = ours + 0.1 * torch.randn(8, 11), torch.arange(8)
    theirs[0] += 9 * torch.eye(11)[ours[0].argmin()]
    found = bench_floats.compared(ours, theirs, ids)
    p, q = ours.log_softmax(-1), theirs.log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert found.first == pytest.approx(float(kl[0]), rel=1e-4) and found.first > 1
    assert found.kl == pytest.approx(float(kl[1:].mean()), rel=1e-3) and found.kl < 0.1
    surprise = torch.nn.functional.cross_entropy(ours[:-1], ids[1:])
    assert found.perplexity == pytest.approx(float(surprise.exp()), rel=1e-4)
    assert found.top1 == float((p.argmax(-1) == q.argmax(-1)).float().mean()) < 1
    same = bench_floats.compared(ours, ours, ids)
    assert (same.kl, same.top1, same.peer) == (0, 1, same.perplexity)
