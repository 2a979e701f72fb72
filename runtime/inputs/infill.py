"""How models that learnt to fill in the middle write a text with a gap. Data: a form for each family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accel.runtime.inputs.text import Tokenizer

BEFORE, BEHIND = "before", "behind"  # the texts around the gap


@dataclass(frozen=True)
class Form:
    """The tokens of a family. `prefix`, `suffix`: before the text before the gap, and before the one behind it;
    `middle`: before what fills the gap; "" where that follows the prefix's text, which then comes last. `ends`: what
    ends the middle where the vocabulary has it, beside these; `file`: the one of them that begins another file's name
    and text.
    """

    prefix: str
    suffix: str
    middle: str = ""
    ends: tuple[str, ...] = ()
    file: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """What it is found by."""
        return tuple(mark for mark in (self.prefix, self.suffix, self.middle) if mark)

    @property
    def parts(self) -> tuple[str, ...]:
        """All of a prompt, in order."""
        if self.middle:
            return (self.prefix, BEFORE, self.suffix, BEHIND, self.middle)
        return (self.suffix, BEHIND, self.prefix, BEFORE)


FORMS = (
    Form("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    Form(  # StarCoder, Granite Code
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<reponame>", "<repo_name>", "<file_sep>"),
        "<file_sep>",
    ),
    Form(  # Qwen 2.5 Coder, CodeGemma, Granite 3.3 and 4
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|im_end|>"),
        "<|file_sep|>",
    ),
    Form(  # DeepSeek Coder
        "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>", "<|EOT|>")
    ),
    Form("[PREFIX]", "[SUFFIX]"),  # Codestral
)  # fmt: skip


def forms_of(tokenizer: Tokenizer | None) -> Iterator[tuple[Form, dict[str, int]]]:
    """The forms whose tokens a vocabulary has, with the numbers of these and of the ends that it has."""
    if tokenizer is None:
        return
    for form in FORMS:
        known = {text: tokenizer.index(text) for text in (*form.marks, *form.ends)}
        numbers = {text: number for text, number in known.items() if number is not None}
        if numbers.keys() >= {*form.marks}:
            yield form, numbers
