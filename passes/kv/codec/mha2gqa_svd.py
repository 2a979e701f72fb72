"""Effectively Compress KV Heads for LLM (arXiv:2406.07056): neighbouring KV heads share one, in the directions that
their keys and values take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from accel.ir.axis import option
from accel.ir.errors import PassError
from accel.ir.tables import Rows, Sizes, Tables
from accel.passes.kv.codec import At, Base, Layout, Storage
from accel.passes.kv.codec._principal import basis_of, principal


@dataclass(frozen=True)
class Mha2gqaSvd(Tables, Base):
    """`heads`: so many neighbouring KV heads, t, are stored as one of the same width D: their t D numbers in the first
    D right singular vectors of the activations of a text. Keys are stored before RoPE, which no basis of several heads
    commutes with. The heads must be a multiple of t.

    The paper removes heads from the weights, and fine-tunes the model behind that: `accel-compile train mha2gqa` makes
    such a model, which needs no codec, and `train distillspec` tunes it.
    """

    heads: int = option(2, least=1, most=64)
    key: ClassVar[str] = "mha2gqa-svd"
    error = 8.0  # of random weights, whose heads have no common directions
    others: ClassVar[tuple[Mapping[str, Any], ...]] = ({"heads": 1}, {"heads": 4})
    small: ClassVar[Mapping[str, Any]] = {"heads": 2}

    def sizes(self, width: int, heads: int) -> Sizes:
        """Raises PassError where the heads are no multiple."""
        if heads % self.heads:
            raise PassError(
                f"kv.codec.mha2gqa-svd: heads is {self.heads}, but a layer of this model has {heads} KV heads; give a "
                f"divisor of {heads}, or use kv.codec = 'kv-int8'"
            )
        size = (heads // self.heads, self.heads * width, width)
        return {"key_basis": size, "value_basis": size}

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Tensor]]:
        """The right singular vectors [G/t,t D,D] of all tokens' keys, and of their values."""

        def checked() -> Iterator[Rows]:
            for row in rows:
                for x in row.layers.values():
                    self.sizes(x.values.shape[3], x.values.shape[1])
                yield row

        found = principal(checked(), self.heads)
        return {
            i: {n: x[..., : x.shape[-1] // self.heads].contiguous() for n, x in of.items()}
            for i, of in found.items()
        }

    @property
    def storage(self) -> Storage:
        return Storage(together=True, unrotated=True)

    def parts(self, at: At) -> Layout:
        return {"": ("float32", (at.width // self.heads,))}

    def encode(self, at: At, x: Tensor) -> dict[str, Tensor]:
        return {"": _times(x, basis_of(at))}

    def decode(self, at: At, parts: Mapping[str, Tensor]) -> Tensor:
        return _times(parts[""], basis_of(at).mT)

    def within(self, at: At, x: Tensor, back: Tensor) -> Tensor:
        """What is lost has no part in the directions that are stored, and what is read no part outside them."""
        basis = basis_of(at)
        lost = _times(x - back, basis).norm(dim=-1)
        outside = (back - _times(_times(back, basis), basis.mT)).norm(dim=-1)
        right: Tensor = (lost + outside) <= 1e-4 * x.norm(dim=-1) + 1e-30
        return right


def _times(x: Tensor, matrices: Tensor) -> Tensor:
    """x [...,n m] by n matrices [n,m,k], each its own m numbers -> [...,n k]."""
    parts = x.unflatten(-1, [matrices.shape[0], matrices.shape[1]])
    found: Tensor = (parts[..., None, :] @ matrices).flatten(-3)
    return found
