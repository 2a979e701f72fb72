"""What the bundled model is shown to do, and what decides whether it did: a function, a key in a long text, an edit."""

from __future__ import annotations

import random
from dataclasses import dataclass

from accel.reference import tasks
from accel.reference.functions import body, completes

KEY_PROMPT = 1000  # tokens
_FUNCTION = '''def last_line(text):
    """Return the last line of a text."""'''
_TOTAL = """def total(items):
    result = 0
    for item in items:
        result += item.price
    return result
"""


@dataclass(frozen=True)
class Example:
    """A prompt, and the exact text that should follow; none: any that makes the prompt a function which parses."""

    name: str
    about: str
    prompt: str
    new_tokens: int
    wanted: str = ""

    def shown(self, text: str) -> str:
        """What the model wrote, without what comes after the answer."""
        return (
            text[: len(self.wanted)] if self.wanted else body(self.prompt, text).strip("\n") or text
        )

    def verdict(self, text: str) -> str:
        """Whether the text is what it should be, in a few words."""
        if self.wanted:
            return "right" if text.startswith(self.wanted) else "wrong"
        return "parses" if completes(self.prompt, text) else "does not parse"


def examples() -> list[Example]:
    key, number = tasks.make("pass_key", random.Random("demo"), KEY_PROMPT)
    edit = f"# before\n{_TOTAL}\n\n# after, result becomes output\n"
    return [
        Example("function", "completes a function", _FUNCTION, 64),
        Example("key", f"finds a key in a prompt of {KEY_PROMPT} tokens", key, 8, number),
        Example("edit", "applies an edit", edit, 56, _TOTAL.replace("result", "output")),
    ]
