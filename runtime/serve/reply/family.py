"""What a family of models writes calls and reasoning as: a file for each in `families/` and `reasoning/`.

A chat template shows its family: each declares texts that its templates hold. The file name is the family's name.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from accel.runtime.serve.reply.forms import Form


@dataclass(frozen=True)
class Header:
    """What the messages of a reply begin with, where each says what it is: `opens` header `close` text `ends`.

    Attributes:
        thinks: a word in the header of reasoning.
        answers: the header of an answer.
        calls: in the header of a call, what stands before the tool's name.
        again: text between the marker that begins a further message and the one that begins its header.
    """

    opens: tuple[str, ...]
    close: str
    ends: tuple[str, ...]
    thinks: str
    answers: str
    calls: str
    again: str


@dataclass(frozen=True)
class Family:
    """How calls are written: blocks `open begin call (between call)* end close`.

    Attributes:
        signs: texts that the chat template holds, all of them; of several families the one with most wins.
        form: what a call is.
        open, close: markers. One that is a token of its own in the vocabulary counts as that token only, any other
            as its text. close "": a block goes on to the next one, or the end.
        begin, end: text of a block around its calls.
        between: text between calls of one block; "": a block has one call.
        apart: text between blocks.
        bare: what a block without `open` begins with, where the reply begins with it too, and is one block; "": each
            has `open`.
        header: of messages, where a block is one; `open` is the last of its `opens` then.
        id_size: characters of a call's id, where templates ask for so many; 0: any.
    """

    signs: tuple[str, ...]
    form: Form
    open: str
    close: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    apart: str = ""
    bare: str = ""
    id_size: int = 0
    header: Header | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        header = self.header
        more = (*header.opens, header.close, *header.ends) if header else ()
        return tuple(text for text in (self.open, self.close, *self.form.marks, *more) if text)


@dataclass(frozen=True)
class Thinking:
    """How reasoning is written: between two markers, of which the prompt may have written the first."""

    signs: tuple[str, ...]
    open: str
    close: str


def family_of(template: str) -> Family | None:
    """The one whose signs a chat template holds."""
    found: Family | None = _chosen("families", template)
    return found


def thinking_of(template: str) -> Thinking | None:
    """The one whose signs a chat template holds."""
    found: Thinking | None = _chosen("reasoning", template)
    return found


def families() -> dict[str, Family]:
    """All, by name."""
    return {name: module.FAMILY for name, module in _modules("families").items()}


def _chosen(folder: str, template: str) -> Any:
    known = [module.FAMILY for module in _modules(folder).values()]
    found = [one for one in known if all(sign in template for sign in one.signs)]
    return max(found, key=lambda one: sum(map(len, one.signs)), default=None)


@cache
def _modules(folder: str) -> dict[str, ModuleType]:
    package = f"{__package__}.{folder}"
    names = [m.name for m in pkgutil.iter_modules(import_module(package).__path__)]
    return {name: import_module(f"{package}.{name}") for name in sorted(names)}
