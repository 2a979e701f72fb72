"""Synthetic recall tasks, as text: what the bundled model is trained on and what tests may ask it.

A task is a list of pieces `(text, is_answer)`; only answers can be predicted from what precedes
them. Every line of a body is eight words (`copy`, `edit`, and the filler of `pass_key`) or a key
with three values (`key_value`). The four formats, with the answer in [brackets]:

    pass_key                        key_value
    # notes                         # pairs
    file name test line ...         name: value path line
    the pass key is 48213           file: start entry port
    ...                             ...
    # question                      # look up
    the pass key is[ 48213]         file:[ start entry port]

    copy                            edit
    # lines                         # lines
    file name test line ...         file name test line ...
    ...                             ...
    # copy                          # copy, test becomes port
    file name[ test line ...]       file name[ port line ...]

`copy` and `edit` quote the first two words of one line and ask for its other six. A prompt ends
without a space and an answer begins with one, so the two tokenise apart as they do together.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Pieces = list[tuple[str, bool]]
Task = Callable[[random.Random, int, int], Pieces]

WORDS = """
action add address after all archive arg args attr attrs back base before binary block body
buf buffer build bytes cache call called calls case change chars charset check child chunk
close closed cmd cnf code color command config content context cookie copy count create
current data day debug default dict dir doc domain done elem element empty end entry err error
errors event events exc exists exit ext extra field fields file files find first flag flags
float format found frame func fut future get getattr globals group handle handler has header
headers help host http ignore indent index info input int item items key keys kwargs last left
len length level limit line lineno lines link list loader local lock log logger long loop main
make map master match max member menu message method methods mode module modules month msg
name names new next node number obj object objects offset old only open opt option options
order other out output package params parent parse parser part parts path pattern policy port
pos prefix print process proto queue range raw read record release remove replace repr request
res resp result right root run running screen script search second section see server set
signal size sock socket source spec special stack start state stderr stdout stop str stream
string strings sys system tag target tarinfo test tests text the thread time timeout title
token top tree true tuple type types url use user val value values version wait waiter when
which widget width window write year
""".split()

LINE, CUE, VALUES = 8, 2, 3


def _lines(rng: random.Random, count: int) -> list[list[str]]:
    """`count` lines of eight different words; no two lines share their cue."""
    lines: dict[tuple[str, ...], list[str]] = {}
    while len(lines) < count:
        words = rng.sample(WORDS, LINE)
        lines.setdefault(tuple(words[:CUE]), words)
    return list(lines.values())


def _body(title: str, lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in [title, *lines])


def pass_key(rng: random.Random, lines: int, answers: int = 1) -> Pieces:
    """A five-digit number hidden between `lines` of filler, asked for `answers` times."""
    text = [" ".join(words) for words in _lines(rng, lines)]
    key = f" {rng.randrange(10_000, 100_000)}"
    text.insert(rng.randrange(len(text) + 1), f"the pass key is{key}")
    pieces = [(_body("# notes", text) + "# question\n", False)]
    for _ in range(answers):
        pieces += [("the pass key is", False), (key, True), ("\n", False)]
    return pieces


def key_value(rng: random.Random, lines: int, answers: int = 1) -> Pieces:
    """`lines` keys (256 at most) with three values each; `answers` of them are looked up."""
    keys = rng.sample(WORDS, min(lines, len(WORDS)))
    table = {key: " " + " ".join(rng.sample(WORDS, VALUES)) for key in keys}
    text = _body("# pairs", [f"{key}:{value}" for key, value in table.items()])
    pieces = [(text + "# look up\n", False)]
    for key in rng.sample(keys, min(answers, len(keys))):
        pieces += [(f"{key}:", False), (table[key], True), ("\n", False)]
    return pieces


def _quoted(line: list[str]) -> Pieces:
    cue, rest = line[:CUE], line[CUE:]
    return [(" ".join(cue), False), (" " + " ".join(rest), True), ("\n", False)]


def copy(rng: random.Random, lines: int, answers: int = 1) -> Pieces:
    """`lines` of words; one of them, and the `answers` - 1 that follow it, are completed."""
    text = _lines(rng, lines)
    start = rng.randrange(max(1, lines - answers + 1))
    pieces = [(_body("# lines", [" ".join(line) for line in text]) + "# copy\n", False)]
    for line in text[start : start + answers]:
        pieces += _quoted(line)
    return pieces


def rest(rng: random.Random, lines: int, answers: int = 1) -> Pieces:
    """As `copy`, but from the cue on all that follows in the body is the answer: up to 4 `answers` lines.

    No task of the bundled model, but of the diffusion model beside it: a long answer.
    """
    text = _lines(rng, lines)
    start = lines - rng.randrange(1, 1 + min(lines, 4 * answers))
    pieces = [(_body("# lines", [" ".join(line) for line in text]) + "# rest\n", False)]
    answer = "\n".join(" ".join(line) for line in text[start:])
    cue = " ".join(text[start][:CUE])
    return [*pieces, (cue, False), (answer.removeprefix(cue), True), ("\n", False)]


def edit(rng: random.Random, lines: int, answers: int = 1) -> Pieces:
    """As `copy`, but one word of the first asked line is replaced wherever it is quoted."""
    text = _lines(rng, lines)
    start = rng.randrange(max(1, lines - answers + 1))
    old = rng.choice(text[start][CUE:])
    new = rng.choice([word for word in WORDS if word not in text[start]])
    title = f"# copy, {old} becomes {new}\n"
    pieces = [(_body("# lines", [" ".join(line) for line in text]) + title, False)]
    for line in text[start : start + answers]:
        pieces += _quoted([*line[:CUE], *(new if word == old else word for word in line[CUE:])])
    return pieces


TASKS: dict[str, Task] = {"pass_key": pass_key, "key_value": key_value, "copy": copy, "edit": edit}

TOKENS_PER_LINE = {"pass_key": 9, "key_value": 6, "copy": 9, "edit": 9}
"""With the bundled tokeniser, where every word of `WORDS` is one token."""


def lines_for(task: str, tokens: int) -> int:
    """How many lines make a prompt of about `tokens` tokens (never more than `key_value` has)."""
    most = len(WORDS) if task == "key_value" else tokens
    return max(2, min(most, tokens // TOKENS_PER_LINE[task] - 1))


def make(task: str, rng: random.Random, tokens: int) -> tuple[str, str]:
    """One prompt of about `tokens` tokens and its exact answer."""
    pieces = TASKS[task](rng, lines_for(task, tokens), 1)
    end = next(at for at, (_, is_answer) in enumerate(pieces) if is_answer)
    return "".join(text for text, _ in pieces[:end]), pieces[end][0]
