"""A value that lives from call to call, as a program and a manifest describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

_AFTER = ".next"  # of a state value's name, where it names an output; nothing else spells it


class Part(StrEnum):
    """What a state value holds, of each slot unless it says otherwise."""

    KEYS = "k"
    VALUES = "v"
    POSITIONS = "pos"  # -1: nothing lies there
    MASS = "mass"  # attention that a slot drew; by `detail`, something else that queries leave
    NOTE = "note"  # what a score notes of a token
    PAGES = "pages"  # what is known of a page of slots
    UNITS = "units"  # which unit a slot's token is in, and what is known of units
    LOW_RANK = "low_rank"  # what stands for the keys of a prompt: numbers of each slot, directions of a row
    CHOICE = "choice"  # of the newest tokens, for the choices of later ones
    ABSORBED = (
        "absorbed"  # of a whole row: what tokens that were evicted leave; `compress` writes it
    )
    HEADS = "heads"  # of a whole row: which query heads read its prompt, and their scores
    COUNTS = "counts"  # of a whole row: how many kept slots each head has, where they are not equally many
    TABLE = "table"  # which blocks of a pool are a row's
    RECURRENT = "recurrent"  # of the whole row, and replaced by each call
    OUTPUTS = "outputs"  # by `detail`, what a part of a layer gave


class CacheRegion(StrEnum):
    """Whose slots they are."""

    RECENT = "kv"  # that steps append to
    KEPT = "kept"  # of tokens that were chosen, or encoded in blocks
    LOW = "low"  # of tokens in fewer bits
    POOL = "pool"  # in blocks that sessions share
    CROSS = "cross"  # of the encoder's positions


class Home(StrEnum):
    """Where a target keeps a state value, if it can; elsewhere it is in the memory that computes."""

    MEMORY = "memory"
    MAPPED = "mapped"  # a file, of which only what is read has to be in memory


class Writer(StrEnum):
    """Who writes a state value that the step reads; the step, unless it says otherwise."""

    STEP = "step"
    ENCODE = "encode"  # once
    COMPRESS = "compress"  # each time that it runs
    GROUP = "group"  # each time that it runs, where it lies
    FACTOR = "factor"  # the same
    SESSION = "session"  # between calls


_ROLES = {  # how the roles of a region's values begin in a manifest, longer ones first
    CacheRegion.POOL: "kept.block.",
    CacheRegion.LOW: "kept.low.",
    CacheRegion.KEPT: "kept.",
    CacheRegion.CROSS: "cross.",
    CacheRegion.RECENT: "",
}
_COUNTS = _ROLES[CacheRegion.KEPT] + Part.COUNTS
_WRITERS = {
    CacheRegion.POOL: Writer.SESSION,
    CacheRegion.LOW: Writer.COMPRESS,
    CacheRegion.KEPT: Writer.COMPRESS,
    CacheRegion.CROSS: Writer.ENCODE,
    CacheRegion.RECENT: Writer.STEP,
}
_DETAILED = (
    Part.PAGES,
    Part.UNITS,
    Part.LOW_RANK,
    Part.CHOICE,
    Part.ABSORBED,
    Part.RECURRENT,
    Part.OUTPUTS,
)  # whose names end with the detail
_PLAIN = (Part.MASS, *_DETAILED)  # their role is the part, whatever the region


def output_of(name: str) -> str:
    """The output that gives a state value as it is after a call."""
    return name + _AFTER


def state_of(output: str) -> str:
    """The state value that an output gives; the output's own name where it gives none."""
    return output.removesuffix(_AFTER)


def writes_state(output: str) -> bool:
    """Whether an output gives a state value."""
    return output.endswith(_AFTER)


def name_of(
    part: Part,
    layer: int | None = None,
    region: CacheRegion = CacheRegion.RECENT,
    detail: str = "",
) -> str:
    """The name of a state value, by which graphs and manifests know it."""
    if part is Part.TABLE:
        return part.value
    if part in _DETAILED:
        words: tuple[object, ...] = (part, layer, detail)
    elif part in (Part.MASS, Part.NOTE):
        words = part, layer, detail, "kept" if region is CacheRegion.KEPT else "recent"
    else:
        words = region, layer, part, detail
    return ".".join(str(word) for word in words if word not in (None, ""))


POSITIONS = name_of(Part.POSITIONS)  # in the slots that all layers share


@dataclass(frozen=True)
class StateValue:
    """`shape` mixes numbers and letters: B, C, X, M, Z, P and P<layer>; C/16 is one for every 16 slots (`ir.sizes`).

    layer: None where layers share it. detail: which of several values of one part it is: a codec's scale,
    a page's bound, the stage of positions. fill: what an empty one holds. home: where it lies.
    """

    part: Part
    layer: int | None
    dtype: str
    shape: tuple[int | str, ...]
    fill: float = 0
    region: CacheRegion = CacheRegion.RECENT
    detail: str = ""
    home: Home = Home.MEMORY

    @classmethod
    def parse(
        cls,
        name: str,
        role: str,
        layer: int | None,
        dtype: str,
        shape: tuple[int | str, ...],
        fill: float,
        home: str = Home.MEMORY,
    ) -> Self:
        """What a manifest calls so. Raises ValueError where there is none of that name and role, or no such home."""
        region, rest = next((r, role[len(s) :]) for r, s in _ROLES.items() if role.startswith(s))
        word, _, detail = rest.partition(".")
        if word not in list(Part):
            raise ValueError(f"{name} with role {role} and layer {layer}")
        part = Part(word)
        if part is Part.MASS:
            *inner, last = name.split(".")[2:] or [""]
            region = CacheRegion.KEPT if last == "kept" else region
            detail = ".".join(inner)
        if not detail and part in (*_DETAILED, Part.POSITIONS):
            detail = name[len(name_of(part, layer, region)) :].removeprefix(".")
        value = cls(part, layer, dtype, shape, fill, region, detail, Home(home))
        if (value.name, value.role) != (name, role):
            raise ValueError(f"{name} with role {role} and layer {layer}")
        return value

    def to_json(self) -> dict[str, Any]:
        """As a manifest keeps it: `parse` reads it. Its home where that is not memory."""
        names = ("name", "role", "layer", "dtype", "shape", "fill")
        told = {**{n: getattr(self, n) for n in names}, "shape": list(self.shape)}
        return told if self.home is Home.MEMORY else {**told, "home": self.home.value}

    @cached_property
    def name(self) -> str:
        """By which graphs know it."""
        return name_of(self.part, self.layer, self.region, self.detail)

    @property
    def output(self) -> str:
        """The output that gives it as it is after a call."""
        return output_of(self.name)

    @property
    def role(self) -> str:
        """What a manifest says that it is."""
        if self.part in _PLAIN:
            return self.part.value
        detail = "" if self.part is Part.POSITIONS else self.detail
        return _ROLES[self.region] + self.part.value + (f".{detail}" if detail else "")

    @property
    def writer(self) -> Writer:
        """Who writes it beside the step, which then only reads it; or the step."""
        if self.part is Part.UNITS:
            return Writer.GROUP
        if self.part is Part.LOW_RANK:
            return Writer.FACTOR
        if self.part is Part.ABSORBED:
            return Writer.COMPRESS
        return Writer.STEP if self.part is Part.MASS else _WRITERS[self.region]

    @property
    def read_only(self) -> bool:
        """Whether the step only reads it."""
        return self.writer is not Writer.STEP

    @property
    def cross(self) -> bool:
        """Whether the encode entry writes it, and the step only reads it."""
        return self.writer is Writer.ENCODE

    @property
    def written_between_steps(self) -> bool:
        """Whether the compress entry or the session writes it, and the step only reads it."""
        return self.writer in (Writer.COMPRESS, Writer.SESSION)

    @property
    def shared(self) -> bool:
        """Whether the session writes it, between calls: blocks, and the table of them."""
        return self.writer is Writer.SESSION

    @property
    def pooled(self) -> bool:
        """Whether it is blocks, of a pool that all sessions of a model share."""
        return self.shared and self.part is not Part.TABLE

    @property
    def positions(self) -> bool:
        """Whether it says which positions lie in the slots that steps append to."""
        return self.part is Part.POSITIONS and self.region is CacheRegion.RECENT

    @property
    def kept_positions(self) -> bool:
        """Whether it says which positions were chosen, or encoded in blocks."""
        return self.part is Part.POSITIONS and self.region is CacheRegion.KEPT

    @property
    def ragged(self) -> bool:
        """Whether it says how many kept slots each head has (`ir.ops.ragged`)."""
        return self.part is Part.COUNTS

    @property
    def stored(self) -> bool:
        """Whether it is keys or values as they are, or as a codec's codes, without what goes with the codes."""
        return self.part in (Part.KEYS, Part.VALUES) and not self.detail


def writer_of(role: str) -> Writer:
    """Who writes a value of this role in a report or manifest."""
    if by_row(role):
        return Writer.COMPRESS
    region = next(r for r, start in _ROLES.items() if role.startswith(start))
    return _WRITERS[region]


def by_row(role: str) -> bool:
    """Whether `compress` writes a value of this role for a whole row, however many tokens it keeps."""
    return role in (Part.ABSORBED, _COUNTS)


def ragged_heads(state: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The KV heads of each layer, in a report or manifest, whose kept slots are one head's each."""
    return {value["layer"]: int(value["shape"][1]) for value in state if value["role"] == _COUNTS}
