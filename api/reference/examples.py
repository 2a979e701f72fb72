"""What the demo's models are shown to do, and what decides whether they did: an answer, a function, a key in a long
text, an edit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from accel.reference import tasks
from accel.reference.functions import body, completes

KEY_PROMPT = 1000  # tokens, of the bundled model
SENTENCES = 162  # 1,500 tokens of SmolLM2
_FUNCTION = '''def last_line(text):
    """Return the last line of a text."""'''
_EVEN = '''def is_even(number):
    """Return whether a number is even."""'''
_TOTAL = """def total(items):
    result = 0
    for item in items:
        result += item.price
    return result
"""
_KEY = "The pass key is 7391. Remember it. 7391 is the pass key."
NOTES = (
    "The library opens at nine in the morning.", "Rain fell on the hills all afternoon.",
    "The baker sells bread and cakes on the square.", "A train leaves for the coast every hour.",
    "The garden has apple trees and a small pond.", "Children play football behind the school.",
    "The museum shows old maps of the city.", "In winter the lake freezes for some weeks.",
    "The farmer keeps goats and a few hens.", "Fishing boats come back before sunset.",
)  # fmt: skip
_HEAD = "[server]\n"
_SETTINGS = """host = "127.0.0.1"
port = 8080
workers = 4
timeout = 30

[logging]
level = "info"
file = "server.log"
rotate = true

[cache]
size = 256
folder = "/var/cache"
"""


@dataclass(frozen=True)
class Example:
    """A prompt, and the exact text that should follow; none: any that makes the prompt a function which parses.

    message: what a person asks, which the model's chat template puts before the prompt; the answer begins with that.
    """

    name: str
    about: str
    prompt: str
    new_tokens: int
    expected: str = ""
    message: str = ""

    def shown(self, text: str) -> str:
        """What the model wrote, without what comes after the answer."""
        return (
            text[: len(self.expected)]
            if self.expected
            else body(self.prompt, text).strip("\n") or text
        )

    def verdict(self, text: str) -> str:
        """Whether the text is what it should be, in a few words."""
        if self.expected:
            return "right" if text.startswith(self.expected) else "wrong"
        return "parses" if completes(self.prompt, text) else "does not parse"


def bundled() -> list[Example]:
    """Of the bundled model, which was trained on such prompts."""
    key, number = tasks.make("pass_key", random.Random("demo"), KEY_PROMPT)
    edit = f"# before\n{_TOTAL}\n\n# after, result becomes output\n"
    return [
        Example("function", "completes a function", _FUNCTION, 64),
        Example("key", f"finds a key in a prompt of {KEY_PROMPT} tokens", key, 8, number),
        Example("edit", "applies an edit", edit, 56, _TOTAL.replace("result", "output")),
    ]


def smollm2() -> list[Example]:
    """Of SmolLM2-135M-Instruct."""
    rng = random.Random("key")
    notes = [rng.choice(NOTES) for _ in range(SENTENCES)]
    notes.insert(SENTENCES // 2, _KEY)
    hidden = "There is a pass key hidden in this text. Find it and remember it."
    edit = (
        f"Here is a file:\n\n```toml\n{_HEAD}{_SETTINGS}```\n\nWrite it again with the port 9090."
    )
    return [
        Example(
            "chat", "answers a question", "", 24, "The capital of France is Paris.",
            "What is the capital of France?",
        ),
        Example("function", "completes a function", _EVEN, 24, "\n    return number % 2 == 0\n"),
        Example(
            "key", f"finds a key among {SENTENCES} sentences", "", 24, "The pass key is 7391.",
            f"{hidden}\n\n{' '.join(notes)}\n\nWhat is the pass key?",
        ),
        Example(
            "edit", "applies an edit", f"```toml\n{_HEAD}", 88, _SETTINGS.replace("8080", "9090"), edit,
        ),
    ]  # fmt: skip
