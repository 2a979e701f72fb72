"""Parameters by name, made when they are read, so that a whole model need never lie in memory.

A parameter is `Stored`: a tensor (in memory, or in a file that is mapped) and what is done to it at
each reading: a bfloat16 checkpoint is widened, a float16 recipe narrows, one tensor at a time.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from accel.ir.scratch import folder_of_files, trim

Change = Callable[[Tensor], Tensor]
HELD = 1 << 27  # bytes of parameters that are kept between several runs of a program


class Pages:
    """Files mapped into memory. What was read of them is given back to the system once it is much:
    the next reading maps it again. Nothing may be written into these tensors.
    """

    LIMIT = 1 << 26  # bytes read between two times of giving back
    _all: ClassVar[WeakSet[Pages]] = WeakSet()

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._read = 0
        self._written = 0
        self._scratch: Any = None
        self._all.add(self)

    def keep(self, tensor: Tensor) -> Stored:
        """A tensor written to a nameless temporary file, and read from there."""
        return self.keep_parts(tensor.shape, tensor.dtype, [tensor])

    def keep_parts(
        self, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[Tensor]
    ) -> Stored:
        """The same of a tensor that is never whole in memory: its parts follow one another along its first axis."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryFile(dir=folder_of_files())
        end = self._scratch.seek(0, 2)
        self._scratch.write(b"\0" * (-end % mmap.ALLOCATIONGRANULARITY))
        start = self._scratch.tell()
        for part in parts:
            self._scratch.write(part.contiguous().flatten().view(torch.uint8).numpy().data)
        self._scratch.flush()
        size = self._scratch.tell() - start
        self._written += size
        if (
            self._written >= self.LIMIT // 8
        ):  # what codes are computed with is several times as large
            self._written = 0
            trim()
        mapped = mmap.mmap(self._scratch.fileno(), size, access=mmap.ACCESS_COPY, offset=start)
        self._maps.append(mapped)
        flat = torch.frombuffer(mapped, dtype=dtype)
        return Stored(flat.view(*shape), pages=self)

    def open(self, path: Path) -> Tensor:
        """The bytes of a file that is not empty, uint8 [n]."""
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._maps.append(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def used(self, count: int) -> None:
        """Bytes have been, or are just about to be, read."""
        self._read += count
        if self._read >= self.LIMIT:
            self.release()

    def release(self) -> None:
        """Give back every page; on systems without madvise they stay until they are needed elsewhere."""
        self._read = 0
        for mapped in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    @classmethod
    def give_back(cls) -> None:
        """Give back the pages of all files, and what was freed: for between the parts of a build."""
        for pages in list(cls._all):
            pages.release()
        trim()


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor where it lies, and what makes a parameter of it."""

    source: Tensor
    changes: tuple[Change, ...] = ()
    pages: Pages | None = None

    @classmethod
    def of(cls, value: Tensor | Stored) -> Stored:
        """A tensor as it is, where it is not stored otherwise."""
        return value if isinstance(value, Stored) else cls(value)

    def read(self) -> Tensor:
        """The parameter; a new tensor wherever a change makes one."""
        with torch.no_grad():
            value = self._value()
            for change in self.changes:
                value = change(value)
        if self.pages is not None:
            self.pages.used(self.source.nbytes)
        return value

    def _value(self) -> Tensor:
        """What the changes begin with."""
        return self.source

    @cached_property
    def blank(self) -> Tensor:
        """Its shape, strides and dtype: a tensor on the meta device."""
        source = self.source
        value = torch.empty_strided(
            source.shape, source.stride(), dtype=source.dtype, device="meta"
        )
        for change in self.changes:
            value = change(value)
        return value

    @property
    def nbytes(self) -> int:
        """Bytes that it takes where it is written."""
        return self.blank.nbytes

    @property
    def layout(self) -> Hashable:
        """What weights must have in common to be stacked as they lie; none of those that lie as numbers."""
        return None

    def changed(self, change: Change) -> Stored:
        """The same with one more change. It must also work on the meta device."""
        return replace(self, changes=(*self.changes, change))


@dataclass(frozen=True, eq=False)
class Stacked(Stored):
    """Parameters one below the other, put together at each reading; `source` only shows the shape."""

    parts: tuple[Stored, ...] = ()

    @classmethod
    def rows(cls, parts: Sequence[Stored]) -> Stacked:
        """[N1,...], [N2,...], … of one dtype as [N1 + N2 + …,...]."""
        return cls(torch.cat([p.blank for p in parts]), parts=tuple(parts))

    def _value(self) -> Tensor:
        """The stack; beside it only one of its parts is held."""
        stack = torch.empty(self.source.shape, dtype=self.source.dtype)
        start = 0
        for part in self.parts:
            end = start + part.blank.shape[0]
            stack[start:end] = part.read()
            start = end
        return stack


@dataclass(frozen=True, eq=False)
class Experts(Stored):
    """Weights [N,K] side by side, as [X,N,K], or [X,K,N] where they are `turned`; `source` only shows the shape."""

    experts: tuple[Stored, ...] = ()
    turned: bool = False

    @classmethod
    def stack(cls, experts: Sequence[Stored], turned: bool = False) -> Experts:
        """One weight of those of several experts."""
        blank = torch.stack([e.blank for e in experts])
        blank = blank.mT.contiguous() if turned else blank
        return cls(blank, experts=tuple(experts), turned=turned)

    @classmethod
    def rows(cls, parts: Sequence[Experts]) -> Experts:
        """[X,N1,K], [X,N2,K], … as [X,N1 + N2 + …,K]."""
        return cls.stack(
            [Stacked.rows(own) for own in zip(*(part.experts for part in parts), strict=True)]
        )

    def _value(self) -> Tensor:
        """The stack; beside it only one expert is held."""
        stack = torch.empty(self.source.shape, dtype=self.source.dtype)
        for place, expert in zip(stack, self.experts, strict=True):
            place.copy_(expert.read().t() if self.turned else expert.read())
        return stack


@dataclass(frozen=True, eq=False, kw_only=True)
class Factored(Stored):
    """Float32 numbers [N,B] as products, multiplied at each reading: `coarse` [N,B/S] float16, one of S numbers, times
    `fine` [N,B], whole numbers of a byte. `source` only shows the shape.
    """

    coarse: Stored
    fine: Stored

    @classmethod
    def of_parts(cls, coarse: Stored, fine: Stored) -> Factored:
        """The products of these parts."""
        source = torch.empty(fine.blank.shape, device="meta")
        return cls(source=source, coarse=coarse, fine=fine)

    @property
    def nbytes(self) -> int:
        return self.coarse.nbytes + self.fine.nbytes

    def _value(self) -> Tensor:
        return multiplied(self.coarse.read(), self.fine.read())


@dataclass(frozen=True, eq=False, kw_only=True)
class Offsets(Stored):
    """Float32 offsets [B,N] of blocks [N,B] whose zero point lies `middle` codes higher than where they were made:
    `least`, and `middle` times the scales, the parameter `scales_name`. `source` only shows the shape.
    """

    scales_name: str
    scales: Stored
    least: Stored
    middle: int

    @classmethod
    def of_blocks(cls, scales_name: str, scales: Stored, least: Stored, middle: int) -> Offsets:
        """Those of blocks with these scales."""
        source = torch.empty(least.blank.t().shape, device="meta")
        return cls(
            source=source, scales_name=scales_name, scales=scales, least=least, middle=middle
        )

    @property
    def nbytes(self) -> int:
        return self.least.nbytes

    def _value(self) -> Tensor:
        numbers = self.least.read().float() + self.middle * self.scales.read().float()
        return numbers.t().contiguous()


def composed(stored: Stored) -> Factored | Offsets | None:
    """What is computed of parts at each reading, where nothing is done to it after."""
    return stored if isinstance(stored, (Factored, Offsets)) and not stored.changes else None


def multiplied(coarse: Tensor, fine: Tensor) -> Tensor:
    """coarse [N,B/S] times fine [N,B] -> float32 [N,B]."""
    each = fine.shape[1] // coarse.shape[1]
    numbers = fine.float().unflatten(1, (-1, each)) * coarse.float().unsqueeze(2)
    flat: Tensor = numbers.flatten(1)
    return flat


@dataclass(frozen=True)
class Origin:
    """What a parameter in fewer bits was rounded from. steps: how far a row may be from it, as the root of the mean
    square in steps of its codes.
    """

    stored: Stored
    steps: float


class Weights(MutableMapping[str, Tensor]):
    """name -> parameter. Reading one that changes makes a new tensor: do not keep many of them."""

    def __init__(self, items: Mapping[str, Tensor | Stored] | None = None):
        self._items = {name: Stored.of(item) for name, item in (items or {}).items()}
        self._scratch = Pages()
        self.origins: dict[str, Origin] = {}  # what those in fewer bits were rounded from, by name
        self._held: dict[str, Tensor] | None = None
        self._room = 0  # bytes that may be held besides

    def __getitem__(self, name: str) -> Tensor:
        if self._held is None:
            return self._items[name].read()
        if name in self._held:
            return self._held[name]
        value = self._items[name].read()
        self._room -= value.nbytes
        if self._room >= 0:
            self._held[name] = value
        return value

    @contextmanager
    def read_once(self) -> Iterator[None]:
        """Within it, parameters are read once, as far as they fit into HELD bytes: for what runs the program
        several times, and changes none.
        """
        self._held, self._room = {}, HELD
        try:
            yield
        finally:
            self._held = None
            Pages.give_back()

    def __setitem__(self, name: str, value: Tensor | Stored) -> None:
        self._items[name] = Stored.of(value)

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def copy(self) -> Weights:
        """Another mapping of the same parameters."""
        same = Weights(self._items)
        same.origins = dict(self.origins)
        return same

    def stored(self, name: str) -> Stored:
        """A parameter that is not read yet."""
        return self._items[name]

    def blank(self, name: str) -> Tensor:
        """A parameter's shape, strides and dtype, on the meta device; nothing is read."""
        return self._items[name].blank

    def derive(self, new: str, name: str, change: Change) -> None:
        """`new` is `change(name)`, computed at each reading; the change must work on the meta device."""
        self._items[new] = self._items[name].changed(change)

    def put_away(self, name: str, tensor: Tensor) -> None:
        """A parameter that a pass made: a large one goes to a temporary file, not to memory."""
        self[name] = self.hold(tensor)

    def hold(self, tensor: Tensor) -> Stored:
        """The same of a part of a parameter, which has no name of its own."""
        large = tensor.nbytes >= mmap.ALLOCATIONGRANULARITY
        return self._scratch.keep(tensor) if large else Stored(tensor)

    def stack(self, new: str, parts: Sequence[str | Tensor]) -> None:
        """`new` is these parameters (or tensors) one below the other, put together at each reading."""
        stored = [self._items[p] if isinstance(p, str) else Stored.of(p) for p in parts]
        self._items[new] = Stacked.rows(stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as they are written."""
        return sum(item.nbytes for item in self._items.values())


def stand_in(shape: torch.Size) -> Tensor:
    """A float32 tensor that takes no memory until somebody writes to it; it holds nothing."""
    return torch.empty(shape, dtype=torch.float32)


def reading(stored: Mapping[Tensor, Stored]) -> AbstractContextManager[Any]:
    """Within it, a module computes with what is stored for its stand-ins."""
    return _Reading(stored) if stored else nullcontext()


class _Reading(TorchDispatchMode):
    """Within it, an operator that is given a stand-in computes with what is stored for it."""

    def __init__(self, stored: Mapping[Tensor, Stored]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored = stored

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _value(self, tensor: Tensor) -> Tensor:
        found = self.stored.get(tensor)  # tensors are keys by identity
        return tensor if found is None else found.read()
