"""The grammar of a reply that has to hold calls, or whose calls have to follow their schemas: the family's own syntax
around each schema, in llguidance's Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from accel.ir.errors import InputError
from accel.runtime.decode.schema_limits import OPTIONS, check_schema
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms import Marks, Tool, literal
from accel.runtime.serve.reply.machine import Reading

_NOTES = {"$comment", "default", "description", "examples", "title"}
_ANY = r"/(.|\n)*/"


def grammar_of(
    reading: Reading, *, required: bool, several: bool, answer: StructuredOutputsParams | None
) -> StructuredOutputsParams:
    """What a reply has to be.

    Args:
        reading: its `tools` are those that may be called.
        required: there is a call, and nothing but calls behind the reasoning.
        several: there may be more calls than one.
        answer: what an answer that is no call has to be.

    Raises:
        InputError: the family's form cannot hold a tool's schema.
    """
    marks = Marks(reading.marks)
    lines = list[str]()
    calls = answers = ""
    if reading.family is not None and reading.tools:
        calls = _calls(reading, reading.family, marks, several, lines)
    if not required:
        answers = _answers(reading, answer, calls, marks, lines)
    body = " | ".join(one for one in (calls, answers) if one)
    return StructuredOutputsParams(
        grammar="\n".join([f"start: {_thoughts(reading, marks, lines)}({body})", *lines])
    )


def _calls(reading: Reading, family: Family, marks: Marks, several: bool, lines: list[str]) -> str:
    """The name of the rule for all calls of a reply, which `lines` get with those that it names."""
    form = family.form
    for tool in reading.tools:
        _check_tokens(tool, reading.tokenizer.added)
        check_schema(tool.schema)
    rules = [form.rule(tool, marks) for tool in reading.tools]
    lines += form.rules
    lines += [f"call{i}: {rule}" for i, rule in enumerate(rules)]
    lines.append("call: " + " | ".join(f"call{i}" for i in range(len(rules))))
    begin, end = literal(family.begin), literal(family.end)
    opens = "" if family.bare else marks(family.open)
    inner = "call"
    if family.between and several:
        inner = f"call ({literal(family.between)} call)*"
    lines.append(f"inner: {begin} {inner} {end} {marks(family.close) if family.close else ''}")
    lines.append(f"block: {opens} inner")
    again = several and not (family.between or family.bare or family.header)
    lines.append(f"calls: block ({literal(family.apart)} block)*" if again else "calls: block")
    return "calls"


def _check_tokens(tool: Tool, added: Iterable[str]) -> None:
    """Raise InputError where a schema spells a token that counts as itself only: where but one text may follow,
    llguidance asks for it in the fewest tokens, and then does not take that one.
    """
    left: list[Any] = [tool.schema]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            left += [*one, *(value for key, value in one.items() if key not in _NOTES)]
        elif isinstance(one, list):
            left += one
        elif isinstance(one, str) and (found := next((t for t in added if t in one), None)):
            raise InputError(
                f"{tool.name}: its schema holds {found!r}, which is a token of its own in this model's vocabulary, so "
                "no call can be held to it; leave it out"
            )


def _answers(
    reading: Reading,
    answer: StructuredOutputsParams | None,
    calls: str,
    marks: Marks,
    lines: list[str],
) -> str:
    """The right side of a rule for what is no call, or is text before calls."""
    family = reading.family
    if family is not None and (header := family.header) is not None:
        head = f"{marks(family.open)} {literal(header.answers)} {marks(header.close)}"
        lines.append(f"answer: {head} {_ANY if answer is None else _of_kind(answer)}")
        return "answer"
    if answer is not None:
        lines.append(f"answer: {_of_kind(answer)}")
        return "answer"
    if not calls or family is None:
        lines.append(f"answer: {_ANY}")
        return "answer"
    if family.open in reading.marks and not family.bare:
        lines.append(f"answer: {_ANY} calls?")
        return "answer"
    opens = re.escape(family.open).replace("/", r"\/")
    plain = rf"{_ANY} & ~/(.|\n)*{opens}(.|\n)*/"
    if family.bare:
        lines.append(rf"ANSWER: {plain} & ~/\s*{re.escape(family.bare)}(.|\n)*/")
        return "ANSWER"
    if family.apart or not family.between:
        raise InputError(
            f"{family.open} is no token of this model's vocabulary, so calls of tools that are strict can be asked for "
            'with tool_choice "required" only'
        )
    lines += [f"ANSWER: {plain}", f"before[suffix={literal(family.open)}]: {_ANY}"]
    return "ANSWER | before inner"


def _of_kind(answer: StructuredOutputsParams) -> str:
    """It as the right side of a rule."""
    if answer.kind == "json":
        schema: Any = json.loads(answer.source)
        check_schema(schema)
        if not isinstance(schema, dict):  # true or false
            schema = {"allOf": [schema]}
        schema["x-guidance"] = {**OPTIONS, "whitespace_flexible": not answer.disable_any_whitespace}
        return f"%json {json.dumps(schema)}"
    if answer.kind == "regex":
        slashes = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", answer.source, flags=re.DOTALL)
        return "/" + slashes.replace("\n", "\\n") + "/"
    return f"%lark {{\n{answer.source}\n}}"


def _thoughts(reading: Reading, marks: Marks, lines: list[str]) -> str:
    """What may come before all else: reasoning, to its end where the prompt has begun it."""
    thinking, family = reading.thinking, reading.family
    if thinking is None and family is not None and (header := family.header) is not None:
        end, again = header.ends[0], f"{marks(header.opens[0])} {literal(header.again)}"
        thought = f"{_ANY} {marks(end)}"
        if end not in reading.marks:
            lines.append(f"thought[suffix={literal(end)}]: {_ANY}")
            thought = "thought"
        head = f"{marks(family.open)} {literal(header.thinks)} {marks(header.close)}"
        lines.append(f"thoughts: {head} {thought} {again}")
        return "thoughts? "
    if thinking is None:
        return ""
    if thinking.close in reading.marks:
        lines.append(f"thoughts: {_ANY} {marks(thinking.close)} SPACE?")
    else:
        lines.append(f"thoughts: thought SPACE?\nthought[suffix={literal(thinking.close)}]: {_ANY}")
    lines.append(r"SPACE: /\s+/")
    return "thoughts " if reading.begun else f"({marks(thinking.open)} thoughts)? "
