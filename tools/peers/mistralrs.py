"""mistral.rs through its Python package, on the processor; GGUF files as they are, one row at a time.

It is given text: of as many tokens as the others' prompts, and mostly the same. It tells the time of all steps of a
call together, so each step is their mean, and every call runs the prompt too, outside the steps. Its package takes
no number of threads; its pool reads RAYON_NUM_THREADS.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

PACKAGES = ("mistralrs",)
INSTALL = "mistralrs"
VARIANTS = ()
GGUF = ("file",)
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a GGUF value
TEXT, ARRAY = 8, 9


def file_name(variant: str, context: int, batch: int) -> str:
    return ""


def sources() -> list[Path]:
    return []


def vocabulary(path: Path) -> int:
    """How many tokens a GGUF file lists."""

    def number(file: BinaryIO, kind: str) -> int:
        return int(struct.unpack(kind, file.read(struct.calcsize(kind)))[0])

    def skip(file: BinaryIO, kind: int, count: int) -> None:
        if kind in SIZES:
            file.seek(SIZES[kind] * count, os.SEEK_CUR)
        for _ in range(count if kind not in SIZES else 0):
            if kind == TEXT:
                file.seek(number(file, "<Q"), os.SEEK_CUR)
            else:
                skip(file, number(file, "<I"), number(file, "<Q"))

    with path.open("rb") as file:
        file.seek(16)
        for _ in range(number(file, "<Q")):
            name, kind = file.read(number(file, "<Q")), number(file, "<I")
            if name == b"tokenizer.ggml.tokens":
                file.seek(4, os.SEEK_CUR)
                return number(file, "<Q")
            skip(file, kind, 1)
    raise RuntimeError(f"{path} lists no tokens")


class Session:
    def __init__(self, runner: Any):
        self.runner = runner
        self.prompt: list[int] = []
        self.text = ""

    def generate(self, new: int) -> Any:
        import mistralrs

        request = mistralrs.CompletionRequest(
            prompt=self.text, model="default", max_tokens=new, temperature=0.0, ignore_eos=True
        )
        return self.runner.send_completion_request(request)

    def ready(self, prompts: list[list[int]]) -> None:
        (prompt,) = prompts
        if prompt != self.prompt:
            self.text, self.prompt = self.worded(prompt), prompt

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        self.ready(prompts)
        self.generate(1)
        return []

    def worded(self, prompt: list[int]) -> str:
        """Text of so many tokens: tokens that words make anew are cut, or repeated, until the count is right."""
        tokens = prompt
        for _ in range(50):
            text: str = self.runner.detokenize_text(tokens, False)
            again = self.runner.tokenize_text(text, False, None)
            if len(again) == len(prompt):
                return text
            tokens = (again + prompt)[: len(prompt)]
        raise RuntimeError(f"no text of {len(prompt)} tokens was found for mistral.rs")

    def decode(self, new: int) -> list[float]:
        used = self.generate(new + 1).usage
        return [used.total_completion_time_sec / new] * new

    def close(self) -> None:
        self.text = ""


class Model:
    def __init__(self, path: Path, threads: int):
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        import mistralrs

        which = mistralrs.Which.GGUF(str(path.parent), path.name)
        self.runner = mistralrs.Runner(which, prefix_cache_n=0, max_seqs=1)
        self.vocabulary = vocabulary(path)

    def session(self, batch: int, room: int) -> Session:
        if batch > 1:
            raise RuntimeError("mistral.rs is measured with one row: leave out cases with xN")
        return Session(self.runner)


def load(path: Path, variant: str, threads: int) -> Model:
    return Model(path, threads)
