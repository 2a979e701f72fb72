"""Texts to vectors: accel beside transformers and onnxruntime's export of the same model, in turns, in one process.

    python tools/bench/bench_embeddings.py [MODEL] [--texts 96] [--rounds 5] [--threads 1] [--batch 32]

MODEL: a directory with files of sentence-transformers (default: minilm of tools/models/real.py). All get the same token
ids in the same batches, and pool and normalise. `onnxruntime`: torch.onnx.export of the transformers model;
`onnxruntime, fused`: that graph after onnxruntime.transformers.optimizer. Ratios are of processor time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from transformers import AutoModel
from turns import REFERENCE, head, in_turns, median_range, ratios, row

import accel
from accel.runtime.inputs.ints import Ints
from accel.runtime.model.embed import Vectors, batches

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import real

Run = Callable[[Ints, Ints], Any]  # tokens and mask [B,T] -> vectors [B,T,E]
NAMES = ["input_ids", "attention_mask", "vectors"]  # of the exported graph
WORDS = (4, 8, 16, 32, 64, 120)  # of the texts, in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    model = options.model or real.path("minilm")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        accel.optimize(model, out=folder / "accel", max_batch=options.batch).close()
        compiled = stack.enter_context(accel.load(folder / "accel", threads=options.threads))
        assert compiled.tokenizer is not None and compiled.facts.embedding is not None
        assert compiled.facts.embedding.pooling == "mean", "the others pool by the mean here"
        most = compiled.facts.max_context
        ids = [np.array(compiled.tokenizer.encode(text)[:most]) for text in _texts(options.texts)]
        module = AutoModel.from_pretrained(model, add_pooling_layer=False).eval()
        plain, fused = _exported(deepcopy(module), folder)  # whose masks an export changes for good
        peers: dict[str, Run] = {
            "transformers": lambda tokens, mask: _torch(module, tokens, mask),
            "onnxruntime": _opened(plain, options.threads),
            "onnxruntime, fused": _opened(fused, options.threads),
        }
        ways = {
            name: _timed(lambda run=run: _embed(run, ids, options.batch))
            for name, run in peers.items()
        }
        ways["accel"] = _timed(lambda: compiled.embed(ids))
        found = in_turns(ways, options.rounds, warm=1)
    own = found.pop("accel")
    tokens = sum(one.size for one in ids)
    print(f"{len(ids)} texts of {tokens} tokens, batches of {options.batch}, {options.threads} threads\n")  # fmt: skip
    head("engine", ">texts/s", ">tokens/s", ">its time over accel's", ">largest difference")
    spent = [cpu for cpu, _ in own]
    row("`accel`", *_rates(spent, len(ids), tokens), "", "")
    for name, rounds in found.items():
        times = [cpu for cpu, _ in rounds]
        apart = max(float(np.abs(a - b).max()) for (_, a), (_, b) in zip(rounds, own, strict=True))
        ratio = median_range(ratios(times, spent))
        row(f"`{name}`", *_rates(times, len(ids), tokens), ratio, f"{apart:.1e}")


def _rates(times: list[float], texts: int, tokens: int) -> tuple[str, str]:
    middle = float(np.median(times))
    return f"{texts / middle:.0f}", f"{tokens / middle:.0f}"


def _texts(count: int) -> Iterator[str]:
    """Pieces of the bundled model's calibration text, of several lengths."""
    words = (REFERENCE / "calibration.txt").read_text(encoding="utf-8").split()
    at = 0
    for i in range(count):
        size = WORDS[i % len(WORDS)]
        yield " ".join(words[at : at + size])
        at = (at + size) % (len(words) - max(WORDS))


def _timed(call: Callable[[], Vectors]) -> Callable[[], tuple[float, Vectors]]:
    """Processor time of all threads, and the vectors."""

    def timed() -> tuple[float, Vectors]:
        start = time.process_time()
        vectors = call()
        return time.process_time() - start, vectors

    return timed


def _embed(run: Run, ids: list[Ints], most: int) -> Vectors:
    """The batches of accel, padded; the mean of what is no padding, of length 1."""
    found: dict[int, Any] = {}
    for rows in batches([one.size for one in ids], most):
        mask = np.zeros((len(rows), max(ids[i].size for i in rows)), np.int64)
        tokens = np.zeros_like(mask)
        for line, seen, i in zip(tokens, mask, rows, strict=True):
            line[: ids[i].size], seen[: ids[i].size] = ids[i], 1
        vectors = np.asarray(run(tokens, mask)) * mask[..., None].astype(np.float32)
        means = vectors.sum(1) / mask.sum(1, keepdims=True).astype(np.float32)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        found |= dict(zip(rows, means, strict=True))
    return np.stack([found[i] for i in range(len(ids))])


def _torch(module: Any, tokens: Ints, mask: Ints) -> Any:
    with torch.inference_mode():
        given = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask)}
        return module(**given).last_hidden_state.numpy()


class _Vectors(torch.nn.Module):
    """What is exported."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.module(input_ids=tokens, attention_mask=mask).last_hidden_state


def _exported(module: Any, folder: Path) -> tuple[Path, Path]:
    """The graph that torch exports, and what onnxruntime's optimizer makes of it."""
    from onnxruntime.transformers import optimizer

    plain, fused = folder / "plain.onnx", folder / "fused.onnx"
    axes = {0: "B", 1: "T"}
    ones = torch.ones(2, 7, dtype=torch.int64)
    module.set_attn_implementation("eager")  # the form whose attention the optimizer knows
    torch.onnx.export(
        _Vectors(module), (ones, ones), str(plain), input_names=NAMES[:2], output_names=NAMES[2:],
        dynamic_axes=dict.fromkeys(NAMES, axes), dynamo=False, opset_version=17,
    )  # fmt: skip
    config = module.config
    made = optimizer.optimize_model(
        str(plain), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size
    )
    counts = {op: n for op, n in made.get_fused_operator_statistics().items() if n}
    print(f"fused: {counts}", file=sys.stderr)
    made.save_model_to_file(str(fused))
    return plain, fused


def _opened(graph: Path, threads: int) -> Run:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def run(tokens: Ints, mask: Ints) -> Any:
        return session.run(None, {"input_ids": tokens, "attention_mask": mask})[0]

    return run


if __name__ == "__main__":
    main()
