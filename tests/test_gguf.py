"""GGUF files: the numbers and names in them, their tokenizers, and what is wrong with them."""

import struct
import subprocess
import sys
from collections import Counter

import numpy as np
import onnx
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer as Reader
from typer.testing import CliRunner

import accel
from accel import cli
from accel.compiler.explain import explain
from accel.compiler.load import gguf as own
from accel.compiler.load.gguf import _blocks, _paired
from accel.compiler.load.gguf._file import GgufTensor, read_gguf
from accel.compiler.load.source import Gguf, open_source
from accel.ir.capture.inspect import inspect
from accel.ir.codes import Coded
from accel.ir.errors import AccelError, CaptureError, Miscompiled, RecipeError
from accel.ir.suppressed import Suppressed
from accel.ir.weights import Pages, reading
from accel.lowering.onnx import native
from accel.lowering.onnx.native import join

from .gguf_case import HALVES, SIZE, TOKENS, Type, blocks, bpe, gguf, letters, spm, write

U32, F32, STRING = (gguf.GGUFValueType[name] for name in ("UINT32", "FLOAT32", "STRING"))
SIZES = {
    "vocab_size": SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def made(config):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("norm.weight", "bias")) or ".ln_" in name:
                value.add_(0.2 * torch.randn(value.shape))
            elif "embed" not in name:
                value.mul_(4)
    return model


def logits(model, stored=None):
    with torch.no_grad(), reading(stored or {}):
        return model.eval()(TOKENS).logits


def experts(arch, shared=False):
    told = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    if shared:
        told["expert_shared_feed_forward_length"] = 48
    return [(f"{arch}.{key}", value, U32) for key, value in told.items()]


def scaling(arch, kind, **told):
    more = [(f"{arch}.rope.scaling.{k}", v, F32 if k == "factor" else U32) for k, v in told.items()]
    return [(f"{arch}.rope.scaling.type", kind, STRING), *more]


def window(arch):
    return [(f"{arch}.attention.sliding_window", 5, U32)]


# name -> (architecture, configuration, metadata besides)
MODELS = {
    "llama": ("llama", lambda: hf.LlamaConfig(**SIZES), []),
    "mistral": ("llama", lambda: hf.MistralConfig(**SIZES, sliding_window=None, head_dim=32), []),
    "tied": ("llama", lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=True), []),
    "biased": ("llama", lambda: hf.LlamaConfig(**SIZES, attention_bias=True), []),
    "yarn": (
        "llama",
        lambda: hf.LlamaConfig(**SIZES, rope_parameters=YARN),
        scaling("llama", "yarn", factor=4.0, original_context_length=16),
    ),
    "linear": (
        "llama",
        lambda: hf.LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        ),
        scaling("llama", "linear", factor=2.0),
    ),
    "mixtral": (
        "llama",
        lambda: hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        experts("llama"),
    ),
    "qwen2": ("qwen2", lambda: hf.Qwen2Config(**SIZES), []),
    "qwen3": ("qwen3", lambda: hf.Qwen3Config(**SIZES, head_dim=32), []),
    "qwen2moe": (
        "qwen2moe",
        lambda: hf.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=48),
        experts("qwen2moe", shared=True),
    ),
    "qwen3moe": (
        "qwen3moe",
        lambda: hf.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
        experts("qwen3moe"),
    ),
    "gemma": ("gemma", lambda: hf.GemmaConfig(**SIZES, head_dim=16), []),
    "gemma2": (
        "gemma2",
        lambda: hf.Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=5),
        window("gemma2"),
    ),
    "gemma3": (
        "gemma3",
        lambda: hf.Gemma3TextConfig(
            **{**SIZES, "num_hidden_layers": 6}, head_dim=16, query_pre_attn_scalar=16, sliding_window=5
        ),
        window("gemma3"),
    ),
    "phi3": ("phi3", lambda: hf.Phi3Config(**SIZES), []),
    "gpt2": (
        "gpt2",
        lambda: hf.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=64),
        [],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return made(hf.LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """A llama's file in float32, with a tokenizer."""
    return write(model, "llama", tmp_path_factory.mktemp("gguf") / "plain.gguf", more=bpe())


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_the_numbers_are_llama_cpps(kind):
    torch.manual_seed(1)
    block, _ = gguf.GGML_QUANT_SIZES[Type[kind]]
    shape = (6, 2 * block)
    raw = blocks(kind, shape)
    tensor = GgufTensor(kind, shape, torch.from_numpy(raw).flatten())
    rows = torch.randperm(6)
    found = _blocks.stored("x", tensor, Pages(), rows)
    want = gguf.quants.dequantize(raw, Type[kind])[rows.numpy()]
    assert np.array_equal(found.read().numpy(), want)
    assert isinstance(found, Coded) and int(found.codes().q.max()) < 2 ** found.codes().bits


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture(name, tmp_path):
    arch, config, more = MODELS[name]
    model = made(config())
    loaded = open_source(write(model, arch, tmp_path / "m.gguf", more=more)).load()
    assert type(loaded.model).__name__ in (type(model).__name__, "LlamaForCausalLM")
    wanted, found = logits(model), logits(loaded.model, loaded.stored)
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_rows_of_llamas_queries_are_put_back(plain, model, monkeypatch):
    monkeypatch.setattr(_paired, "paired", lambda rows, heads: torch.arange(rows))
    loaded = open_source(plain).load()
    wanted = logits(model)
    assert (logits(loaded.model, loaded.stored) - wanted).abs().max() > 0.01 * wanted.abs().max()


@pytest.mark.long
def test_factors_of_the_rotation(tmp_path):
    """As the converter writes Llama 3.1's: each frequency is divided by a number of its own."""
    model = made(hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3))
    plain = made(hf.LlamaConfig(**SIZES)).model.rotary_emb.inv_freq
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    path = write(model, "llama", tmp_path / "m.gguf", tensors=[("rope_freqs.weight", factors)])
    loaded = open_source(path).load()
    assert torch.allclose(logits(loaded.model, loaded.stored), logits(model), atol=1e-4)
    with accel.optimize(path, "base", max_context=32, verify=False) as compiled:
        with compiled.session() as session:
            found = torch.from_numpy(session.run(TOKENS.numpy()))
    assert torch.allclose(found, logits(model), atol=1e-3)


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("BF16", "Q8_0", "Q4_1")]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["Q5_1", "F16", "Q4_0", *LONG])
def test_an_artifact(kind, model, tmp_path):
    path = write(model, "llama", tmp_path / "m.gguf", kind, more=bpe())
    loaded = open_source(path).load()
    wanted = logits(loaded.model, loaded.stored)
    with accel.optimize(path, "base", max_context=32, out=tmp_path / "out") as compiled:
        report, quantised = compiled.report, kind.startswith("Q")
        with compiled.session() as session:
            found = torch.from_numpy(session.run(TOKENS.numpy()))
        assert compiled.generate("the thing", max_new_tokens=2).tokens[0]
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < (0.1 if quantised else 1e-4)  # of codes, the inputs are rounded to 8 bits
    kept = [step for step in report["steps"] if step["name"] == "Kept"]
    if not quantised:
        assert not kept and report["grade"] == "lossless"
        return
    assert f"16 weights of the checkpoint are quantised ({kind})" in report["notes"]
    offsets = kind.endswith("_1")
    assert not kept[0]["refused"]
    coded = sum(v.numel() for n, v in model.named_parameters() if v.dim() == 2)
    bits = 4 if kind in ("Q4_0", "Q4_1") else 8
    scales = coded // 32 * 4
    total = coded * bits // 8 + scales * (1 + offsets)
    assert report["weights"]["bytes"] == total


@pytest.mark.few(1)
def test_numbers_of_a_table_stay_codes(model, tmp_path):
    """Of 5 bits, which hold every number of the format."""
    path = write(model, "llama", tmp_path / "m.gguf", "MXFP4")
    loaded = open_source(path).load()
    wanted = logits(loaded.model, loaded.stored)
    with accel.optimize(path, "base", max_context=32) as compiled:
        report = compiled.report
        with compiled.session() as session:
            found = torch.from_numpy(session.run(TOKENS.numpy()))
    assert not any("float32" in note for note in report["notes"])
    (kept,) = [step for step in report["steps"] if step["name"] == "Kept"]
    assert not kept["refused"]
    assert 5 < report["weights"]["bits_per_weight"] < 7
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 0.1


@pytest.mark.long
def test_offsets_are_added(tmp_path, monkeypatch):
    """The control of the test above: without them the artifact is far off."""
    from accel.passes.weights import _kept

    model = made(hf.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))
    path = write(model, "llama", tmp_path / "m.gguf", "Q4_1")
    loaded = open_source(path).load()
    wanted = logits(loaded.model, loaded.stored)
    errors = []

    def stores(program, site, offsets, group):
        """The offsets are there, and nothing reads them."""
        program.params.put_away(f"{site.name}.offsets", offsets.t().contiguous())

    for off in ("", "_add_offsets", "_add_rows"):
        if off:
            monkeypatch.undo()
            monkeypatch.setattr(_kept, off, stores)
        with accel.optimize(path, "base", max_context=32, verify=False) as compiled:
            with compiled.session() as session:
                found = torch.from_numpy(session.run(TOKENS.numpy()))
        errors.append(float((found - wanted).abs().max() / wanted.abs().max()))
    assert errors[0] < 0.1 and min(errors[1:]) > 0.5


@pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
@pytest.mark.parametrize("kind", ["Q4_1", pytest.param("Q5_1", marks=pytest.mark.long)])
def test_offsets_are_read_by_the_products(kind, model, tmp_path):
    """The native step has no node for them, and none for the norms, gates and sums around. The build compares it with
    the model. The control: codes without offsets make as many nodes.
    """
    counts = []
    for name in (kind, "Q8_0"):
        path = write(model, "llama", tmp_path / f"{name}.gguf", name)
        with accel.optimize(path, "base", max_context=32) as compiled:
            file = compiled.artifact.path / "step.native.onnx"
            nodes = onnx.load(file, load_external_data=False).graph.node
            counts.append(Counter(n.op_type for n in nodes))
            if name == kind:
                read = [n.input[7] for n in nodes if n.op_type == "Linear" and len(n.input) > 7]
                assert len(read) == 1 + 4 * model.config.num_hidden_layers
                assert all(".offsets.least" in name for name in read)
    left = counts[0] - counts[1]
    assert set(left) <= {
        "Gather",
        "Reshape",
        "Unsqueeze",
        "Expand",
        "Add",
        "Slice",
        "Concat",
        "Shape",
    }
    assert not {"MatMul", "ReduceSum", "RMSNormalization", "Mul"} & set(counts[0])


@pytest.mark.long
@pytest.mark.skipif(native.library()[0] is None, reason=native.library()[1])
def test_values_of_another_type_are_placed_with_keys(model, tmp_path, monkeypatch):
    """As in files of mixed types. The build compares it with the model. The control: the wrong order is found."""
    path = write(model, "llama", tmp_path / "m.gguf", "Q4_1", others=[("attn_v", "Q8_0")])
    layers = model.config.num_hidden_layers
    with accel.optimize(path, "base", max_context=32) as compiled:
        file = compiled.artifact.path / "step.native.onnx"
        found = Counter(n.op_type for n in onnx.load(file, load_external_data=False).graph.node)
        assert found["Place"] == found["Concat"] == layers and found["Linear"] == 5 * layers + 1
        assert not {"RotaryEmbedding", "Split"} & set(found)
    right = join._beside
    monkeypatch.setattr(join, "_beside", lambda name, *rows: right(name, *reversed(rows)))
    with pytest.raises(Miscompiled, match=r"step\.native\.onnx"):
        accel.optimize(path, "base", max_context=32)


@pytest.mark.long
def test_experts_stay_codes(tmp_path):
    arch, config, more = MODELS["qwen3moe"]
    path = write(made(config()), arch, tmp_path / "m.gguf", "Q4_0", more=more)
    with accel.optimize(path, "base", max_context=32) as compiled:
        (kept,) = [step for step in compiled.report["steps"] if step["name"] == "Kept"]
    assert not kept["refused"]


def test_what_ends_a_text(plain):
    config = Gguf(plain).model.config
    assert config["eos_token_id"] == [2, 4] and config["bos_token_id"] == 1  # <|im_end|> too


def test_a_tokenizer_of_merges(plain):
    reader = Reader.from_str(open_source(plain).tokenizer.json.decode())
    text = "<|im_start|>the theory, isn't it? 12345\n\n ünder 🙂"
    ids = reader.encode(text).ids
    assert ids[:2] == [1, 3] and reader.decode(ids[2:], skip_special_tokens=False).startswith("the")
    config = open_source(plain).tokenizer.config
    assert config.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert config.templates == {"default": "{{ messages[0].content }}"}


@pytest.mark.parametrize("said", [True, False, None])
def test_a_text_for_gemma4_begins_with_bos_whatever_the_file_says(model, tmp_path, said):
    flag, *more = reversed(letters())
    assert flag[0] == "tokenizer.ggml.add_bos_token"
    more += [] if said is None else [(flag[0], said, flag[2])]
    path = write(model, "llama", tmp_path / "a.gguf", more=more)
    reader = Reader.from_str(open_source(path).tokenizer.json.decode())
    assert reader.encode("the").ids[0] == 1
    assert reader.encode("the", add_special_tokens=False).ids[0] != 1


def test_tokens_that_a_file_suppresses(model, tmp_path):
    key = "tokenizer.ggml.suppress_tokens"
    path = write(model, "llama", tmp_path / "a.gguf", more=[*bpe(), (key, [9, 4], None)])
    loaded = open_source(path).load().model
    assert inspect(loaded, 32).suppressed == Suppressed((9, 4))
    for wrong in ([SIZE], [-1], [0.5]):
        path = write(model, "llama", tmp_path / "b.gguf", more=[*bpe(), (key, wrong, None)])
        with pytest.raises(CaptureError, match="suppress_tokens is .*not a list of token ids"):
            open_source(path).load()


def test_a_tokenizer_of_scores(model, tmp_path):
    path = write(model, "llama", tmp_path / "m.gguf", more=spm())
    reader = Reader.from_str(open_source(path).tokenizer.json.decode())
    tokens = reader.encode("there  in<|end|>é").tokens
    assert tokens == ["<s>", "▁the", "re", "▁▁", "in", "<|end|>", "▁", "<0xC3>", "<0xA9>"]
    assert reader.decode(reader.encode("the é").ids) == "the é"


def test_a_model_in_parts(model, plain, tmp_path):
    whole = read_gguf(plain)
    names = list(whole.tensors)
    for part, kept in enumerate((names[:5], names[5:])):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part + 1:05d}-of-00002.gguf", "llama")
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)
        for key, value in whole.fields.items() if part == 0 else ():
            if key.startswith("llama."):
                add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
                add(key, value)
        for name in kept:
            tensor = whole.tensors[name]
            writer.add_tensor(name, tensor.data.view(torch.float32).view(tensor.shape).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first, second = sorted(tmp_path.glob("*.gguf"))
    loaded = open_source(first).load()
    assert torch.allclose(logits(loaded.model, loaded.stored), logits(model), atol=1e-4)
    second.unlink()
    with pytest.raises(AccelError, match="m-00002-of-00002.gguf is not beside it: fetch all parts"):
        open_source(first).load()


@pytest.mark.long
def test_an_explanation(plain):
    told = explain("base", plain, max_context=32, speed=False)
    assert told.grade == "lossless"


def header(*numbers, version=3):
    """A file's beginning: tensors, pairs of metadata, and what follows."""
    start = b"GGUF" + struct.pack("<I", version)
    return start + b"".join(n if isinstance(n, bytes) else struct.pack("<Q", n) for n in numbers)


def key(name, kind):
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind)


HUGE = 2**60
DAMAGED = {
    "empty": (b"", "it has 0 bytes"),
    "magic": (b"GGML" + bytes(100), "it begins with the bytes 47 47 4d 4c, not 47 47 55 46 (GGUF)"),
    "version": (header(0, 0, version=1), "it has version 1 of the format, and accel reads 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "its numbers are big-endian"),
    "short": (b"GGUF\3\0\0\0\0", "at byte 8 it tells of 8 bytes or more, and 1 are left"),
    "tensors": (header(HUGE, 0), "bytes or more, and 0 are left"),
    "pairs": (header(0, HUGE), "and 0 are left"),
    "text": (header(0, 1, HUGE, bytes(50)), "bytes or more, and 50 are left"),
    "array": (header(0, 1, key("a", 9), struct.pack("<IQ", 0, HUGE)), "and 0 are left"),
    "texts": (header(0, 1, key("a", 9), struct.pack("<IQ", 8, HUGE), bytes(64)), "and 64 are left"),
    "arrays": (header(0, 1, key("a", 9), struct.pack("<IQ", 9, HUGE)), "an array of type 9"),
    "kind": (header(0, 1, key("a", 99)), "a value of type 99"),
    "twice": (header(0, 2, key("a", 0), b"\1", key("a", 0), b"\1"), "its metadata has a twice"),
    "utf-8": (header(0, 1, struct.pack("<Q", 1), b"\xff", bytes(8)), "is not UTF-8"),
    "dimensions": (header(1, 0, key("x", 2**31), bytes(99)), "bytes or more"),
    "type": (header(1, 0, key("x", 1), struct.pack("<QIQ", 32, 77, 0), bytes(99)), "x is of ggml's type 77"),
    "block": (header(1, 0, key("x", 1), struct.pack("<QIQ", 31, 2, 0), bytes(99)), "blocks of 32 do not divide"),
    "end": (header(1, 0, key("x", 1), struct.pack("<QIQ", HUGE, 0, 0)), "and x at byte"),
    "offset": (header(1, 0, key("x", 1), struct.pack("<QIQ", 8, 0, HUGE)), "and by the tensors before it at byte"),
    "axes": (header(1, 0, key("x", 5), bytes(99)), "x has 5 axes"),
    "nothing": (header(1, 0, key("x", 2), struct.pack("<QQIQ", 32, 0, 0, 0)), "x is [0, 32], which holds nothing"),
    "behind": (header(1, 0, key("x", 1), struct.pack("<QIQ", 8, 0, 0), bytes(99)), "its last tensor ends at byte 96"),
    "long list": (header(0, 1, key("a", 9), struct.pack("<IQ", 0, 2**24 + 1), bytes(2**24 + 9)), "a list of 16777217"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(name, tmp_path):
    data, why = DAMAGED[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(AccelError, match="is not a whole GGUF file: .*fetch it again") as error:
        open_source(path).load()
    assert why in str(error.value)


def test_every_cut_is_refused(plain, tmp_path):
    data, path = plain.read_bytes(), tmp_path / "m.gguf"
    for length in [*range(4, 2000, 97), len(data) // 2, len(data) - 40]:
        path.write_bytes(data[:length])
        with pytest.raises(AccelError, match="fetch it again"):
            open_source(path).load()


WRONG = {
    "architecture": ([("general.architecture", "lama", STRING)], "did you mean 'llama'"),
    "layers": ([("llama.block_count", 2**31 - 1, U32)], "block_count is 2147483647, and it holds 2 layers"),
    "fewer": ([("llama.block_count", 1, U32)], "block_count is 1, and it holds 2 layers"),
    "width": ([("llama.embedding_length", 2**31 - 1, U32)], "embedding_length 2147483647"),
    "middle": ([("llama.feed_forward_length", 2**31 - 1, U32)], "gate_proj.weight is [96, 64] in the checkpoint"),
    "missing": ([("llama.attention.head_count", None, U32)], "lacks llama.attention.head_count"),
    "list": ([("llama.embedding_length", [64, 64], None)], "of another kind than accel reads"),
    "heads": ([("llama.attention.head_count", [4, 2], None)], "head_count is [2, 4], and accel reads"),
    "no heads": ([("llama.attention.head_count", [4, 0], None)], "head_count is [4, 0], and accel reads"),
    "few heads": ([("llama.attention.head_count", [4], None)], "head_count is [4], not a number for each"),
    "rotation": (scaling("llama", "longrope", factor=2.0), "rope.scaling.type is longrope"),
    "part": ([("llama.rope.dimension_count", 8, U32)], "rope.dimension_count is 8 for heads of 16"),
    "splits": (bpe("klingon"), "'klingon', splits text"),
    "kind": ([("tokenizer.ggml.model", "bert", STRING)], "of the kind 'bert'"),
    "bos": ([*bpe(), ("tokenizer.ggml.bos_token_id", 2**31, U32)], "bos_token_id is 2147483648"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name, model, tmp_path):
    more, why = WRONG[name]
    path = tmp_path / "m.gguf"
    if name == "architecture":
        path.write_bytes(header(0, 1, key("general.architecture", 8), 4, b"lama"))
    else:
        write(model, "llama", path, more=more)
    with pytest.raises(AccelError) as error:
        accel.optimize(path, "base", max_context=32)
    assert why in str(error.value) and str(path) in str(error.value)


def test_counts_by_layer_that_are_one_number(model, plain, tmp_path):
    """llama.cpp takes them for each layer or for all."""
    counts = {"attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 96}
    more = [(f"llama.{key}", [count, count], None) for key, count in counts.items()]
    lists = open_source(write(model, "llama", tmp_path / "m.gguf", more=[*bpe(), *more]))
    assert lists.config().to_dict() == open_source(plain).config().to_dict()


def test_a_configuration_of_odd_tokens(model, tmp_path):
    """As `explain` and `smoke` read it: without the weights."""
    tokens = write(model, "llama", tmp_path / "a.gguf", more=[("tokenizer.ggml.tokens", 7, U32)])
    with pytest.raises(AccelError, match="tokenizer.ggml.tokens is 7, not a list"):
        open_source(tokens).config()
    ends = [("tokenizer.ggml.eos_token_id", [1, 2], None)]
    with pytest.raises(AccelError, match=r"eos_token_id is \[1, 2\], and there are 320 tokens"):
        open_source(write(model, "llama", tmp_path / "b.gguf", more=ends)).config()


def test_a_tensor_without_a_place_is_refused(model, tmp_path):
    extra = [("blk.0.attn_q.scale", np.ones(4, np.float32))]
    path = write(model, "llama", tmp_path / "m.gguf", tensors=extra)
    with pytest.raises(
        AccelError, match="blk.0.attn_q.scale has no place in a model of type llama"
    ):
        open_source(path).load()


def test_the_package_is_named_where_it_is_missing(plain, monkeypatch):
    own._file._sizes.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(AccelError, match=r"'\.\[gguf\]'"):
        open_source(plain).load()
    own._file._sizes.cache_clear()


def test_a_folder_of_gguf_files_names_them(plain):
    with pytest.raises(AccelError, match="give the GGUF file itself: .*plain.gguf"):
        open_source(plain.parent).load()


@pytest.mark.long
def test_run_compiles_a_file(plain):
    run = ["run", str(plain), "--prompt", "0123", "--max-new-tokens", "4", "--max-context", "32"]
    done = CliRunner().invoke(cli.app, [*run, "--ignore-eos"])
    assert done.exit_code == 0 and len(done.stdout) > 1, done.output
    for option in ("--kernels", "--adapter"):
        told = CliRunner().invoke(cli.app, [*run, option, "portable"]).output
        assert option in told and f"{plain} is a GGUF file" in told


@pytest.mark.long
def test_the_command(plain, tmp_path):
    run = [sys.executable, "-m", "accel.cli", "build", str(plain), "--out", str(tmp_path / "a")]
    done = subprocess.run([*run, "--max-context", "32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "tokenizer.json").is_file()


@pytest.mark.long
def test_a_file_drafts_for_a_file(plain, tmp_path):
    recipe = {"draft": {"use": "model", "path": str(plain)}}
    ids = TOKENS[0, :6].tolist()
    accel.optimize(plain, recipe, out=tmp_path / "with", max_context=64).close()
    with accel.load(tmp_path / "with") as drafted, accel.load(tmp_path / "with") as alone:
        assert drafted.draft_model is not None and drafted.draft_model.tokenizer is not None
        found = drafted.generate(ids, max_new_tokens=12, eos=[])
        assert found.stats["speculation"] is not None
        assert drafted.draft_model.generate(ids, max_new_tokens=12, eos=[]).tokens == found.tokens
        with alone.session() as session:
            logits, want = session.prompt([ids]), []
            while len(want) < 12:
                want.append(int(logits[0, -1].argmax()))
                logits = session.run([[want[-1]]])
        assert found.tokens[0] == want


def test_a_draft_model_that_is_no_model_is_refused_before_any_work(plain, tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    for path, words in (("gone.gguf", "does not exist"), ("notes.txt", "is no GGUF file")):
        recipe = {"draft": {"use": "model", "path": str(tmp_path / path)}}
        with pytest.raises(
            RecipeError, match=f"{words}; set `path` to an artifact .* or a GGUF file"
        ):
            accel.optimize(plain, recipe, out=tmp_path / "out")
