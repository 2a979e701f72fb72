"""The tokens of a reply -> its parts.

A marker that is a token of its own in the vocabulary counts as that token only: spelt in other tokens it is text. Any
other marker counts as its text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from accel.runtime.inputs.text import Tokenizer
from accel.runtime.serve.reply.family import Family, Header, Thinking
from accel.runtime.serve.reply.forms import Begin, End, NoCall, Reader, Step, Tool
from accel.runtime.serve.reply.parts import Finish, Part, Reasoning, Text, ToolCall
from accel.runtime.serve.request import Event, Usage

_LETTERS = string.ascii_letters + string.digits
_ID_SIZE = 24


@dataclass(frozen=True)
class Reading:
    """How replies to one request are read. `family`: None where no calls are looked for; `begun`: the prompt has
    opened the reasoning.
    """

    tokenizer: Tokenizer
    family: Family | None = None
    thinking: Thinking | None = None
    tools: Sequence[Tool] = ()
    begun: bool = False

    @property
    def marks(self) -> dict[str, int]:
        """The markers that are tokens of their own, with their ids."""
        texts = list[str]()
        if self.family is not None:
            texts += self.family.markers
        if self.thinking is not None:
            texts += [self.thinking.open, self.thinking.close]
        added = self.tokenizer.added
        return {text: added[text] for text in texts if text in added}


class Machine:
    """Reads one reply."""

    def __init__(self, reading: Reading):
        self._reading = reading
        self._family, self._thinking = reading.family, reading.thinking
        self._tools = {tool.name: tool for tool in reading.tools}
        self._marks = reading.marks
        self._names = {number: text for text, number in self._marks.items()}
        family, thinking = reading.family, reading.thinking
        self._header = header = family.header if family else None
        self._head: str | None = None  # of the header that is open
        heads = (*header.opens, header.close, *header.ends) if header else ()
        opens = [one.open for one in (family, thinking) if one is not None]
        self._in_answers = self._spelt(*opens, *heads)
        self._in_thoughts = self._spelt(thinking.close if thinking else "", *heads)
        self._in_calls = self._spelt(*family.form.marks) if family else ()
        self._thinks = self._strips = reading.begun
        self._reader: Reader | None = None  # of the block of calls that is open
        self._opener = ""  # what opened it, as text, behind the space before it
        self._buffer = ""  # may be the beginning of a marker
        self._space = ""  # means nothing where a call or the end of reasoning follows
        self._first = True  # nothing of the answer came
        self._said = False  # there is text
        self._calls = 0
        self._call = ("", "")  # its id and name

    def take(self, event: Event, usage: Usage) -> Iterator[Part]:
        """The parts that a token makes certain; `usage`: of the reply until then."""
        yield from self._text(event.text)
        if event.mark and (marker := self._names.get(event.token)) is not None:
            yield from self._flush()
            yield from self._marker(marker)
        if event.finish is not None:
            yield from self._flush()
            if self._reader is None or not self._reader.begun or event.finish == "stop":
                yield from self._close()  # a call that was cut off stays as it is
            if self._space and not self._thinks and not self._strips:
                yield Text(self._space)
            called = self._calls and event.finish == "stop"
            yield Finish("tool_calls" if called else event.finish, usage)

    def _text(self, text: str) -> Iterator[Part]:
        """Text in which markers may stand that are no tokens of their own."""
        self._buffer += text
        while True:
            end, marker = len(self._buffer), ""
            if marks := self._looked_for:
                places = [(i, m) for m in marks if (i := self._buffer.find(m)) >= 0]
                end, marker = min(places, default=(end, ""))
            if marks and not marker:
                end -= max(_overlap(self._buffer, m) for m in marks)
            sure, self._buffer = self._buffer[:end], self._buffer[end:]
            if sure:
                yield from self._plain(sure)
            elif marker:
                self._buffer = self._buffer[len(marker) :]
                yield from self._marker(marker)
            else:
                return

    @property
    def _looked_for(self) -> Sequence[str]:
        """The markers that count as text where the reply stands. A reader finds the end of its block itself: it knows
        what is within a string.
        """
        if self._reader is not None:
            return self._in_calls
        return self._in_thoughts if self._thinks else self._in_answers

    def _spelt(self, *texts: str) -> tuple[str, ...]:
        """Those of the markers that are no tokens of their own."""
        return tuple(text for text in texts if text and text not in self._marks)

    def _flush(self) -> Iterator[Part]:
        """What might have been a marker is none."""
        while self._buffer:
            text, self._buffer = self._buffer, ""
            yield from self._plain(text)
            yield from self._text("")

    def _marker(self, marker: str) -> Iterator[Part]:
        family, thinking, reader = self._family, self._thinking, self._reader
        header = self._header
        if header and marker in (*header.opens, *header.ends):
            yield from self._close()
            self._head = f"{self._head or ''} " if marker in header.opens else None
            self._thinks, self._strips, self._space = False, True, ""
        elif header and self._head is not None and marker == header.close:
            yield from self._message(header, self._head)
        elif thinking and self._thinks and marker == thinking.close:
            self._thinks, self._strips, self._space = False, True, ""
        elif thinking and not self._thinks and reader is None and marker == thinking.open:
            self._thinks, self._strips, self._space = True, True, ""
        elif family and not self._thinks and marker == family.open:
            yield from self._close()
            self._open(marker)
        elif family and reader is not None and marker == family.close:
            yield from self._close(marker)
        elif family and reader is not None and marker in family.form.marks:
            yield from self._read(lambda: reader.mark(marker))
        elif text := self._as_text(marker):
            yield from self._plain(text)

    def _message(self, header: Header, head: str) -> Iterator[Part]:
        """A header is whole: what follows is what it says."""
        self._head = None
        _, called, rest = head.partition(header.calls)
        if not called:
            self._thinks = header.thinks in head.split()
            self._space = "\n\n" if self._said and not self._thinks else ""
            return
        self._open(header.close)
        reader = self._reader
        assert reader is not None
        yield from self._read(lambda: reader.push(re.split(r"[\s<]", rest, maxsplit=1)[0]))
        if self._reader is not None:
            yield from self._read(lambda: reader.mark(header.close))

    def _as_text(self, marker: str) -> str:
        return "" if self._marks.get(marker) in self._reading.tokenizer.special else marker

    def _plain(self, text: str) -> Iterator[Part]:
        """Text without markers, of whatever the reply is at."""
        if self._head is not None:
            self._head += text
            return
        if (reader := self._reader) is not None:
            yield from self._read(lambda: reader.push(text))
            if reader.ended is not None:
                marker, rest = reader.ended
                self._buffer = rest + self._buffer
                yield from self._marker(marker)
            return
        text = self._space + (text.lstrip() if self._strips else text)
        family = self._family
        if family and family.bare and self._first and not self._thinks:
            if (bare := text.lstrip()).startswith(family.bare):
                self._open("")
                yield from self._plain(bare)
                return
        sure = text.rstrip() if family or self._thinks else text
        self._space = text[len(sure) :]
        if sure:
            self._strips = False
            self._first = self._first and self._thinks
            self._said = self._said or not self._thinks
            yield Reasoning(sure) if self._thinks else Text(sure)

    def _open(self, marker: str) -> None:
        """A block begins, with a marker or without."""
        assert self._family is not None
        header = self._header
        ends = (*header.opens, *header.ends) if header else (self._family.close, self._family.open)
        ends = self._spelt(*ends)
        self._reader = self._family.form.reader(self._tools, ends, not marker)
        self._opener, self._space = self._space + self._as_text(marker), ""

    def _close(self, marker: str = "") -> Iterator[Part]:
        """The block that is open, if one is, ends here."""
        if (reader := self._reader) is None:
            return
        yield from self._read(reader.close, marker)
        if self._reader is not None:
            self._reader, self._strips, self._first = None, True, False

    def _read(self, steps: Callable[[], Iterator[Step]], behind: str = "") -> Iterator[Part]:
        """What the reader makes of something. What is no call is text, with what opened it and is `behind` it."""
        reader = self._reader
        assert reader is not None
        try:
            for step in steps():
                if isinstance(step, Begin):
                    self._call = (_id(self._family.id_size if self._family else 0), step.name)
                    self._calls += 1
                    self._opener = ""
                    yield ToolCall(self._calls - 1, *self._call)
                elif not isinstance(step, End) and step.text:
                    yield ToolCall(self._calls - 1, *self._call, step.text)
        except NoCall:
            self._reader, self._first = None, False
            if text := self._opener + reader.raw + self._as_text(behind):
                yield from self._plain(text)


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of a text that a marker may begin with."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _id(size: int) -> str:
    letters = "".join(secrets.choice(_LETTERS) for _ in range(size or _ID_SIZE))
    return letters if size else f"call_{letters}"
