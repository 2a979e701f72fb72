"""What an artifact's manifest says, read field by field: an error names the field, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from accel.ir.errors import ArtifactError

MANIFEST = "accel.json"
BUILD_AGAIN = "the artifact was edited or damaged: build it again"


@dataclass(frozen=True)
class Least:
    """Of an annotation: the least int that is taken; 0 where it says none."""

    value: int


Positive = Annotated[int, Least(1)]
BUILD_ONLY: Mapping[str, Any] = MappingProxyType(
    {"build": True}
)  # of a field that no manifest keeps
_Value = TypeVar("_Value")


class Fields:
    """One JSON object that knows where it stands, so that an error names the field in full."""

    def __init__(self, value: Any, where: str = ""):
        self.where = where
        self.value: dict[str, Any] = self._typed(value, dict, "an object", where or "the whole")

    def integer(self, key: str, low: int = 0) -> int:
        """An int of at least `low`; true and false are not ints."""
        found = self._typed(self._get(key), int, "an integer", self.name(key))
        if found < low:
            raise self.wrong(key, found, f"{low} or more")
        return int(found)

    def optional_integer(self, key: str) -> int | None:
        """An int of at least 0, or null."""
        return None if self._get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        """An int or a float."""
        found = self._typed(self._get(key), (int, float), "a number", self.name(key))
        return found if isinstance(found, int) else float(found)

    def boolean(self, key: str) -> bool:
        """True or false."""
        if not isinstance(found := self._get(key), bool):
            raise self.wrong(key, found, "true or false")
        return found

    def text(self, key: str) -> str:
        """A string that is not empty."""
        found = self._typed(self._get(key), str, "a string", self.name(key))
        if not found:
            raise self.wrong(key, found, "a non-empty string")
        return str(found)

    def array(self, key: str) -> list[Any]:
        """A list."""
        found: list[Any] = self._typed(self._get(key), list, "a list", self.name(key))
        return found

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        items = enumerate(self.array(key))
        return tuple(self._typed(v, str, "a string", f"{self.name(key)}[{i}]") for i, v in items)

    def object(self, key: str) -> Fields:
        """An object within."""
        return Fields(self._get(key), self.name(key))

    def objects(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(v, f"{self.name(key)}[{i}]") for i, v in enumerate(self.array(key))]

    def each(self) -> list[tuple[str, Fields]]:
        """Every value, each an object, with its key."""
        return [(key, Fields(v, self.name(key))) for key, v in self.value.items()]

    def named_texts(self) -> dict[str, str]:
        """Every value, each a string, with its key."""
        return {key: self.text(key) for key in self.value}

    def has(self, key: str) -> bool:
        """Whether it holds anything there but null."""
        return self.value.get(key) is not None

    def wrong(self, key: str, value: Any, want: str) -> ArtifactError:
        """What to raise where a field holds `value`, and not what it must."""
        return _wrong(self.name(key), value, want)

    def name(self, key: str) -> str:
        """The field in full; of an item of a list, with its place."""
        if key.startswith("["):
            return self.where + key
        return f"{self.where}.{key}" if self.where else key

    def _get(self, key: str) -> Any:
        if key not in self.value:
            raise ArtifactError(f"{MANIFEST}: {self.name(key)} is missing; {BUILD_AGAIN}")
        return self.value[key]

    @staticmethod
    def _typed(value: Any, kind: Any, words: str, where: str) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(where, value, words)
        return value


def _wrong(where: str, value: Any, want: str) -> ArtifactError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ArtifactError(
        f"{MANIFEST}: {where} is {shown} ({type(value).__name__}), not {want}; {BUILD_AGAIN}"
    )


def read(kind: type[_Value], f: Fields) -> _Value:
    """A dataclass out of an object, each field by its annotation: int, float, bool, str, another dataclass, a tuple or
    list of one of these, a dict of them by name, or one of these or null. A field that is left out has its default.
    `kind.check(f)`, where there is one, then says what is wrong. Raises ArtifactError.
    """
    found: dict[str, Any] = {}
    some: Any = kind  # a class is hashable, whatever its type variable
    for name, (hint, needed) in _hints(some).items():
        if name in f.value or needed:
            found[name] = _read(hint, f, name)
    made = kind(**found)
    check: Callable[[Fields], None] | None = getattr(made, "check", None)
    if check is not None:
        check(f)
    return made


def optional_objects(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass that hold another one, or null."""
    hints = ((name, get_args(hint)) for name, (hint, _) in _hints(kind).items())
    return tuple(
        name for name, inner in hints if NoneType in inner and any(map(is_dataclass, inner))
    )


@cache
def _hints(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The annotation of each field that a manifest keeps, and whether it must be there."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        one.name: (hints[one.name], one.default is MISSING and one.default_factory is MISSING)
        for one in fields(kind)
        if "build" not in one.metadata
    }


def _read(hint: Any, f: Fields, key: str) -> Any:
    """A value by its annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        (some,) = (one for one in inner if one is not NoneType)
        return _read(some, f, key) if f.has(key) else None
    if origin is Annotated:
        return f.integer(key, inner[1].value)
    if origin in (tuple, list):
        items = Fields({f"[{i}]": value for i, value in enumerate(f.array(key))}, f.name(key))
        if origin is tuple and inner[-1] is not Ellipsis and len(items.value) != len(inner):
            raise f.wrong(key, f.array(key), f"{len(inner)} of them")
        return origin(_read(inner[0], items, place) for place in items.value)
    if origin is dict:
        items = f.object(key)
        return {name: _read(inner[1], items, name) for name in items.value}
    if is_dataclass(hint):
        return read(hint, f.object(key))  # type: ignore[arg-type]
    plain = {int: f.integer, float: f.number, bool: f.boolean, str: f.text}
    return plain[hint](key)
