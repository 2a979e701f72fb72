"""Errors that a user can act on: each names the thing, the place, the nearest valid name and the next step.

An option stands as Python has it, `name=value` (… for a value of the user's choice); the command line puts its own in
the place of that.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class AccelError(Exception):
    """Base class of all errors that accel raises on purpose. Its text is one line."""

    def __init__(self, text: str = ""):
        super().__init__(re.sub(r"\s*[\r\n]+\s*", " ", text))


class CaptureError(AccelError):
    """The model cannot be captured, or its kind is not supported."""


class RecipeError(AccelError):
    """A recipe has an unknown name, a conflict, or a method that does not support the model."""


class PassError(AccelError):
    """A pass did not find a required pattern, or does not support the model."""


class TextError(AccelError):
    """The text of a program is invalid: with line, column and the expected input."""


class LoweringError(AccelError):
    """An operator has no lowering for the target."""


class Miscompiled(PassError, LoweringError):
    """A numeric check failed: the program differs from the model. This is a bug in accel."""


class ArtifactError(AccelError):
    """An artifact is missing, damaged, newer than this version, or unsafe."""


class SavedSessionError(AccelError):
    """A saved session is missing, cut, damaged, of another version, model or recipe, or too large for the model."""


class StorageError(AccelError):
    """The file system has no room, or no file, for the part of a session's state that lies in mapped files."""


class OutOfMemoryError(AccelError, MemoryError):
    """Memory ran out in a call of the model; a smaller one may succeed."""


class InputError(AccelError, ValueError):
    """A prompt, token or option is out of range."""


class ExtraError(AccelError, ImportError):
    """What was asked for needs packages of an extra that is not installed."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of packages that only an extra installs. Raises ExtraError where one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "accel"):
            raise
        raise ExtraError(
            f"this needs the package {package}, which is not installed; it comes with accel's extra '{name}': "
            f"in a checkout of accel, pip install -c constraints.txt '.[{name}]'"
        ) from error


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """`kind 'name' does not exist; did you mean 'near'?`, or with the list of names if none is near."""
    names = sorted(known)
    longest = max(map(len, names), default=0)
    close = len(name) <= 3 * longest  # a longer one is near none, and costs much to compare
    near = difflib.get_close_matches(name, names, n=1) if close else []
    name = name if len(name) <= 80 else f"{name[:77]}..."
    if near:
        return f"{kind} '{name}' does not exist; did you mean '{near[0]}'?"
    return f"{kind} '{name}' does not exist; known: {', '.join(names) or 'none'}"


def shown(value: object) -> str:
    """A value that a user gave, as an error names it: cut where it is long; Python prints no number of thousands of
    digits.
    """
    try:
        text = repr(value)
    except Exception:  # of such a number, or whatever an object's own repr raises
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= 80 else f"{text[:77]}..."
