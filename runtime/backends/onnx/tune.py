"""Which variant of the step is used: what its kernels cost in each, measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.ir.errors import ArtifactError, shown, unknown
from accel.ir.state import state_of
from accel.lowering.onnx.native import library
from accel.lowering.onnx.ort import ort
from accel.lowering.onnx.variants import NATIVE, PORTABLE
from accel.runtime.artifact.artifact import Artifact
from accel.runtime.backends import clock
from accel.runtime.backends.buffers import STEP
from accel.runtime.backends.onnx.machine import machine, recall, remember
from accel.runtime.backends.onnx.open import open_session
from accel.runtime.backends.tuning import Cost, Tuning

AUTO = "auto"
SECONDS = 1.2  # spent on measuring, at most about this
LEAST, ROUNDS = 3, 9  # runs of a shape
RUNS = 3  # measurements, by as many loads, where a busy machine spoilt the first
BYTES = 1 << 26  # of a probe's inputs
NOISE = 2.0  # between measurements of one thing
NODE = 6e-6  # seconds of a node of a step beside its kernels: SmolLM2 in 827 and in 229 nodes, 9.4 and 5.9 ms a step
MARGIN = 0.95  # of the portable variant's time: what another must stay below
# (tokens of a call, slots): decode at two lengths, a call of several tokens, a chunk of a prompt
CELLS = ((1, 512), (1, 2048), (8, 512), (128, 512))
# The work that decides: a prompt of 512 tokens, then 128 one by one, half of them at each length.
WORK = {(1, 512): 64, (1, 2048): 64, (8, 512): 0, (128, 512): 4}


def choose(artifact: Artifact, asked: str, threads: int, *, measure: bool = True) -> Tuning | None:
    """The variant of the step for this machine; `asked`: "auto", or a variant's name.

    Without `measure` an earlier measurement is all that counts; None where one is needed and there
    is none. Raises ArtifactError where no variant has the name.
    """
    entry = artifact.entries["step"]
    if not isinstance(asked, str):
        raise ArtifactError(
            f"kernels = {shown(asked)}: give one of {', '.join([AUTO, *entry.graphs])}"
        )
    if asked != AUTO:
        if asked not in entry.graphs:
            names = [AUTO, *entry.graphs]
            raise ArtifactError(f"{artifact.path}: {unknown('kernels', asked, names)}")
        return Tuning(asked, "asked for")
    picky = artifact.manifest.trees and not artifact.manifest.keeps_trees(PORTABLE)
    own, missing = library() if NATIVE in entry.graphs else (None, "")
    if picky and own is not None:
        return Tuning(NATIVE, "the one whose trees are batch-invariant")
    kinds = [kind for kind in (entry.probes, entry.products) if kind]
    if len(entry.graphs) == 1 or not kinds or any(PORTABLE not in kind for kind in kinds):
        return Tuning(PORTABLE, "the only one")
    key = {
        **machine(threads),
        "native": str(own),
        "probes": [{n: artifact.files[f].sha256 for n, f in kind.items()} for kind in kinds],
        "cells": _cells(artifact.facts.max_context),
    }
    value = recall("tuning", key)
    kept = _kept(value, entry.graphs)
    told = 0 if kept is None else value.get("runs", 1)
    runs = told if isinstance(told, int) else 1
    if kept is not None and (not measure or runs >= RUNS or _sound(kept.costs)):
        return replace(kept, refused={**kept.refused, NATIVE: missing}) if missing else kept
    if not measure:
        return None
    start = clock.now()
    try:
        costs, refused = _measure(artifact, kinds, threads)
    except Exception as error:  # onnxruntime's share no base class; a model runs without a choice
        return Tuning(PORTABLE, f"could not be measured: {error}")
    costs = costs if kept is None else [_least(*two) for two in zip(kept.costs, costs, strict=True)]
    value = {"costs": [asdict(c) for c in costs], "refused": refused, "runs": runs + 1}
    remember("tuning", key, value)
    return _decided(costs, refused, clock.now() - start)


def _cells(max_context: int) -> list[list[int]]:
    """The shapes to measure: as a session of so long a context has them."""
    most = -(-max_context // STEP) * STEP
    cells = [[tokens, min(context, most)] for tokens, context in CELLS]
    return [cell for i, cell in enumerate(cells) if cell not in cells[:i]]


def _measure(
    artifact: Artifact, kinds: list[dict[str, str]], threads: int
) -> tuple[list[Cost], dict[str, str]]:
    """Each kind's probes at each shape, in turns; who has none of a kind costs what PORTABLE does."""
    names = artifact.entries["step"].graphs
    refused: dict[str, str] = {}
    nodes: dict[str, int] = {}
    cells = _cells(artifact.facts.max_context)
    costs = [Cost(tokens, context, dict.fromkeys(names, 0.0)) for tokens, context in cells]
    end = clock.now() + SECONDS
    for left, kind in zip(range(len(kinds), 0, -1), kinds, strict=True):
        sessions = _opened(artifact, kind, threads, refused)
        told = {n: session.get_modelmeta().custom_metadata_map for n, session in sessions.items()}
        share = float(told[PORTABLE]["share"])
        nodes |= {name: int(one.get("nodes", 0)) for name, one in told.items()}
        limit = clock.now() + (end - clock.now()) / left
        for i, cost in enumerate(costs):
            shape = _fitting(sessions[PORTABLE], cost.tokens, cost.context)
            last = min(shape[1], artifact.facts.max_context)
            runs = {name: _binding(session, *shape, last) for name, session in sessions.items()}
            until = clock.now() + (limit - clock.now()) / (len(costs) - i)
            seconds = _turns(sessions, runs, until)
            for name in names:
                cost.seconds[name] += seconds.get(name, seconds[PORTABLE]) / share
    for cost in costs:
        for name, count in nodes.items():
            cost.seconds[name] += count * NODE
        for name in refused:
            cost.seconds.pop(name, None)
    return costs, refused


def _opened(
    artifact: Artifact, probes: Mapping[str, str], threads: int, refused: dict[str, str]
) -> dict[str, Any]:
    """The probes' sessions; notes who is refused, and why."""
    sessions = {}
    for name, file in probes.items():
        if name == NATIVE and (missing := library()[1]):
            refused[name] = missing
            continue
        try:
            sessions[name] = open_session(artifact.path / file, threads, resting=True)
        except ArtifactError as error:
            if name == PORTABLE:
                raise
            refused[name] = str(error)
    return sessions


def _turns(sessions: dict[str, Any], runs: dict[str, Any], limit: float) -> dict[str, float]:
    """The least seconds of each: whatever else the machine does only adds to them."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for done in range(ROUNDS):
        if done >= LEAST and clock.now() > limit:
            break
        for name, binding in runs.items():
            start = clock.now()
            sessions[name].run_with_iobinding(binding)
            taken[name].append(clock.now() - start)
    return {name: min(times) for name, times in taken.items()}


def _fitting(session: Any, tokens: int, context: int) -> tuple[int, int]:
    """The shape with as many slots as memory should be spent on."""
    given = [i for i in session.get_inputs() if "C" in i.shape]
    slot = sum(_kind(i).itemsize * math.prod(_sizes(i.shape, 0, 1)) for i in given)
    return tokens, max(STEP, min(context, BYTES // max(slot, 1)))


def _sizes(shape: list[Any], tokens: int, context: int) -> list[int]:
    letters = {"B": 1, "T": tokens, "C": context, "W": 1}
    return [letters[d] if isinstance(d, str) else d for d in shape]


def _kind(node_arg: Any) -> np.dtype[Any]:
    """The dtype of an input that is no position."""
    kinds = {
        "tensor(int8)": "int8", "tensor(uint8)": "uint8", "tensor(bool)": "bool", "tensor(int64)": "int64",
        "tensor(float16)": "float16",
    }  # fmt: skip
    return np.dtype(kinds.get(node_arg.type, "float32"))


def _binding(session: Any, tokens: int, context: int, last: int) -> Any:
    """A probe's inputs: a cache of `last` tokens, the last of which ask; -1 where there is none. What it appends to it
    writes in place.
    """
    values = {}
    binding = session.io_binding()
    for node_arg in session.get_inputs():
        sizes = _sizes(node_arg.shape, tokens, context)
        array: npt.NDArray[Any] = np.full(
            sizes, 0.1 if _kind(node_arg).kind == "f" else 1, _kind(node_arg)
        )
        if node_arg.name == "positions":
            array = np.maximum(np.arange(last - tokens, last), -1)[None]
        elif node_arg.name == "slots":
            array = np.full(sizes, max(last - tokens, 0))
        elif node_arg.name.startswith("held"):
            array = np.where(np.arange(sizes[1]) < last, np.arange(sizes[1]), -1)[None]
        values[node_arg.name] = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(node_arg.name, values[node_arg.name])
    for made in session.get_outputs():
        if state_of(made.name) in values:
            binding.bind_ortvalue_output(made.name, values[state_of(made.name)])
        else:
            binding.bind_output(made.name, "cpu")
    return binding


def _sound(costs: Sequence[Cost]) -> bool:
    """Whether no call costs more than one of as many tokens and slots or more does: else something else ran then."""
    pairs = (
        (a, b) for a in costs for b in costs if a.tokens <= b.tokens and a.context <= b.context
    )
    return all(a.seconds[name] <= NOISE * b.seconds[name] for a, b in pairs for name in a.seconds)


def _least(a: Cost, b: Cost) -> Cost:
    """Of two measurements of a shape."""
    times = {n: min(t, b.seconds.get(n, t)) for n, t in a.seconds.items() if n in b.seconds}
    return replace(a, seconds=times)


def _decided(costs: list[Cost], refused: dict[str, str], seconds: float = 0.0) -> Tuning:
    """The variant that does the work soonest; the portable one unless another is clearly ahead."""
    longest = max(cost.context for cost in costs)
    table = {(cost.tokens, cost.context): cost.seconds for cost in costs}
    total: dict[str, float] = {}
    for (tokens, context), times in WORK.items():
        for name, spent in table[tokens, min(context, longest)].items():
            total[name] = total.get(name, 0.0) + times * spent
    best = min(total, key=total.__getitem__)
    chosen = best if total[best] < MARGIN * total[PORTABLE] else PORTABLE
    return Tuning(chosen, "measured", tuple(costs), refused, seconds)


def _kept(value: Any, names: Collection[str]) -> Tuning | None:
    """An earlier measurement, where it is whole."""
    try:
        costs = [
            Cost(
                int(c["tokens"]), int(c["context"]), {n: float(s) for n, s in c["seconds"].items()}
            )
            for c in value["costs"]
        ]
        refused = {str(name): str(reason) for name, reason in value["refused"].items()}
        whole = all(c.seconds.keys() | refused.keys() == set(names) for c in costs)
        return _decided(costs, refused) if whole and PORTABLE not in refused else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
