"""Tokens that a model's generation configuration rules out."""

from __future__ import annotations

from dataclasses import dataclass

from accel.ir.fields import Fields


@dataclass(frozen=True)
class Suppressed:
    """always: tokens that never follow. first: tokens that are not the first new one of a text."""

    always: tuple[int, ...] = ()
    first: tuple[int, ...] = ()

    def below(self, size: int) -> Suppressed | None:
        """Those of a vocabulary of `size` tokens; None: none of them."""
        always, first = (
            tuple(token for token in tokens if 0 <= token < size)
            for tokens in (self.always, self.first)
        )
        return Suppressed(always, first) if always or first else None

    def check_below(self, size: int, f: Fields) -> None:
        """Raises ArtifactError for a token outside a vocabulary of `size`."""
        for name, tokens in (("always", self.always), ("first", self.first)):
            for i, token in enumerate(tokens):
                if token >= size:
                    raise f.wrong(f"{name}[{i}]", token, f"a token id, 0..{size - 1}")
