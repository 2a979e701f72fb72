"""GGUF files against llama.cpp itself: logits, tokens, and how it splits text."""

import ctypes

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer

import accel
from accel.compiler.load.source import open_source
from accel.ir.weights import reading

from .gguf_case import SIZE, bpe, letters, spm, write

lib = pytest.importorskip("llama_cpp")

from llama_logits import Peer  # noqa: E402 -- which imports llama_cpp

FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q5_1": 9, "q2_k": 10, "q4_k": 15, "q5_k": 17, "q6_k": 18}
SIZES = {
    "vocab_size": SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TEXTS = (
    "the theory of the thing", "  two  spaces\n\n\nlines \t tabs", "I've don't WE'LL 'tis 12345 3.14 1,000,000",
    "naïve über 東京タワー 🙂🙂", "<|im_start|>the\nhi<|im_end|>\n", "a_b=c+d; print('x') // ...", "", "   ", "\r\n x",
    "<s>the</s> in", "a\n\n\nthe\n re",
    "ひらがなカタカナ漢字 한글 ไทย हिन्दी مرحبا",
    "camelCaseHTTPServer ÀÉÎ", "e\u0301 \u00a0 \u3000wide", "there in<|end|>  the re",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A llama in float32."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" not in name:
                value.mul_(4)
    more = [("llama.rope.dimension_count", 64, 4)]
    return write(model, "llama", tmp_path_factory.mktemp("peer") / "f32.gguf", more=[*bpe(), *more])


def test_greedy_tokens_are_llama_cpps(whole):
    prompt = Peer(whole).ids("the theory of")
    wanted = Peer(whole).continued(prompt, 16)
    with accel.optimize(whole, "base", max_context=64) as compiled:
        found = compiled.generate([prompt], max_new_tokens=16).tokens[0]
    assert len(found) > 8 and list(found) == wanted[: len(found)]


LONG = [
    pytest.param(kind, marks=pytest.mark.long)
    for kind in FILE_TYPES
    if kind not in ("q4_0", "q4_k")
]


@pytest.mark.parametrize("kind", ["q4_0", "q4_k", *LONG])
def test_logits_are_llama_cpps(kind, whole, tmp_path):
    """llama.cpp rounds what a quantised weight multiplies to 8 bits, and so does accel, otherwise: the logits differ
    by that, and tokens where two are nearer than it.
    """
    path, options = tmp_path / f"{kind}.gguf", lib.llama_model_quantize_default_params()
    options.ftype, options.nthread = FILE_TYPES[kind], 1
    assert not lib.llama_model_quantize(
        str(whole).encode(), str(path).encode(), ctypes.byref(options)
    )
    ids = torch.arange(3, 60, 3)[None]
    wanted = Peer(path).logits(ids[0].tolist())
    loaded = open_source(path).load()
    with torch.no_grad(), reading(loaded.stored):
        floats = loaded.model.eval()(ids).logits[0]
    with accel.optimize(path, "base", max_context=64) as compiled, compiled.session() as session:
        codes = torch.from_numpy(session.run(ids.numpy()))[0]
    for found in (floats, codes):
        error = (found - wanted).abs().max()
        assert error < 0.1 * wanted.abs().max()
        first, second = wanted.topk(2).values.T
        clear = first - second > 2 * error
        assert torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])


ENDS = {
    "harmony": ["<|start|>", "<|end|>", "<|return|>", "<|call|>"],
    "messages": ["<|end|>", "<|user|>", "<|endoftext|>"],
    "turns": ["<turn|>", "<|turn>", "<end_of_turn>"],
    "others": [
        "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|eot_id|>",
        "<|flush|>",
        "<|calls|>",
        "<|end|>",
    ],
}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_ends_where_llama_cpp_ends_it(name, tmp_path):
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(**{**SIZES, "hidden_size": 32, "num_hidden_layers": 1})
    )
    more = {key: (key, value, form) for key, value, form in bpe()}
    tokens, types = more["tokenizer.ggml.tokens"][1], more["tokenizer.ggml.token_type"][1]
    tokens[-len(ENDS[name]) :], types[-len(ENDS[name]) :] = ENDS[name], [3] * len(ENDS[name])
    path = write(model, "llama", tmp_path / "m.gguf", more=more.values())
    peer, config = Peer(path), open_source(path).config()
    wanted = [i for i in range(SIZE) if lib.llama_vocab_is_eog(peer.vocabulary, i)]
    assert sorted(config.eos_token_id) == wanted


PRES = [
    "llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o", "deepseek-coder", "default", "glm4", "qwen35",
    "seed-coder", "bailingmoe", "deepseek-llm", "deepseek-v3", "falcon", "dbrx",
]  # fmt: skip


@pytest.mark.parametrize("pre", [*PRES, "scores", "letters"])
def test_text_is_split_as_llama_cpp_splits_it(pre, tmp_path):
    more = {"scores": spm, "letters": letters}.get(pre, lambda: bpe(pre))()
    count = next(len(value) for key, value, _ in more if key.endswith(".tokens"))
    sizes = {**SIZES, "vocab_size": count, "hidden_size": 32, "num_hidden_layers": 1}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    path = write(model, "llama", tmp_path / "m.gguf", more=more)
    reader = Tokenizer.from_str(open_source(path).tokenizer.json.decode())
    peer = Peer(path)
    for text in TEXTS:
        assert reader.encode(text).ids == peer.ids(text), text
