"""What ties the graphs of an artifact to its manifest: what each takes and gives, where its weights lie, and what it
was built with, of which its metadata has a digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from accel.ir.adapters import file_of
from accel.ir.entries.encode import ENCODE
from accel.ir.entries.step import LOGITS, STEP
from accel.ir.errors import ArtifactError, unknown
from accel.ir.fields import BUILD_AGAIN, MANIFEST
from accel.ir.state import StateValue, state_of
from accel.runtime.artifact.graph import OWN, SMALL, Graph, Value, read_graph
from accel.runtime.artifact.manifest import Entry, File, Manifest, entries_of

_BOUND = ("format", "target", "model", "numerics", "grade", "recipe", "state", "entries")
_DATA = "data"  # the files that are neither graphs nor for people
_FOR_PEOPLE = "report.html"
_FILE = OWN + "file"  # its name
_CONTENT = OWN + "content"  # sha256 of all but this metadata
_LAYOUTS = (
    4  # that weights may have in their file; no graph names those of a variant that was not written
)
_CALL = {"tokens", "positions", "slots", "rows"}  # what each step is given


def bind_graphs(folder: Path, manifest: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Write into the graphs what they are built with. manifest: what accel.json will hold, its `report` and `files`
    aside; hashes: sha256 of every file that is no graph.
    """
    import onnx  # not where an artifact is run

    bound = _binding(manifest, hashes)
    for entry in entries_of(manifest).values():
        for name in entry.files:
            model = onnx.load(folder / name, load_external_data=False)
            others = [p for p in model.metadata_props if not p.key.startswith(OWN)]
            del model.metadata_props[:]
            model.metadata_props.extend(others)
            onnx.save_model(model, folder / name)
            own = {_FILE: name, _CONTENT: read_graph(folder / name).content}
            for key, value in {**bound, **own}.items():
                model.metadata_props.add(key=key, value=value)
            onnx.save_model(model, folder / name)


def _binding(manifest: Mapping[str, Any], hashes: Mapping[str, str]) -> dict[str, str]:
    """The metadata by which graphs know their artifact."""
    data = {n: h for n, h in hashes.items() if not n.endswith(".onnx") and n != _FOR_PEOPLE}
    parts = {**{part: manifest.get(part) for part in _BOUND}, _DATA: data}
    return {
        OWN + part: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for part, value in parts.items()
    }


def check_graphs(manifest: Manifest, graphs: Mapping[str, Graph]) -> None:
    """Each graph, by file, is what the manifest says. Raises ArtifactError."""
    used: dict[str, int] = {}
    for name, graph in graphs.items():
        for weight in graph.external:
            where = f"{name}: weight {weight.name!r}"
            place, end = _place(where, name, weight.place, manifest.files)
            used[place] = max(used.get(place, 0), end)
    if manifest.facts.adapters is not None:
        used |= {file_of(name): size for name, size in manifest.facts.adapters.bytes.items()}
    for name, file in manifest.files.items():
        if file.bytes > SMALL + _LAYOUTS * used.get(name, 0):
            raise ArtifactError(
                f"file {name!r} has {file.bytes:,} bytes, of which {used.get(name, 0):,} are used; "
                "do not trust it"
            )
    for entry_name, entry in manifest.entries.items():
        for name in entry.graphs.values():
            _check_signature(name, graphs[name], entry_name, entry, manifest)
    bound = _binding(manifest.raw, {name: file.sha256 for name, file in manifest.files.items()})
    for entry in manifest.entries.values():
        for name in entry.files:
            _check_binding(name, graphs[name], bound)


def _check_binding(name: str, graph: Graph, bound: Mapping[str, str]) -> None:
    there = graph.metadata
    if there.get(_FILE) != name:
        raise ArtifactError(f"{name} is another graph; {BUILD_AGAIN}")
    if there.get(_CONTENT) != graph.content:
        raise ArtifactError(f"{name} was changed after the build; {BUILD_AGAIN}")
    wrong = [key.removeprefix(OWN) for key in bound if there.get(key) != bound[key]]
    if wrong:
        words = [
            "the other files" if part == _DATA else f"{part!r} in {MANIFEST}" for part in wrong
        ]
        raise ArtifactError(f"{name} was not built with {', '.join(words)}; {BUILD_AGAIN}")


def _check_signature(
    name: str, graph: Graph, entry_name: str, entry: Entry, manifest: Manifest
) -> None:
    """What a graph takes and gives, by names, types and sizes."""
    state = {value.name: value for value in manifest.state}
    held = {value.name for value in manifest.state if not value.read_only}
    cross = {value.name for value in manifest.state if value.cross}
    facts = manifest.facts
    takes = {n for n in graph.inputs if n not in state}
    gives = {n for n in graph.outputs if state_of(n) not in state}
    read = state.keys() & graph.inputs.keys()
    written = {state_of(n) for n in graph.outputs} & state.keys()
    wrong = (takes ^ set(entry.inputs)) | (gives ^ set(entry.outputs))
    if entry_name == STEP.name:
        controls: dict[str, tuple[int | str, ...]] = {}
        if facts.depth is not None:
            controls |= facts.depth.inputs
        if facts.kv is not None:
            controls |= facts.kv.inputs
        if facts.picks is not None:
            controls |= facts.picks.inputs
        if facts.adapters is not None:
            controls |= {n: tuple(shape) for n, shape in facts.adapters.shapes().items()}
        wrong |= (_CALL - takes) | ({LOGITS} - gives) | (state.keys() - read) | (held ^ written)
        wrong |= graph.defaults ^ {*controls, *manifest.call_defaults}
        wrong |= {n for n, v in graph.inputs.items() if controls.get(n, v.shape) != v.shape}
    elif entry_name == ENCODE.name and facts.encoder is not None:
        wrong |= takes ^ ({"features"} if facts.encoder.features else {"inputs", "inputs.pos"})
        wrong |= cross ^ written
    if wrong:
        raise ArtifactError(
            f"{name}: graph and {MANIFEST} disagree on {', '.join(sorted(wrong)[:4])}; {BUILD_AGAIN}"
        )
    logits = graph.outputs.get(LOGITS)
    if logits is not None and (logits.shape or (None,))[-1] != facts.width:
        field = "vocab_size" if facts.embedding is None else "embedding.width"
        raise ArtifactError(
            f"{name} gives logits {_shown(logits)}, but model.{field} in {MANIFEST} is {facts.width}; "
            f"{BUILD_AGAIN}"
        )
    for value in [state[n] for n in graph.inputs if n in state]:
        _check_state(name, value, graph.inputs[value.name], whole=True)
    for output, given in graph.outputs.items():
        if state_of(output) in state:
            _check_state(name, state[state_of(output)], given, whole=False)


def _check_state(name: str, value: StateValue, graph_value: Value, whole: bool) -> None:
    """A state value as a graph takes it, or as it gives it (not `whole`: what grows may have other letters)."""
    pairs = list(zip(value.shape, graph_value.shape or (), strict=False))
    same = len(pairs) == len(value.shape) == len(graph_value.shape or ())
    same = same and all(a == b or not whole and isinstance(a, str) for a, b in pairs)
    if not same or graph_value.dtype != value.dtype:
        raise ArtifactError(
            f"{name}: state {value.name} is {value.dtype} {list(value.shape)} in {MANIFEST}, "
            f"{_shown(graph_value)} in the graph; {BUILD_AGAIN}"
        )


def _shown(value: Value) -> str:
    return f"{value.dtype} {list(value.shape) if value.shape is not None else 'of any shape'}"


@lru_cache
def _beneath(name: str, location: str) -> str:
    """A place as a graph names it, among the artifact's files; empty where it is spelt in another way."""
    file = (Path(name).parent / location).as_posix()
    return file if location == Path(location).as_posix() else ""


def _place(
    where: str, name: str, place: Mapping[str, str], files: Mapping[str, File]
) -> tuple[str, int]:
    """The listed file in which a weight outside a graph lies, whole, and where it ends there."""
    location = place.get("location", "")
    file = _beneath(name, location)
    if file not in files:
        raise ArtifactError(
            f"{where}: {unknown('file', location, files)}; it must be listed in {MANIFEST}"
        )
    size = files[file].bytes
    numbers = place.get("offset", "0"), place.get("length")
    if not all(text is None or (text.isascii() and text.isdigit()) for text in numbers):
        raise ArtifactError(
            f"{where}: offset or length is not a number of 0 or more; {BUILD_AGAIN}"
        )
    start = int(numbers[0] or "0")
    end = size if numbers[1] is None else start + int(numbers[1])
    if not start <= end <= size:
        raise ArtifactError(
            f"{where} is at {start}..{end} of {file}, which has {size} bytes; {BUILD_AGAIN}"
        )
    return file, end
