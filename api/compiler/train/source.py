"""The model that a part is for, and the text that it is made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accel.compiler.load.source import open_source
from accel.compiler.measure import Progress, duration
from accel.compiler.over_state import over_state
from accel.compiler.part_text import Batch, example_rows, text_ids, text_rows
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError
from accel.ir.program import Program
from accel.runtime.inputs.text import Tokenizer

RowsOf = Callable[[int, int, int], Iterator[Batch]]  # tokens of a row, rows, seed
MOST_READINGS = 15  # of accel's own text: read oftener, text teaches little (arXiv:2305.16264)


@dataclass
class Source:
    """A model's folder or file, and what to make its part from. own_rows: rows of another kind than those of a text.

    progress: told (what is done, the share that is over). say: told a line.
    """

    path: Path
    tokenizer: Tokenizer | None
    text: Path | None
    progress: Progress
    say: Callable[[str], None]
    own_rows: RowsOf | None = None
    trust_remote_code: bool = False

    @cached_property
    def program(self) -> Program:
        """The model, captured, over state."""
        return self.captured(self.path)

    def captured(self, path: Path) -> Program:
        """Another model in the same way."""
        self.progress(f"load {path.name}", 0.0)
        loaded = open_source(path).load(self.trust_remote_code)
        self.progress(f"capture {path.name}", 0.0)
        return over_state(capture(loaded.model, stored=loaded.stored))

    def rows(self, length: int, rows: int, seed: int) -> Iterator[Batch]:
        """Rows of so many tokens and one more, for ever. Raises InputError."""
        if self.own_rows is not None:
            return self.own_rows(length, rows, seed)
        if self.tokenizer is None:
            raise InputError(f"{self.path} has no tokenizer for a text; give tokenizer=…")
        ids = text_ids(self.tokenizer, self.text, length)
        self._tokens: float = len(ids)
        return text_rows(ids, length, rows, seed)

    def rows_of(self, method: Any, length: int, rows: int, seed: int) -> Iterator[Batch]:
        """Rows of the method's examples, where nobody gave a text; else as `rows`."""
        examples = getattr(method, "examples", lambda _: None)(seed)
        own = self.own_rows is None and self.text is None
        if examples is None or not own or self.tokenizer is None:
            return self.rows(length, rows, seed)
        self._tokens = math.inf
        return example_rows(
            self.tokenizer, examples, text_ids(self.tokenizer, None, length), length, seed
        )

    def check_enough(self, tokens: float, minutes: float) -> None:
        """Raise InputError where accel's own text is too short for a run that reads so many tokens in all."""
        if self.own_rows is not None or self.text is not None:
            return
        if (times := tokens / self._tokens) > MOST_READINGS:
            most = minutes * MOST_READINGS / times
            raise InputError(
                f"accel's own text has {self._tokens:,.0f} tokens, and {duration(60 * minutes)} would read it "
                f"{times:.0f} times; give a longer one, text=…, or less time: minutes={most:.2g}"
            )
