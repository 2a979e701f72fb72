"""What `accel.json` says, with a type for every field: a damaged file gives an ArtifactError that
names the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel.ir.depth import CACHES, Depth
from accel.ir.diffusion import Diffusion
from accel.ir.errors import ArtifactError, unknown
from accel.ir.prefill import Pick, Prefill, Segments
from accel.ir.sizes import LETTER
from accel.ir.state import BLOCK, StateValue
from accel.lowering.onnx.variants import NATIVE, PORTABLE

FORMAT = 1
MANIFEST = "accel.json"
BIT_EXACT = "bit-exact"
DTYPES = ("float32", "float16", "float64", "int64", "int32", "int8", "uint8", "bool")
_BUILD_AGAIN = "the artifact was edited or damaged: build it again"


@dataclass(frozen=True)
class Encoder:
    """What an encoder takes: token ids (at most `max_length`), or features of these sizes. `start`:
    the tokens that its decoder starts from.
    """

    vocab_size: int
    max_length: int
    features: tuple[int, ...] = ()
    start: tuple[int, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The model, as far as running it needs."""

    name: str
    vocab_size: int
    num_layers: int
    max_context: int
    max_batch: int = 1
    eos: tuple[int, ...] = ()
    bos: int | None = None
    parameters: int = 0
    layers: tuple[dict[str, Any], ...] = ()
    encoder: Encoder | None = None
    kv: Kv | None = None
    depth: Depth | None = None
    prefill: Prefill | None = None
    diffusion: Diffusion | None = None


@dataclass(frozen=True)
class Kv:
    """What a recipe does with the cache: `observe` queries of each row go into the entry `compress`, or
    blocks of `flush` tokens are moved by it.
    """

    observe: int = 0
    flush: int = 0


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

    numerics: "float32", or "bit-exact" where a call of T tokens must give the bits of T single ones.
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
    raw: dict[str, Any]

    @property
    def tile(self) -> int:
        """A graph call has a multiple of so many tokens: kernels take rows in tiles, and what is left over,
        a single row, in another way.
        """
        return 2 if self.numerics == BIT_EXACT else 1

    @property
    def trees(self) -> bool:
        """Whether a call may be a tree of guesses (`passes.state.trees`)."""
        return "commit" in self.entries

    def keeps_trees(self, kernels: str) -> bool:
        """Whether it may with a variant of the step: one that sums a token's keys as if no other guess lay there,
        where bits matter.
        """
        return self.trees and (self.numerics != BIT_EXACT or kernels == NATIVE)


class Fields:
    """One JSON object that knows where it stands, so that an error names the field in full."""

    def __init__(self, value: Any, where: str = ""):
        self.where = where
        self.value: dict[str, Any] = self._typed(value, dict, "an object", where or "the whole")

    def integer(self, key: str, low: int = 0) -> int:
        """An int of at least `low`; true and false are not ints."""
        found = self._typed(self._get(key), int, "an integer", self._name(key))
        if found < low:
            raise _wrong(self._name(key), found, f"{low} or more")
        return int(found)

    def optional_integer(self, key: str) -> int | None:
        """An int of at least 0, or null."""
        return None if self._get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        """An int or a float."""
        found = self._typed(self._get(key), (int, float), "a number", self._name(key))
        return found if isinstance(found, int) else float(found)

    def boolean(self, key: str) -> bool:
        """True or false."""
        if not isinstance(found := self._get(key), bool):
            raise _wrong(self._name(key), found, "true or false")
        return found

    def text(self, key: str) -> str:
        """A string that is not empty."""
        found = self._typed(self._get(key), str, "a string", self._name(key))
        if not found:
            raise _wrong(self._name(key), found, "a string that is not empty")
        return str(found)

    def array(self, key: str) -> list[Any]:
        """A list."""
        found: list[Any] = self._typed(self._get(key), list, "a list", self._name(key))
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        items = enumerate(self.array(key))
        return tuple(self._typed(v, str, "a string", f"{self._name(key)}[{i}]") for i, v in items)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of ints of at least 0."""
        items = Fields({str(i): v for i, v in enumerate(self.array(key))}, self._name(key))
        return tuple(items.integer(i) for i in items.value)

    def object(self, key: str) -> Fields:
        """An object within."""
        return Fields(self._get(key), self._name(key))

    def objects(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(v, f"{self._name(key)}[{i}]") for i, v in enumerate(self.array(key))]

    def each(self) -> list[tuple[str, Fields]]:
        """Every value, each an object, with its key."""
        return [(key, Fields(v, self._name(key))) for key, v in self.value.items()]

    def named_texts(self) -> dict[str, str]:
        """Every value, each a string, with its key."""
        return {key: self.text(key) for key in self.value}

    def _name(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _get(self, key: str) -> Any:
        if key not in self.value:
            raise ArtifactError(f"{MANIFEST}: {self._name(key)} is missing; {_BUILD_AGAIN}")
        return self.value[key]

    @staticmethod
    def _typed(value: Any, kind: Any, words: str, where: str) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(where, value, words)
        return value


def parse(raw: Any) -> Manifest:
    """The manifest in a JSON value. Raises ArtifactError: format first, then field by field."""
    top = Fields(raw)
    version = top.integer("format", 1)
    if version > FORMAT:
        raise ArtifactError(
            f"{MANIFEST}: format {version} is newer than this accel reads (up to {FORMAT}); "
            "upgrade accel: pip install -U accel-compile"
        )
    files = {
        name: File(f.integer("bytes"), _digest(f, "sha256"))
        for name, f in top.object("files").each()
    }
    facts = _facts(top.object("model"))
    state = tuple(_state(f) for f in top.objects("state"))
    if len({v.name for v in state}) < len(state):
        raise ArtifactError(f"{MANIFEST}: state has two values of one name; {_BUILD_AGAIN}")
    entries = {
        name: _entry(f) for name, f in top.object("entries").each()
    }
    if "step" not in entries:
        raise ArtifactError(f"{MANIFEST}: entries has no 'step'; {_BUILD_AGAIN}")
    if (facts.kv is None) == ("compress" in entries):
        raise ArtifactError(f"{MANIFEST}: model.kv and entries.compress go together; {_BUILD_AGAIN}")
    if (facts.encoder is None) == ("encode" in entries):
        raise ArtifactError(f"{MANIFEST}: model.encoder and entries.encode go together; {_BUILD_AGAIN}")
    wanted = () if facts.prefill is None else facts.prefill.entries
    if set(wanted) != {name for name in entries if name.partition(".")[0] in ("filter", "prompt", "sparse")}:
        raise ArtifactError(
            f"{MANIFEST}: model.prefill and its entries go together ({', '.join(wanted)}); {_BUILD_AGAIN}"
        )
    for name, entry in entries.items():
        _listed(f"entries.{name}.file", entry.file, files)
        for part in PARTS:
            for key, file in getattr(entry, part).items():
                _listed(f"entries.{name}.{part}.{key}", file, files)
    return Manifest(
        accel=top.text("accel"),
        target=top.text("target"),
        facts=facts,
        numerics=top.text("numerics"),
        grade=top.text("grade"),
        recipe=top.object("recipe").value,
        state=state,
        entries=entries,
        files=files,
        report=top.object("report").value,
        raw=top.value,
    )


def _entry(f: Fields) -> Entry:
    return Entry(
        f.text("file"),
        f.texts("inputs"),
        f.texts("outputs"),
        **{p: f.object(p).named_texts() for p in PARTS if p in f.value},
    )


def _listed(where: str, file: str, files: dict[str, File]) -> None:
    if file not in files:
        raise ArtifactError(f"{MANIFEST}: {where}: {unknown('file', file, files)}; {_BUILD_AGAIN}")


def _facts(f: Fields) -> Facts:
    vocab = f.integer("vocab_size", 1)
    eos = []
    for i, token in enumerate(f.array("eos")):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise _wrong(f"model.eos[{i}]", token, f"a token id, 0..{vocab - 1}")
        eos.append(token)
    return Facts(
        name=f.text("name"),
        vocab_size=vocab,
        num_layers=f.integer("num_layers"),
        max_context=f.integer("max_context", 1),
        max_batch=f.integer("max_batch", 1),
        eos=tuple(eos),
        bos=f.optional_integer("bos"),
        parameters=f.integer("parameters"),
        layers=tuple(layer.value for layer in f.objects("layers")),
        encoder=_encoder(f.object("encoder")) if f.value.get("encoder") is not None else None,
        kv=_kv(f.object("kv")) if f.value.get("kv") is not None else None,
        depth=_depth(f.object("depth"), f.integer("num_layers")) if "depth" in f.value else None,
        prefill=_prefill(f.object("prefill")) if "prefill" in f.value else None,
        diffusion=_diffusion(f.object("diffusion"), vocab) if "diffusion" in f.value else None,
    )


def _diffusion(f: Fields, vocab: int) -> Diffusion:
    if (mask := f.integer("mask")) >= vocab:
        raise _wrong("model.diffusion.mask", mask, f"a token id, 0..{vocab - 1}")
    return Diffusion(mask, f.boolean("shift"))


def _prefill(f: Fields) -> Prefill:
    first = None if f.value.get("filter") is None else _pick(f.object("filter"))
    stages = tuple(_pick(stage) for stage in f.objects("stages"))
    if f.value.get("segments") is None:
        return Prefill(first, stages)
    cut = f.object("segments")
    return Prefill(first, stages, Segments(cut.integer("tokens", 1), cut.integer("threshold")))


def _pick(f: Fields) -> Pick:
    return Pick(f.integer("tokens", 1), f.integer("sinks"), f.integer("recent"))


def _kv(f: Fields) -> Kv:
    return Kv(f.integer("observe"), f.integer("flush") if "flush" in f.value else 0)


def _depth(f: Fields, layers: int) -> Depth:
    plan = f.array("plan")
    if len(plan) != layers or not all(isinstance(run, bool) for run in plan) or not any(plan):
        raise _wrong("model.depth.plan", plan, f"{layers} bools, some of them true")
    threshold = None if f.value.get("threshold") is None else float(f.number("threshold"))
    if f.text("cache") not in CACHES:
        raise _wrong("model.depth.cache", f.text("cache"), f"one of {', '.join(CACHES)}")
    return Depth(tuple(plan), f.text("cache"), threshold)


def _encoder(f: Fields) -> Encoder:
    return Encoder(
        f.integer("vocab_size"), f.integer("max_length", 1), f.integers("features"), f.integers("start")
    )


def _state(f: Fields) -> StateValue:
    shape: list[int | str] = []
    for i, size in enumerate(f.array("shape")):
        whole = isinstance(size, int) and not isinstance(size, bool) and size > 0
        letter = isinstance(size, str) and LETTER.fullmatch(size)
        if not whole and not letter:
            raise _wrong(f"{f.where}.shape[{i}]", size, "a size of 1 or more, 'B', 'C', 'C/16', 'X', 'P' or 'P0'")
        if size == "Z" and not f.text("role").startswith(BLOCK):
            raise _wrong(f"{f.where}.shape[{i}]", size, "a letter of what a session holds: Z is of blocks that share")
        shape.append(size)
    dtype = f.text("dtype")
    if dtype not in DTYPES:
        raise ArtifactError(
            f"{MANIFEST}: {f.where}.dtype: {unknown('type', dtype, DTYPES)}; {_BUILD_AGAIN}"
        )
    return StateValue(
        f.text("name"),
        f.text("role"),
        f.optional_integer("layer"),
        dtype,
        tuple(shape),
        f.number("fill"),
    )


def _digest(f: Fields, key: str) -> str:
    found = f.text(key)
    if len(found) != 64 or set(found) - set("0123456789abcdef"):
        raise _wrong(f"{f.where}.{key}", found, "64 hexadecimal digits")
    return found


def _wrong(where: str, value: Any, want: str) -> ArtifactError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ArtifactError(
        f"{MANIFEST}: {where} is {shown} ({type(value).__name__}), not {want}; {_BUILD_AGAIN}"
    )
