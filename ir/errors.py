"""What goes wrong, in words a user can act on: the thing, the place, the near name, the next act."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AccelError(Exception):
    """Every error that accel raises on purpose; catch this one."""


class CaptureError(AccelError):
    """The model cannot be captured, or is not a model that accel can take."""


class RecipeError(AccelError):
    """A recipe names something that does not exist, clashes, or does not suit the model."""


class PassError(AccelError):
    """A pass found nothing it had to find, or changed what the program computes."""


class TextError(AccelError):
    """The text of a program cannot be read: with the line, the column and what to write there."""


class LoweringError(AccelError):
    """An operator has no form on the target."""


class Miscompiled(PassError, LoweringError):
    """A check found other numbers than the model's: a bug of accel, stopped before it did harm."""


class ArtifactError(AccelError):
    """A saved artifact is missing, damaged, newer than this version, or unsafe."""


class InputError(AccelError, ValueError):
    """A prompt, token or sampling parameter is out of range."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """`kind 'name' does not exist; did you mean 'near'?`, or the list where nothing is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"{kind} '{name}' does not exist; did you mean '{near[0]}'?"
    return f"{kind} '{name}' does not exist; known: {', '.join(names) or 'none'}"
