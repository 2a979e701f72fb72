"""GGUF files against llama.cpp itself: logits, tokens, and how it splits text."""

import ctypes

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer

import accel
from accel.compiler.load.checkpoint import load_model
from accel.compiler.load.tokenizer import read_tokenizer
from accel.ir.weights import reading

from .gguf_case import SIZE, bpe, spm, write

lib = pytest.importorskip("llama_cpp")

SILENT = lib.llama_log_callback(lambda *_: None)
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q5_1": 9, "q2_k": 10, "q4_k": 15, "q5_k": 17, "q6_k": 18}
SIZES = {
    "vocab_size": SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TEXTS = (
    "the theory of the thing", "  two  spaces\n\n\nlines \t tabs", "I've don't WE'LL 'tis 12345 3.14 1,000,000",
    "naïve über 東京タワー 🙂🙂", "<|im_start|>the\nhi<|im_end|>\n", "a_b=c+d; print('x') // ...", "", "   ", "\r\n x",
    "<s>the</s> in", "camelCaseHTTPServer ÀÉÎ", "e\u0301 \u00a0 \u3000wide", "there in<|end|>  the re",
)  # fmt: skip


class Peer:
    """llama.cpp with a file."""

    def __init__(self, path):
        lib.llama_log_set(SILENT, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        assert self.model
        self.vocabulary = lib.llama_model_get_vocab(self.model)

    def ids(self, text):
        found = (lib.llama_token * 512)()
        data = text.encode()
        count = lib.llama_tokenize(self.vocabulary, data, len(data), found, 512, True, True)
        return list(found[:count])

    def logits(self, ids):
        """[T,V], with a cache in float32."""
        options = lib.llama_context_default_params()
        options.n_ctx = options.n_batch = 128
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = options.flash_attn_type = 0
        context = lib.llama_init_from_model(self.model, options)
        batch = lib.llama_batch_init(128, 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert lib.llama_decode(context, batch) == 0
        size = lib.llama_vocab_n_tokens(self.vocabulary)
        rows = [lib.llama_get_logits_ith(context, i) for i in range(len(ids))]
        found = np.stack([np.ctypeslib.as_array(row, (size,)).copy() for row in rows])
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        return torch.from_numpy(found)

    def continued(self, ids, count):
        """Greedy tokens."""
        made = list(ids)
        for _ in range(count):
            made.append(int(self.logits(made)[-1].argmax()))
        return made[len(ids) :]


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
    loaded = load_model(path)
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


PRES = ["llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o", "deepseek-coder", "default"]


@pytest.mark.parametrize("pre", [*PRES, "scores"])
def test_text_is_split_as_llama_cpp_splits_it(pre, tmp_path):
    more = spm() if pre == "scores" else bpe(pre)
    count = next(len(value) for key, value, _ in more if key.endswith(".tokens"))
    sizes = {**SIZES, "vocab_size": count, "hidden_size": 32, "num_hidden_layers": 1}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    path = write(model, "llama", tmp_path / "m.gguf", more=more)
    reader = Tokenizer.from_str(read_tokenizer(None, path).json.decode())
    peer = Peer(path)
    for text in TEXTS:
        assert reader.encode(text).ids == peer.ids(text), text
