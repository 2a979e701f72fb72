"""What an artifact's manifest says, read field by field: an error names the field, and what to do."""

from __future__ import annotations

from typing import Any

from accel.ir.errors import ArtifactError

MANIFEST = "accel.json"
BUILD_AGAIN = "the artifact was edited or damaged: build it again"


class Fields:
    """One JSON object that knows where it stands, so that an error names the field in full."""

    def __init__(self, value: Any, where: str = ""):
        self.where = where
        self.value: dict[str, Any] = self._typed(value, dict, "an object", where or "the whole")

    def integer(self, key: str, low: int = 0) -> int:
        """An int of at least `low`; true and false are not ints."""
        found = self._typed(self._get(key), int, "an integer", self._name(key))
        if found < low:
            raise self.wrong(key, found, f"{low} or more")
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
            raise self.wrong(key, found, "true or false")
        return found

    def text(self, key: str) -> str:
        """A string that is not empty."""
        found = self._typed(self._get(key), str, "a string", self._name(key))
        if not found:
            raise self.wrong(key, found, "a non-empty string")
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

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of ints and floats."""
        items = Fields({str(i): v for i, v in enumerate(self.array(key))}, self._name(key))
        return tuple(items.number(i) for i in items.value)

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

    def has(self, key: str) -> bool:
        """Whether it holds anything there but null."""
        return self.value.get(key) is not None

    def wrong(self, key: str, value: Any, want: str) -> ArtifactError:
        """What to raise where a field holds `value`, and not what it must."""
        return _wrong(self._name(key), value, want)

    def _name(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _get(self, key: str) -> Any:
        if key not in self.value:
            raise ArtifactError(f"{MANIFEST}: {self._name(key)} is missing; {BUILD_AGAIN}")
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
