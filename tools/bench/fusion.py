"""What the fusion passes change: nodes of a layer, and a decode step with and without them.

`python tools/bench/fusion.py MODEL [--recipe int4]` builds MODEL twice, without and with the passes of
passes/fuse/, and lets the two take turns. `python tools/bench/fusion.py --norms` compares the forms that a
sum and a norm may have in ONNX Runtime.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.compiler import optimize

PROMPT, STEPS = 500, 16
WAYS = ("apart", "fused")
REPEATS = 64  # norms in one graph


def build(model: str, recipe: str, way: str, out: Path) -> None:
    """An artifact with or without the fusion passes."""
    passes = optimize.pipeline

    def apart(encoder: bool = False) -> list[Any]:
        return [p for p in passes(encoder) if ".fuse." not in type(p).__module__]

    with patch.object(optimize, "pipeline", apart if way == "apart" else passes):
        accel.optimize(model, recipe, out=out, verify=False).close()


def layer_nodes(folder: Path) -> Counter[str]:
    """Operator -> how many nodes of it the second layer has."""
    graph = onnx.load(folder / "step.onnx", load_external_data=False).graph
    return Counter(n.op_type for n in graph.node if n.name.startswith("layer.1/"))


def turns(folders: dict[str, Path], rounds: int, threads: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a prefill and of a step, by turns; the first of a kind is a warm-up."""
    sessions = {w: accel.load(f, threads=threads).session(batch=1) for w, f in folders.items()}
    prompt = np.random.default_rng(0).integers(3, 1000, (1, PROMPT))
    found: dict[str, dict[str, list[float]]] = {w: {"prefill": [], "step": []} for w in folders}
    for turn in range(rounds + 1):
        for way in WAYS[:: 1 if turn % 2 else -1]:
            session = sessions[way]
            session.rewind(0)
            prefill = clock(session.run, prompt)
            session.run([[7]])
            steps = [clock(session.run, [[7]]) for _ in range(STEPS)]
            if turn:
                found[way]["prefill"].append(prefill)
                found[way]["step"].append(statistics.median(steps))
    return found


def clock(call: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def compare(args: argparse.Namespace) -> None:
    """Print nodes and ratios of both builds."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = {way: Path(temporary) / way for way in WAYS}
        for way, folder in folders.items():
            build(args.model, args.recipe, way, folder)
            nodes = layer_nodes(folder)
            print(
                f"{way}: {nodes.total()} nodes a layer: {dict(sorted(nodes.items()))}", flush=True
            )
        found = turns(folders, args.rounds, args.threads)
    for part in ("step", "prefill"):
        apart, fused = (found[way][part] for way in WAYS)
        ratios = [a / f for a, f in zip(apart, fused, strict=True)]
        print(
            f"{part}: {1e3 * min(apart):.2f} ms apart, {1e3 * min(fused):.2f} ms fused (least); "
            f"ratio, median of {len(ratios)} rounds: {statistics.median(ratios):.3f}"
        )


FORMS: dict[str, list[tuple[str, str, list[str], list[str]]]] = {
    "Add, RMSNormalization": [
        ("", "Add", ["x", "y"], ["s"]),
        ("", "RMSNormalization", ["s", "w"], ["n"]),
    ],
    "SkipSimplifiedLayerNormalization": [
        ("com.microsoft", "SkipSimplifiedLayerNormalization", ["x", "y", "w"], ["n", "", "", "s"])
    ],
    "Add, LayerNormalization": [
        ("", "Add", ["x", "y"], ["s"]),
        ("", "LayerNormalization", ["s", "w", "w"], ["n"]),
    ],
    "SkipLayerNormalization": [
        ("com.microsoft", "SkipLayerNormalization", ["x", "y", "w", "w"], ["n", "", "", "s"])
    ],
}


def norm_session(form: str, width: int, threads: int) -> ort.InferenceSession:
    """x + y and its norm, many times over, each from the sum of the one before."""
    nodes, x = [], "x"
    for i in range(REPEATS):
        names = {"x": x, "y": "y", "w": "w", "s": f"s{i}", "n": f"n{i}", "": ""}
        for domain, op, inputs, outputs in FORMS[form]:
            given = [[names[v] for v in side] for side in (inputs, outputs)]
            options = {"epsilon": 1e-5} if op != "Add" else {}
            nodes.append(helper.make_node(op, *given, domain=domain, **options))
        x = names["s"]
    nodes.append(helper.make_node("Sum", [f"n{i}" for i in range(0, REPEATS, 8)], ["out"]))
    shape = ["B", "T", width]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "xy"]
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, shape)
    weight = numpy_helper.from_array(np.ones(width, np.float32), "w")
    graph = helper.make_graph(nodes, "norms", inputs, [output], [weight])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options)


def norms(args: argparse.Namespace) -> None:
    """Print the least microseconds of each form."""
    for width in (896, 1024, 4096):
        sessions = {form: norm_session(form, width, args.threads) for form in FORMS}
        for tokens in (1, 8, 128):
            x = np.random.default_rng(0).standard_normal((1, tokens, width)).astype(np.float32)
            least = dict.fromkeys(FORMS, float("inf"))
            for _ in range(20 if tokens < 128 else 5):
                for form, session in sessions.items():
                    spent = clock(session.run, None, {"x": x, "y": x})
                    least[form] = min(least[form], spent)
            shown = ", ".join(f"{form} {1e6 * t / REPEATS:.1f}" for form, t in least.items())
            print(f"width {width}, T = {tokens}, µs: {shown}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="a model folder")
    parser.add_argument("--recipe", default="base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--norms", action="store_true", help="compare forms of a sum and a norm")
    args = parser.parse_args()
    if not args.norms and not args.model:
        parser.error("give a model folder, or --norms")
    norms(args) if args.norms else compare(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
