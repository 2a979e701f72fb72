"""A step over a stored cache, by codec, beside float32: one layer, one thread, its processor time, alternating. The
cache is of random codes, so that no prompt has to run, and constants of layers are random.

python tools/bench/bench_readers.py [--context 8192] [--tokens 1] [--rounds 15] [--kv-heads 16]
    [--only kivi,ort-gqa-kv:gqa]

A codec may be followed by the variant of the step that reads it, `native` if none is given.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from turns import in_turns, llama, median_range, ratios, seconds

import accel
from accel.ir.axis import find_axes
from accel.ir.state import output_of
from accel.ir.tables import Tables
from accel.lowering.onnx.ort import ort
from accel.passes.kv.codec import _layer
from accel.passes.trained import Trained
from accel.runtime.backends.onnx.open import open_session

HEADS, SIZE, RECENT, CALLS = 16, 64, 256, 3  # RECENT: slots of the newest tokens
INDEXED = ("place", "token", "mask")  # parts that say where numbers stand: 0 here


def random_constants(heads: int) -> Any:
    """Of the layers of a program, for a codec that has some."""

    def made(codec: Any, program: Any, *_: Any) -> Any:
        if not isinstance(codec, Tables | Trained):
            return {}
        found: dict[int, dict[str, torch.Tensor]] = {}
        for layer in range(len(program.facts.layers)):
            found[layer] = {}
            for name, sizes in codec.sizes(SIZE, heads).items():
                tensor = torch.rand([SIZE if n < 0 else n for n in sizes]) + 0.1
                order = tensor.flatten().argsort().view(tensor.shape)
                found[layer][name] = order if name == "order" else tensor
        return codec.constants(found)

    return made


def bound(session: Any, context: int, tokens: int) -> Any:
    """A call of so many tokens after `context`; what it appends to is written in place, as sessions do."""
    rng, binding = np.random.default_rng(0), session.io_binding()
    inputs = {i.name: i for i in session.get_inputs()}
    block = int(inputs["kept.pos"].shape[3]) if "kept.pos" in inputs else 0
    recent = RECENT // 2 if block else context
    sizes = {
        "B": 1,
        "T": tokens,
        "P": context // block if block else 0,
        "C": RECENT if block else context + RECENT,
    }
    written = {o.name for o in session.get_outputs()}
    for name, one in inputs.items():
        shape = [n if isinstance(n, int) else sizes.get(n, 1) for n in one.shape]
        value = np.zeros(shape, {"tensor(bool)": np.bool_}.get(one.type, np.int64))
        if name == "kept.pos":
            value = np.arange(value.size).reshape(shape)
        elif name == "kv.pos":
            value = np.where(np.arange(shape[1]) < recent, np.arange(shape[1]), -1)[None]
            value = np.where(value < 0, -1, value + context * bool(block))
        elif name == "slots":
            value = np.full(shape, recent)
        elif name == "positions":
            value = np.arange(tokens)[None] + recent + context * bool(block)
        elif one.type == "tensor(uint8)":
            most = 1 if any(part in name for part in INDEXED) else 120
            value = rng.integers(0, most, shape, np.uint8)
        elif one.type == "tensor(int8)":
            value = rng.integers(-127, 128, shape, np.int8)
        elif one.type in ("tensor(float)", "tensor(float16)"):
            kind = np.float16 if "16" in one.type else np.float32
            value = (0.1 * rng.random(shape)).astype(kind)
        held = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
        binding.bind_ortvalue_input(name, held)
        if output_of(name) in written:
            binding.bind_ortvalue_output(output_of(name), held)
            written.remove(output_of(name))
    for name in written:
        binding.bind_output(name)
    return binding


def main() -> None:
    names = find_axes()["kv.codec"].names()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=1, help="of a call")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kv-heads", type=int, default=HEADS)
    parser.add_argument("--only", default=",".join(names))
    options = parser.parse_args()
    module = llama(
        options.context + 1024, vocab_size=500, intermediate_size=64, num_hidden_layers=1,
        num_key_value_heads=options.kv_heads,
    )  # fmt: skip
    calls: dict[str, Any] = {}
    for asked in ("float32", *options.only.split(",")):
        name, _, variant = asked.partition(":")
        recipe: dict[str, Any] = {"weights": {"use": "int4"}}
        if name != "float32":
            recipe["kv"] = {"codec": {"use": name}}
        with mock.patch.object(_layer, "_constants", random_constants(options.kv_heads)):
            model = accel.optimize(module, recipe, max_context=options.context + 1024, verify=False)
        graph = model.artifact.entries["step"].graphs[variant or "native"]
        session = open_session(model.artifact.path / graph, 1, False)
        calls[asked] = (model, session, bound(session, options.context, options.tokens))

    def least(session: Any, binding: Any) -> float:
        run = partial(session.run_with_iobinding, binding)
        return min(seconds(run, time.process_time) for _ in range(CALLS))

    ways = {name: partial(least, *call[1:]) for name, call in calls.items()}
    taken = in_turns(ways, options.rounds)
    for name, times in taken.items():
        of = median_range(ratios(times, taken["float32"]))
        print(f"{name:16} {median(times) * 1e3:8.2f} ms, {of} of float32's", flush=True)


if __name__ == "__main__":
    main()
