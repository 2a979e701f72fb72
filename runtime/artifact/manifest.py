"""What `accel.json` says, with a type for every field: a damaged file gives an ArtifactError that
names the field.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from accel.ir.adapters import file_of
from accel.ir.entries import kind_of, kinds
from accel.ir.entries.commit import COMMIT
from accel.ir.entries.embed import EMBED, EMBEDDED, EMBEDS
from accel.ir.entries.step import STEP
from accel.ir.errors import ArtifactError, unknown
from accel.ir.facts import Facts
from accel.ir.fields import BUILD_AGAIN, MANIFEST, Fields
from accel.ir.sizes import LETTER
from accel.ir.state import Home, StateValue, Writer, writer_of
from accel.ir.version import VERSION
from accel.lowering.onnx.variants import NATIVE, PORTABLE

FORMAT = 3  # 3: attention of the compiled operators says whether it is partial, and the bits of keys and of values
TARGET = "onnx"
DATA_FOLDER = "data"  # of an artifact: what methods of the loop read as they run
DRAFT_FOLDER = "draft"  # of an artifact, which holds the draft model whole
OWN_DRAFT = "draft.json"  # the manifest of a draft model over the weights of the artifact itself
OWN_PREFIX = "draft."  # of its graphs
BATCH_INVARIANT = "batch-invariant"
_RANGES = {
    **{f"int{n}": (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 32, 64)},
    "uint8": (0, 255),
    "bool": (0, 1),
    "float16": (-65504, 65504),
}  # of dtypes that have not all numbers
DTYPES = ("float32", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")


PARTS = ("variants", "probes", "products")  # of an entry: name -> file


@dataclass(frozen=True)
class Entry:
    """One graph: its file, and the names that it takes and gives beside the state.

    variants: name -> file of another graph that does the same. probes, products: name -> file of a
    small graph that tells what attention, and what products with weights of few bits, cost in a
    variant; PORTABLE names that of `file`.
    """

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variants: dict[str, str] = field(default_factory=dict)
    probes: dict[str, str] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)

    @property
    def graphs(self) -> dict[str, str]:
        """Files of the graphs that do the entry's work, by variant."""
        return {PORTABLE: self.file, **self.variants}

    @property
    def files(self) -> list[str]:
        """All that are graphs."""
        return [self.file, *(file for part in PARTS for file in getattr(self, part).values())]


@dataclass(frozen=True)
class File:
    """What one file of the artifact must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All of `accel.json`, checked; `raw` is the JSON as read.

    numerics: "float32", or "batch-invariant" where a call of T tokens must give the bits of T single ones.
    """

    accel: str
    target: str
    facts: Facts
    numerics: str
    grade: str
    recipe: dict[str, Any]
    state: tuple[StateValue, ...]
    entries: dict[str, Entry]
    files: dict[str, File]
    report: dict[str, Any]
    digest: str
    raw: dict[str, Any]

    @property
    def tile(self) -> int:
        """A graph call has a multiple of so many tokens: kernels take rows in tiles, and what is left over,
        a single row, in another way.
        """
        return 2 if self.numerics == BATCH_INVARIANT else 1

    @property
    def trees(self) -> bool:
        """Whether a call may be a tree of guesses (`passes.state.trees`)."""
        return COMMIT.name in self.entries

    @property
    def call_defaults(self) -> list[str]:
        """Inputs of a step that a call may leave out: its tree, and embeddings in place of tokens."""
        given = [EMBEDS, EMBEDDED] if EMBED.name in self.entries else []
        return ["tree", *given] if self.trees else given

    @property
    def weights_digest(self) -> str:
        """sha256 of what the parameters are in: all files but graphs, texts and what drafters read. Builds of one model
        in the same numbers have the same.
        """
        kept = {
            name: file.sha256
            for name, file in self.files.items()
            if not name.endswith((".onnx", ".html", ".json"))
            and not name.startswith(f"{DATA_FOLDER}/")
        }
        told = json.dumps([self.facts.name, self.numerics, kept], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    def keeps_trees(self, kernels: str) -> bool:
        """Whether it may with a variant of the step: one that sums a token's keys as if no other guess lay there,
        where bits matter.
        """
        return self.trees and (self.numerics != BATCH_INVARIANT or kernels == NATIVE)


def parse(raw: Any) -> Manifest:
    """The manifest in a JSON value. Raises ArtifactError: format first, then field by field."""
    top = Fields(raw)
    version = top.integer("format", 1)
    if version > FORMAT:
        writer = str(raw.get("accel"))
        known = re.fullmatch(r"[0-9A-Za-z.+]{1,40}", writer)
        raise ArtifactError(
            f"{MANIFEST}: format {version} is newer than accel {VERSION} reads (up to {FORMAT}); it needs "
            + (f"accel {writer}, which wrote it, or newer" if known else "a newer accel")
        )
    if version < FORMAT:
        raise ArtifactError(
            f"{MANIFEST}: format {version} is of an older accel; {VERSION} reads {FORMAT}; build the artifact again"
        )
    if (target := top.text("target")) != TARGET:
        raise ArtifactError(
            f"{MANIFEST}: target {target!r} is not {TARGET!r}, which is what accel {VERSION} runs; {BUILD_AGAIN}"
        )
    files = {
        name: File(f.integer("bytes"), _digest(f, "sha256"))
        for name, f in top.object("files").each()
    }
    facts = Facts.from_json(top.object("model"))
    state = tuple(_state(f) for f in top.objects("state"))
    if len({v.name for v in state}) < len(state):
        raise ArtifactError(f"{MANIFEST}: two state values have the same name; {BUILD_AGAIN}")
    shared = [v.layer is None for v in state if v.kept_positions]
    if facts.kv is not None and shared != ([True] if facts.kv.flush else [False] * len(shared)):
        raise ArtifactError(
            f"{MANIFEST}: model.kv.flush is {facts.kv.flush}, but state has {sum(shared)} positions of blocks and "
            f"{len(shared) - sum(shared)} of layers; {BUILD_AGAIN}"
        )
    entries = entries_of(raw)
    if STEP.name not in entries:
        raise ArtifactError(f"{MANIFEST}: entries has no 'step'; {BUILD_AGAIN}")
    for kind in kinds().values():
        wanted = sorted(kind.names(facts)) if kind.feature else []
        there = sorted(name for name in entries if kind_of(name) is kind)
        if kind.feature and wanted != there:
            raise ArtifactError(
                f"{MANIFEST}: model.{kind.feature} and entries.{kind.name} must match: the model has "
                f"{', '.join(wanted) or 'none'}, the entries {', '.join(there) or 'none'}; {BUILD_AGAIN}"
            )
    for name in facts.adapters.ranks if facts.adapters is not None else ():
        _listed(f"model.adapters.ranks.{name}", file_of(name), files)
    for name, entry in entries.items():
        _listed(f"entries.{name}.file", entry.file, files)
        for part in PARTS:
            for key, file in getattr(entry, part).items():
                _listed(f"entries.{name}.{part}.{key}", file, files)
    return Manifest(
        accel=top.text("accel"),
        target=target,
        facts=facts,
        numerics=top.text("numerics"),
        grade=top.text("grade"),
        recipe=top.object("recipe").value,
        state=state,
        entries=entries,
        files=files,
        report=top.object("report").value,
        digest=top.text("digest"),
        raw=top.value,
    )


def entries_of(raw: Any) -> dict[str, Entry]:
    """The entries in a manifest's JSON value. Raises ArtifactError."""
    return {name: _entry(f) for name, f in Fields(raw).object("entries").each()}


def _entry(f: Fields) -> Entry:
    return Entry(
        f.text("file"),
        f.texts("inputs"),
        f.texts("outputs"),
        **{p: f.object(p).named_texts() for p in PARTS if p in f.value},
    )


def _listed(where: str, file: str, files: dict[str, File]) -> None:
    if file not in files:
        raise ArtifactError(f"{MANIFEST}: {where}: {unknown('file', file, files)}; {BUILD_AGAIN}")


def _state(f: Fields) -> StateValue:
    shape: list[int | str] = []
    for i, size in enumerate(f.array("shape")):
        whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
        letter = isinstance(size, str) and LETTER.fullmatch(size)
        if not whole and not letter:
            raise f.wrong(
                f"shape[{i}]", size, "a size of 1 or more, 'B', 'C', 'C/16', 'X', 'P' or 'P0'"
            )
        if size == "Z" and writer_of(f.text("role")) is not Writer.SESSION:
            raise f.wrong(
                f"shape[{i}]", size, "a letter of what a session holds: Z is of blocks that share"
            )
        shape.append(size)
    dtype = f.text("dtype")
    if dtype not in DTYPES:
        raise ArtifactError(
            f"{MANIFEST}: {f.where}.dtype: {unknown('type', dtype, DTYPES)}; {BUILD_AGAIN}"
        )
    layer, fill = f.optional_integer("layer"), f.number("fill")
    home = f.text("home") if "home" in f.value else Home.MEMORY
    if home not in list(Home):
        raise ArtifactError(
            f"{MANIFEST}: {f.where}.home: {unknown('home', home, Home)}; {BUILD_AGAIN}"
        )
    low, high = _RANGES.get(dtype, (-math.inf, math.inf))
    if fill != fill or not low <= fill <= high:
        raise f.wrong("fill", fill, f"a number that {dtype} has")
    try:
        named = f.text("name"), f.text("role"), layer, dtype, tuple(shape), fill
        return StateValue.parse(*named, home)
    except ValueError as error:
        raise ArtifactError(
            f"{MANIFEST}: {f.where}: this accel knows no state {error}; {BUILD_AGAIN}"
        ) from None


def _digest(f: Fields, key: str) -> str:
    found = f.text(key)
    if len(found) != 64 or set(found) - set("0123456789abcdef"):
        raise f.wrong(key, found, "64 hexadecimal digits")
    return found
