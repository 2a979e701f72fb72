"""Six kinds of prompts by which speculative decoding is measured, out of the standard library and the tasks beside.

code        the first lines of a file, to go on with
edit        a function, then its beginning again under another name
recall      a table and look-ups in it, one after another
repetitive  lines that differ in a number
free        prose, from documentation
copy        lines of words, then the same with one word changed

Each is a text to go on with (`prompts`), and a question that a model with a chat template is asked (`questions`).
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

from accel.reference import tasks

# No text of these was in what the bundled models were trained on (`tools/train/reference_data.py`).
FILES = ("bisect.py", "calendar.py", "csv.py", "fractions.py", "heapq.py", "queue.py", "sched.py")
LINES = 24  # of a prompt


def _source(rng: random.Random) -> str:
    name = rng.choice(FILES)
    return (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")


def _functions(text: str) -> list[str]:
    """The source of functions long enough to be worth an edit."""
    found = [
        ast.get_source_segment(text, n)
        for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.FunctionDef)
    ]
    return [f for f in found if f is not None and 8 <= f.count("\n") <= LINES]


def code(rng: random.Random) -> str:
    lines = _source(rng).splitlines(keepends=True)
    start = rng.randrange(max(1, len(lines) - 2 * LINES))
    return "".join(lines[start : start + LINES])


def edit(rng: random.Random) -> str:
    while not (found := _functions(_source(rng))):
        pass
    function = rng.choice(found)
    name = re.search(r"def (\w+)", function)
    assert name is not None
    changed = function.replace(name[1], f"new_{name[1].strip('_')}")
    return f"# before\n{function}\n\n# after\n" + "".join(changed.splitlines(keepends=True)[:2])


def recall(rng: random.Random) -> str:
    pieces = tasks.key_value(rng, LINES, LINES)
    asked = [i for i, (_, answer) in enumerate(pieces) if answer]
    return "".join(text for text, _ in pieces[: asked[3]])


def repetitive(rng: random.Random) -> str:
    name, first = rng.choice(tasks.WORDS), rng.randrange(10, 50)
    return "".join(
        f"    assert {name}({i}) == {name}_table[{i}]\n" for i in range(first, first + LINES // 2)
    )


def free(rng: random.Random) -> str:
    while (
        len(
            words := max(
                re.findall(r'"""(.*?)"""', _source(rng), re.S), key=len, default=""
            ).split()
        )
        < 60
    ):
        pass
    return " ".join(words[:60])


def copy(rng: random.Random) -> str:
    pieces = tasks.edit(rng, LINES, LINES)
    asked = [i for i, (_, answer) in enumerate(pieces) if answer]
    return "".join(text for text, _ in pieces[: asked[2]])


def _fenced(text: str) -> str:
    return f"```\n{text.rstrip()}\n```"


def _asks_code(rng: random.Random) -> str:
    begin = _fenced(code(rng))
    return f"Here is a part of a Python file. Write the functions that come after it.\n{begin}"


def _asks_edit(rng: random.Random) -> str:
    function = edit(rng).removeprefix("# before\n").split("\n\n# after\n")[0]
    name = re.search(r"def (\w+)", function)
    assert name is not None
    return f"Rename {name[1]} to new_{name[1].strip('_')} and write the whole function again.\n{_fenced(function)}"


def _asks_recall(rng: random.Random) -> str:
    pieces = tasks.key_value(rng, LINES, LINES)
    table = pieces[0][0].removeprefix("# pairs\n").removesuffix("# look up\n")
    keys = [text.rstrip(":") for text, answer in pieces[1::3] if not answer][: LINES // 2]
    return (
        f"This table gives three values for each name.\n{_fenced(table)}\n"
        f"Write the lines of these names, in this order: {', '.join(keys)}"
    )


def _asks_repetitive(rng: random.Random) -> str:
    return f"Write the next twelve lines of this.\n{_fenced(repetitive(rng))}"


def _asks_free(rng: random.Random) -> str:
    return (
        f"Explain in your own words what this text is about, and to whom it is of use.\n{free(rng)}"
    )


def _asks_copy(rng: random.Random) -> str:
    pieces = tasks.edit(rng, LINES, LINES)
    lines, _, title = pieces[0][0].partition("# copy, ")
    old, _, new = title.strip().partition(" becomes ")
    lines = lines.removeprefix("# lines\n")
    return f"Write these lines again with the word {new} in place of {old}.\n{_fenced(lines)}"


KINDS: dict[str, Callable[[random.Random], str]] = {
    "code": code, "edit": edit, "recall": recall, "repetitive": repetitive, "free": free, "copy": copy,
}  # fmt: skip


QUESTIONS: dict[str, Callable[[random.Random], str]] = {
    "code": _asks_code, "edit": _asks_edit, "recall": _asks_recall, "repetitive": _asks_repetitive,
    "free": _asks_free, "copy": _asks_copy,
}  # fmt: skip


def questions(kind: str, count: int, seed: int = 0) -> list[str]:
    """So many of a kind, for a model with a chat template."""
    rng = random.Random(f"{kind} {seed}")
    return [QUESTIONS[kind](rng) for _ in range(count)]


def prompts(kind: str, count: int, seed: int = 0) -> list[str]:
    """So many prompts of a kind."""
    rng = random.Random(f"{kind} {seed}")
    return [KINDS[kind](rng) for _ in range(count)]
