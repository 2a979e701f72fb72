"""A toy decoder by hand, as ONNX, as torch and as NumPy: one attention layer over the state of the
contract.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import decoders, models, pre_tokenizers, trainers

from accel import load
from accel.ir.state import Part, StateValue
from accel.runtime.artifact.artifact import bind, digest, open_artifact, write_manifest
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.session.session import Session

VOCAB, WIDTH, HEADS, SIZE, CONTEXT, BATCH = 320, 16, 2, 8, 1300, 3

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "naïve café — 你好, мир! 🙂🙃 ½ and so on",
    "for i in range(10): print(i, i * i)",
]


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {"E": (VOCAB, WIDTH), "P": (CONTEXT, WIDTH), "U": (WIDTH, VOCAB)}
    shapes |= {name: (WIDTH, WIDTH) for name in ("Wq", "Wk", "Wv", "Wo")}
    return {n: rng.standard_normal(s).astype(np.float32) * 0.6 for n, s in shapes.items()}


WEIGHTS = weights()
STATE = [
    StateValue(Part.POSITIONS, None, "int64", ("B", "C"), -1),
    StateValue(Part.KEYS, 0, "float32", ("B", HEADS, "C", SIZE)),
    StateValue(Part.VALUES, 0, "float32", ("B", HEADS, "C", SIZE)),
]


def oracle(tokens: np.ndarray) -> np.ndarray:
    """Logits [T,V] of one sequence [T], computed without any cache."""
    w, n = WEIGHTS, len(tokens)
    x = w["E"][tokens] + w["P"][np.arange(n)]
    q, k, v = ((x @ w[m]).reshape(n, HEADS, SIZE).transpose(1, 0, 2) for m in ("Wq", "Wk", "Wv"))
    scores = np.where(np.tri(n, dtype=bool), q @ k.transpose(0, 2, 1), -1e9)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (x + (p @ v).transpose(1, 0, 2).reshape(n, WIDTH) @ w["Wo"]) @ w["U"]


class Program:
    """The toy as an eager program: what `EagerBackend` needs."""

    state, entries = STATE, ("step",)

    def __init__(self):
        self.w = {n: torch.from_numpy(a) for n, a in WEIGHTS.items()}

    def run(self, entry, inputs):
        assert entry == "step"
        w, tokens, positions = self.w, inputs["tokens"], inputs["positions"]
        b, t = tokens.shape
        x = w["E"][tokens] + w["P"][positions.clamp(min=0)]
        q, k, v = ((x @ w[m]).view(b, t, HEADS, SIZE).transpose(1, 2) for m in ("Wq", "Wk", "Wv"))
        pos, keys, values = (inputs[s.name].clone() for s in STATE)
        for row in range(b):
            span = slice(int(inputs["slots"][row]), int(inputs["slots"][row]) + t)
            pos[row, span], keys[row, :, span], values[row, :, span] = (
                positions[row],
                k[row],
                v[row],
            )
        seen = (pos[:, None, :] >= 0) & (pos[:, None, :] <= positions[:, :, None])
        scores = (q @ keys.transpose(2, 3)).masked_fill(~seen[:, None], -1e9)
        mixed = (scores.softmax(-1) @ values).transpose(1, 2).reshape(b, t, WIDTH)
        hidden = x + mixed @ w["Wo"]
        picked = hidden.gather(1, inputs["rows"][:, :, None].expand(-1, -1, WIDTH))
        return {
            "logits": picked @ w["U"],
            "kv.pos.next": pos,
            "kv.0.k.next": keys,
            "kv.0.v.next": values,
        }


def graph() -> onnx.ModelProto:
    """The toy as the step entry of the contract."""
    nodes, count = [], iter(range(1000))

    def op(kind, *inputs, out=None, **attributes):
        out = out or f"t{next(count)}"
        nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def const(value, dtype=np.int64):
        return op("Constant", value=numpy_helper.from_array(np.array(value, dtype)))

    def heads(name):
        split = op("Reshape", op("MatMul", x, name), const([0, 0, HEADS, SIZE]))
        return op("Transpose", split, perm=[0, 2, 1, 3])

    x = op("Add", op("Gather", "E", "tokens"), op("Gather", "P", op("Max", "positions", const(0))))
    op("TensorScatter", "kv.pos", "positions", "slots", out="kv.pos.next", axis=-1)
    op("TensorScatter", "kv.0.k", heads("Wk"), "slots", out="kv.0.k.next", axis=-2)
    op("TensorScatter", "kv.0.v", heads("Wv"), "slots", out="kv.0.v.next", axis=-2)
    held = op("Unsqueeze", "kv.pos.next", const([1, 2]))
    asks = op("Unsqueeze", "positions", const([1, 3]))
    seen = op("And", op("GreaterOrEqual", held, const(0)), op("LessOrEqual", held, asks))
    scores = op("MatMul", heads("Wq"), op("Transpose", "kv.0.k.next", perm=[0, 1, 3, 2]))
    p = op("Softmax", op("Where", seen, scores, const(-1e9, np.float32)), axis=-1)
    mixed = op("Transpose", op("MatMul", p, "kv.0.v.next"), perm=[0, 2, 1, 3])
    mixed = op("MatMul", op("Reshape", mixed, const([0, 0, WIDTH])), "Wo")
    picked = op("GatherND", op("Add", x, mixed), op("Unsqueeze", "rows", const([2])), batch_dims=1)
    op("MatMul", picked, "U", out="logits")

    def info(name, dtype, shape):
        return helper.make_tensor_value_info(name, dtype, shape)

    integer, real = TensorProto.INT64, TensorProto.FLOAT
    kinds = {"int64": integer, "float32": real}
    held_in = [info(s.name, kinds[s.dtype], s.shape) for s in STATE]
    held_out = [info(f"{s.name}.next", kinds[s.dtype], s.shape) for s in STATE]
    inputs = [info("tokens", integer, ["B", "T"]), info("positions", integer, ["B", "T"])]
    inputs += [info("slots", integer, ["B"]), info("rows", integer, ["B", "N"])]
    made = helper.make_graph(
        nodes,
        "toy",
        inputs + held_in,
        [info("logits", real, ["B", "N", VOCAB]), *held_out],
        [numpy_helper.from_array(a, n) for n, a in WEIGHTS.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def byte_level_tokenizer(vocab: int = VOCAB) -> tokenizers.Tokenizer:
    """A GPT-2-like tokenizer: byte-level BPE, token 0 is <eos>."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(CORPUS * 3, trainer)
    return tok


def manifest(**model) -> dict:
    facts = {"name": "Toy", "vocab_size": VOCAB, "num_layers": 1, "max_context": CONTEXT}
    facts |= {"max_batch": BATCH, "eos": [0], "bos": None, "parameters": 12_000}
    layer = {"attention": "causal", "window": 0, "num_heads": HEADS, "num_kv_heads": HEADS}
    layer["head_dim"] = SIZE
    facts |= {"layers": [layer]} | model
    return {
        "format": 3,
        "accel": "0.1.0",
        "target": "onnx",
        "model": facts,
        "numerics": "float32",
        "grade": "lossless",
        "recipe": {"about": "toy", "tables": {"loop": {"use": "autoregressive"}}},
        "state": [s.to_json() for s in STATE],
        "entries": {
            "step": {
                "file": "step.onnx",
                "inputs": ["tokens", "positions", "slots", "rows"],
                "outputs": ["logits"],
            }
        },
        "report": {"seconds": 0.1},
    }


def write_artifact(folder: Path, tables: Any = None, *, tokenizer: bool = True, **model) -> Path:
    """A whole artifact of the toy, of a recipe of these tables."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(
        graph(),
        str(folder / "step.onnx"),
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="weights.bin",
        size_threshold=0,
    )
    if tokenizer:
        byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    told = manifest(**model)
    told["recipe"]["tables"] = tables or told["recipe"]["tables"]
    seal(folder, told)
    return folder


def seal(folder: Path, told: dict) -> None:
    """Tie graphs and manifest to one another, as a build does."""
    write_manifest(folder, told, bind(folder, told))


@dataclass
class Toy:
    """What tests take from here: they cannot import this file."""

    path: Path
    engines: dict
    oracle = staticmethod(oracle)
    write = staticmethod(write_artifact)
    manifest, seal = staticmethod(manifest), staticmethod(seal)
    tokenizer = staticmethod(byte_level_tokenizer)
    corpus = tuple(CORPUS)
    vocab, context, batch, state = VOCAB, CONTEXT, BATCH, STATE

    def session(self, engine="ort", batch=1, wrap=None) -> Session:
        backend = self.engines[engine].open_session(batch)
        backend = wrap(backend) if wrap else backend
        return Session(backend, batch, vocab_size=VOCAB, max_context=CONTEXT)

    def tokens(self, *shape, seed=0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, VOCAB, shape)


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Toy:
    path = write_artifact(tmp_path_factory.mktemp("toy") / "artifact")
    engines = {"ort": OrtBackend(open_artifact(path), threads=1), "eager": EagerBackend(Program())}
    return Toy(path, engines)


@pytest.fixture(autouse=True)
def one_thread():
    """The toy is too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def damaged(toy, tmp_path):
    """A copy of the artifact whose manifest a function changes, and then its digest."""

    def make(change=None, keep_digest=False) -> Path:
        import shutil

        copy = tmp_path / "copy"
        shutil.copytree(toy.path, copy)
        raw = json.loads((copy / "accel.json").read_text())
        if change:
            change(raw)
        if not keep_digest:
            raw["digest"] = digest(raw)
        (copy / "accel.json").write_text(json.dumps(raw))
        return copy

    return make


@pytest.fixture(scope="module")
def model(toy):
    """The toy, loaded for a file of tests."""
    with load(toy.path, threads=1) as loaded:
        yield loaded
