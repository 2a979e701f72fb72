"""Weights that a checkpoint holds as codes of few bits, and the float weights that the codes stand for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accel.ir.scratch import spare
from accel.ir.weights import Experts, Pages, Stacked, Stored, multiplied


@dataclass(frozen=True)
class Levels:
    """Numbers [N,G] in two levels: `coarse` [N,G/S] float16, one of S numbers, times `fine` [N,G] of a byte."""

    coarse: Tensor
    fine: Tensor

    def numbers(self) -> Tensor:
        """The products, float32 [N,G]."""
        return multiplied(self.coarse, self.fine)


@dataclass(frozen=True)
class Codes:
    """A weight [N,K] in groups of columns: (q - zero) * scale + offset, all of a number's row and group.

    q [N,K] uint8, below 2^bits; scales [N,G] float32; zeros [N,G] uint8. `groups` [K]: the group of each
    column, where it is not column // group. offsets [N,G] float32, where they are not 0. scale_levels and
    offset_levels: the same numbers where they lie in two levels.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int
    groups: Tensor | None = None
    offsets: Tensor | None = None
    scale_levels: Levels | None = None
    offset_levels: Levels | None = None

    def weight(self) -> Tensor:
        """The float32 weight [N,K]."""
        columns, groups = self.q.shape[1], self.groups
        if groups is None and columns == self.group * self.scales.shape[1]:
            blocks = self.q.float().unflatten(1, (-1, self.group))
            blocks.sub_(self.zeros.unsqueeze(2)).mul_(self.scales.unsqueeze(2))
            if self.offsets is not None:
                blocks.add_(self.offsets.unsqueeze(2))
            whole: Tensor = blocks.flatten(1)
            return whole
        if groups is None:
            groups = torch.arange(columns) // self.group
        weight = (self.q.float() - self.zeros[:, groups].float()) * self.scales[:, groups]
        return weight if self.offsets is None else weight + self.offsets[:, groups]

    @classmethod
    def rows(cls, parts: Sequence[Codes]) -> Codes:
        """Weights of one layout, one below the other."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        q, scales, zeros = (
            torch.cat(column)
            for column in zip(*((p.q, p.scales, p.zeros) for p in parts), strict=True)
        )
        known = [p.offsets for p in parts if p.offsets is not None]
        return cls(
            q, scales, zeros, first.bits, first.group, first.groups, torch.cat(known) if known else None,
            _rows([p.scale_levels for p in parts]), _rows([p.offset_levels for p in parts]),
        )  # fmt: skip


def _rows(parts: Sequence[Levels | None]) -> Levels | None:
    """Levels one below the other, where all have some."""
    known = [p for p in parts if p is not None]
    if len(known) < len(parts):
        return None
    return Levels(torch.cat([p.coarse for p in known]), torch.cat([p.fine for p in known]))


@dataclass(frozen=True, eq=False, kw_only=True)
class Computed(Stored):
    """A float32 weight that is computed at its first reading and kept in a temporary file, unless the disk is nearly
    full; `source` only shows its shape.
    """

    pages: Pages
    computed: list[Stored] = field(default_factory=list)  # shared by all that are made of it

    def _value(self) -> Tensor:
        shape = self.source.shape
        if not self.computed:
            if not spare(self.source.nbytes):
                return torch.cat(list(self._parts()))
            self.computed.append(self.pages.keep_parts(shape, torch.float32, self._parts()))
        return self.computed[0].source

    def _parts(self) -> Iterator[Tensor]:
        """The weight, some rows after others."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class Made(Computed):
    """A weight that `make` computes."""

    make: Callable[[], Tensor]

    @classmethod
    def of_shape(cls, shape: Sequence[int], make: Callable[[], Tensor], pages: Pages) -> Made:
        """A weight that `make` computes from tensors of mapped files."""
        return cls(source=torch.empty(*shape, device="meta"), pages=pages, make=make)

    def _parts(self) -> Iterator[Tensor]:
        yield self.make()


@dataclass(frozen=True, eq=False, kw_only=True)
class Coded(Computed):
    """A weight [N,K] that lies as codes; its value is the float32 weight. `pieces`: the codes of some rows after
    others. `form`: weights of one form may be stacked and stay codes.
    """

    pieces: Callable[[], Iterable[Codes]]
    form: Hashable

    @classmethod
    def of_shape(
        cls, shape: Sequence[int], codes: Callable[[], Codes], form: Hashable, pages: Pages
    ) -> Coded:
        """A weight of which `codes` reads the codes from mapped files, all at once."""
        return cls.in_pieces(shape, lambda: [codes()], form, pages)

    @classmethod
    def in_pieces(
        cls,
        shape: Sequence[int],
        pieces: Callable[[], Iterable[Codes]],
        form: Hashable,
        pages: Pages,
    ) -> Coded:
        """The same where the codes of some rows can be read alone."""
        return cls(source=torch.empty(*shape, device="meta"), pages=pages, pieces=pieces, form=form)

    def codes(self) -> Codes:
        """The codes of all rows."""
        return Codes.rows(list(self.pieces()))

    @property
    def layout(self) -> Hashable:
        return self.form

    def _parts(self) -> Iterator[Tensor]:
        return (piece.weight() for piece in self.pieces())


def codes_of(stored: Stored) -> Codes | None:
    """The codes of a weight as it lies, or of such weights stacked; none where it is something else."""
    if stored.changes:
        return None
    if isinstance(stored, Coded):
        return stored.codes()
    if isinstance(stored, Stacked) and len({part.layout for part in stored.parts}) == 1:
        parts = [codes_of(part) for part in stored.parts]
        known = [part for part in parts if part is not None]
        return Codes.rows(known) if len(known) == len(parts) else None
    return None


def expert_codes(stored: Stored) -> list[Codes] | None:
    """The codes of each expert [N,K] of a weight as it lies; none where some expert has none."""
    if not isinstance(stored, Experts) or stored.changes:
        return None
    found = [codes_of(expert) for expert in stored.experts]
    known = [codes for codes in found if codes is not None]
    return known if len(known) == len(found) else None


def holds_codes(stored: Stored) -> bool:
    """Whether a weight lies as codes, or is made of such."""
    if isinstance(stored, Stacked):
        return any(holds_codes(part) for part in stored.parts)
    if isinstance(stored, Experts):
        return any(holds_codes(expert) for expert in stored.experts)
    return isinstance(stored, Coded)
