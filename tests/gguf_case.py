"""GGUF files, written with llama.cpp's package gguf: its names, its numbers, its own rounding."""

import json
import re

import numpy as np
import pytest
import torch

from .gguf_tensors import parts

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

TOKENS = torch.tensor([[3, 5, 9, 20, 41, 7, 60, 62, 1, 12, 17, 33]])
SIZE = 320  # rows of an embedding; tokens that make a vocabulary as long are unused, as converters write them
HALVES = {  # where the factors of a block lie, which are float16
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "TQ2_0": [64], "TQ1_0": [52],
    "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0], "IQ1_M": [], "MXFP4": [],
    "NVFP4": [],
}  # fmt: skip
FLOATS = (
    "ffn_gate_inp",
    "conv",
    "ssm_a",
    "ssm_d",
    "norm",
    "altup_",
)  # tensors that llama.cpp never rounds
BYTES = {
    "MXFP4": [(0, 0, 120)],
    "NVFP4": [(i, 127, 0) for i in range(4)],
}  # which, their bits, and what is added
BYTES["IQ1_M"] = [(55, 15, 32)]


def blocks(kind, shape, size=0.02):
    """Random bytes of a type, their factors about `size`: uint8 [..., n]."""
    block, length = gguf.GGML_QUANT_SIZES[Type[kind]]
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] // block, length), dtype=torch.uint8)
    for at in HALVES[kind]:
        factor = (0.5 + torch.rand(*raw.shape[:-1], 1)) * size
        raw[..., at : at + 2] = factor.half().view(torch.uint8)
    for at, bits, more in BYTES.get(kind, ()):
        raw[..., at] = (raw[..., at] & bits) + more
    return raw.flatten(-2).numpy()


def rounded(value, kind):
    """What of a weight the package's own rounding writes, or random blocks of a type that it does not round to."""
    if kind in ("F32", "F16"):
        return value.astype({"F32": np.float32, "F16": np.float16}[kind])
    if kind.endswith("_K") or kind.startswith(("IQ", "TQ", "NV")):
        return blocks(kind, value.shape, float(value.std()) / 60)
    return gguf.quants.quantize(value, Type[kind])


def named(model, arch):
    """A model's tensors by the names of the file, as llama.cpp's converter changes them."""
    config, stacks = model.config, {}
    kind = {name: a for a, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        tied = config.tie_word_embeddings and name == "lm_head.weight"
        if tied or name.endswith((".attn.masked_bias", ".attn.bias")):
            continue
        if stack := re.fullmatch(r"model\.(altup_\w+)\.\d\.weight", name):
            stacks.setdefault(stack[1], []).append(value)
            continue
        for part, changed in parts(name, value, config, arch):
            yield (
                part if part.startswith("blk.") else _own(names, part),
                changed.contiguous().numpy(),
            )
    for name, values in stacks.items():
        yield _own(names, f"model.{name}.weight"), torch.stack(values).numpy()


def _own(names, name):
    """The name in a file of a parameter of transformers."""
    for other in (name, name.replace("mlp.gate.", "block_sparse_moe.gate.")):
        if own := names.get_name(other, (".weight", ".bias")):
            return own
    raise AssertionError(name)


def nextn(layers, config, arch):
    """The tensors of a next-token layer of transformers (`MtpModel`), behind those of its model."""
    kind, depth = (
        {name: a for a, name in gguf.MODEL_ARCH_NAMES.items()}[arch],
        config.num_hidden_layers,
    )
    names = gguf.get_tensor_name_map(kind, depth + 1)
    top = {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "post_norm": "shared_head_norm",
    }
    for name, value in layers.layers[0].state_dict().items():
        first, _, rest = name.partition(".")
        if first in top:  # llama.cpp's converter adds one to Qwen's norms
            more = float("norm" in first and arch.startswith("qwen"))
            yield f"blk.{depth}.nextn.{top[first]}.weight", (value + more).numpy()
            continue
        for part, changed in parts(f"model.layers.{depth}.{rest}", value, config, arch):
            yield (
                part if part.startswith("blk.") else _own(names, part),
                changed.contiguous().numpy(),
            )


def metadata(arch, told):
    """`more` for `write` of an architecture's keys, each of the type of its value."""
    kinds = gguf.GGUFValueType
    types = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    return [(f"{arch}.{key}", value, types.get(type(value))) for key, value in told.items()]


def write(model, arch, path, kind="F32", more=(), tensors=(), big=False, others=()):
    """A model's file, its matrices in a type, or in that of `others`: (part of a name, type). `more`: (key, value,
    type) of metadata in place of what it has.
    """
    config, own = model.config, {key: (value, form) for key, value, form in more}
    order = gguf.GGUFEndian.BIG if big else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, arch, endianess=order)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    kinds = gguf.GGUFValueType
    told = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "attention.key_length": head,
        "attention.value_length": head,
    }  # fmt: skip
    fields = {f"{arch}.{key}": (value, kinds.UINT32) for key, value in told.items()}
    names = {"rms_norm_eps": "rms_", "norm_eps": "rms_", "layer_norm_eps": "", "norm_epsilon": ""}
    names["layer_norm_epsilon"] = ""
    eps = next(name for name in names if hasattr(config, name))
    key = f"{arch}.attention.layer_norm_{names[eps]}epsilon"
    fields[key] = (getattr(config, eps), kinds.FLOAT32)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta", 10000.0)
    fields[f"{arch}.rope.freq_base"] = (theta, kinds.FLOAT32)
    for key, (value, form) in {**fields, **own}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, form)
    for name, value in [*named(model, arch), *tensors]:
        mine = next((other for part, other in others if part in name), kind)
        small = value.ndim == 1 or name.endswith(".bias") or any(part in name for part in FLOATS)
        block, _ = gguf.GGML_QUANT_SIZES[Type[mine]]
        one = "F32" if small or value.shape[-1] % block else mine
        writer.add_tensor(name, rounded(value, one), raw_dtype=Type[one])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def words():
    """A small vocabulary of byte-level BPE: (tokens, merges, types)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=marks, initial_alphabet=alphabet)
    text = (
        "the theory of the thing is that there are three hundred and thirty-three words in it " * 3
    )
    tokenizer.train_from_iterator([text], trainer)
    held = tokenizer.get_vocab()
    tokens = sorted(held, key=held.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    types = [3 if token in marks else 1 for token in tokens]
    more = SIZE - len(tokens)
    tokens, types = [*tokens, *(f"[PAD{i}]" for i in range(more))], [*types, *[5] * more]
    return tokens, [" ".join(pair) for pair in merges], types


def bpe(pre="llama-bpe"):
    """Metadata of that tokenizer."""
    tokens, merges, types = words()
    kinds = gguf.GGUFValueType
    return [
        ("tokenizer.ggml.model", "gpt2", kinds.STRING),
        ("tokenizer.ggml.pre", pre, kinds.STRING),
        ("tokenizer.ggml.tokens", tokens, None),
        ("tokenizer.ggml.merges", merges, None),
        ("tokenizer.ggml.token_type", types, None),
        ("tokenizer.ggml.bos_token_id", 1, kinds.UINT32),
        ("tokenizer.ggml.eos_token_id", 2, kinds.UINT32),
        ("tokenizer.chat_template", "{{ messages[0].content }}", kinds.STRING),
    ]


def spm():
    """Metadata of a tokenizer with scores: bytes, the letters, and some words of them."""
    kinds = gguf.GGUFValueType
    letters = [chr(ord("a") + i) for i in range(26)] + ["▁"]
    joined = ["th", "the", "▁the", "re", "er", "he", "▁t", "▁▁", "in", "▁in"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *joined, *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(joined) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(joined) + len(letters))]
    unused = [f"[PAD{i}]" for i in range(SIZE - len(tokens) - 1)]
    return [
        ("tokenizer.ggml.model", "llama", kinds.STRING),
        ("tokenizer.ggml.tokens", [*tokens, "<|end|>", *unused], None),
        ("tokenizer.ggml.scores", scores + [-1000.0] * (1 + len(unused)), None),
        ("tokenizer.ggml.token_type", [*types, 3, *[5] * len(unused)], None),
        ("tokenizer.ggml.bos_token_id", 1, kinds.UINT32),
        ("tokenizer.ggml.eos_token_id", 2, kinds.UINT32),
    ]


def letters():
    """Metadata of BPE over letters, with tokens of bytes, as Gemma 4's."""
    kinds = gguf.GGUFValueType
    alphabet = [chr(ord("a") + i) for i in range(26)] + ["▁", "\n"]
    pairs = [("t", "h"), ("th", "e"), ("▁", "the"), ("r", "e"), ("i", "n"), ("\n", "\n")]
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{i:02X}>" for i in range(256)), *alphabet]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(alphabet) + len(pairs))
    tokens += [a + b for a, b in pairs]
    unused = [f"[PAD{i}]" for i in range(SIZE - len(tokens))]
    return [
        ("tokenizer.ggml.model", "gemma4", kinds.STRING),
        ("tokenizer.ggml.tokens", [*tokens, *unused], None),
        ("tokenizer.ggml.scores", [0.0] * SIZE, None),
        ("tokenizer.ggml.merges", [" ".join(pair) for pair in pairs], None),
        ("tokenizer.ggml.token_type", [*types, *[5] * len(unused)], None),
        ("tokenizer.ggml.bos_token_id", 1, kinds.UINT32),
        ("tokenizer.ggml.eos_token_id", 2, kinds.UINT32),
        ("tokenizer.ggml.add_bos_token", True, kinds.BOOL),
    ]
