"""Weights that a checkpoint holds as codes of few bits, and the float weights that the codes stand for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accel.ir.weights import Experts, Pages, Stacked, Stored


@dataclass(frozen=True)
class Codes:
    """A weight [N,K] in groups of columns: (q - zero) * scale + offset, all of a number's row and group.

    q [N,K] uint8, below 2^bits; scales [N,G] float32; zeros [N,G] uint8. `groups` [K]: the group of each
    column, where it is not column // group. offsets [N,G] float32, where they are not 0.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int
    groups: Tensor | None = None
    offsets: Tensor | None = None

    def weight(self) -> Tensor:
        """The float32 weight [N,K]."""
        groups = self.groups
        if groups is None:
            groups = torch.arange(self.q.shape[1]) // self.group
        weight = (self.q.float() - self.zeros[:, groups].float()) * self.scales[:, groups]
        return weight if self.offsets is None else weight + self.offsets[:, groups]

    @classmethod
    def rows(cls, parts: Sequence[Codes]) -> Codes:
        """Weights of one layout, one below the other."""
        q, scales, zeros = (
            torch.cat(column)
            for column in zip(*((p.q, p.scales, p.zeros) for p in parts), strict=True)
        )
        known = [p.offsets for p in parts if p.offsets is not None]
        offsets = torch.cat(known) if known else None
        return cls(q, scales, zeros, parts[0].bits, parts[0].group, parts[0].groups, offsets)


@dataclass(frozen=True, eq=False, kw_only=True)
class Made(Stored):
    """A float32 weight that is computed at each reading; `source` only shows its shape."""

    make: Callable[[], Tensor]

    @classmethod
    def of_shape(cls, shape: Sequence[int], make: Callable[[], Tensor], pages: Pages) -> Made:
        """A weight that `make` computes from tensors of mapped files."""
        return cls(source=torch.empty(*shape, device="meta"), pages=pages, make=make)

    def _value(self) -> Tensor:
        return self.make()


@dataclass(frozen=True, eq=False, kw_only=True)
class Coded(Stored):
    """A weight [N,K] that lies as codes; its value is the float32 weight. `form`: weights of one form may be
    stacked and stay codes.
    """

    codes: Callable[[], Codes]
    form: Hashable

    @classmethod
    def of_shape(
        cls, shape: Sequence[int], codes: Callable[[], Codes], form: Hashable, pages: Pages
    ) -> Coded:
        """A weight of which `codes` reads the codes from mapped files."""
        return cls(source=torch.empty(*shape, device="meta"), pages=pages, codes=codes, form=form)

    @property
    def layout(self) -> Hashable:
        return self.form

    def _value(self) -> Tensor:
        return self.codes().weight()


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
    """The codes of each expert of a weight [X,N,K] as it lies; none where some expert has none."""
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
