"""Replies of each family are read as the calls that they hold, however they are cut; what is no call stays text; and
the grammar of a call lets nothing come but what is read as one.
"""

import json
import random
from collections.abc import Sequence

import llguidance
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher

from accel.ir.errors import InputError
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.transcript import Transcript
from accel.runtime.serve.reply.family import families, family_of, thinking_of
from accel.runtime.serve.reply.forms import Tool
from accel.runtime.serve.reply.forms.pythonic import Pythonic
from accel.runtime.serve.reply.grammar import grammar_of
from accel.runtime.serve.reply.machine import Machine, Reading
from accel.runtime.serve.reply.parts import Finish, Reasoning, Text, ToolCall
from accel.runtime.serve.request import Event, Usage

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", 'Rome "x"\n</b>']},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [Tool("weather", SCHEMA), Tool("note", NOTE)]
THINK = thinking_of("</think>")
EOS = "<|eos|>"
NAMES = sorted(families())


def byte_level(marks: Sequence[str]) -> Tokenizer:
    """Of single bytes and these."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = level, tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([EOS, *(mark for mark in marks if mark[0] == "[")])
    inner.add_tokens(
        [tokenizers.AddedToken(mark, normalized=False) for mark in marks if mark[0] == "<"]
    )
    return Tokenizer(inner.to_str().encode())


def marks_of(name: str) -> list[str]:
    return list(dict.fromkeys([*families()[name].markers, THINK.open, THINK.close]))


def spelt(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text in tokens of single bytes, whatever it spells."""
    return [i for letter in text for i in tokenizer.encode(letter)]


def read(tokenizer: Tokenizer, reading: Reading, tokens: Sequence[int], finish="stop"):
    """The parts of a reply of these tokens."""
    marks = frozenset(reading.marks.values())
    script = Transcript(tokenizer, (), np.zeros(0, np.int64), marks)
    machine, found = Machine(reading), []
    for at, token in enumerate(tokens):
        script(token)
        last = at == len(tokens) - 1
        text = script.take(1) + (script.finish() if last else "")
        event = Event(token, text, None, finish if last else None, token in marks)
        found += machine.take(event, Usage(1, at + 1))
    return found


def told(parts):
    """(reasoning, text, calls as (name, arguments' text), why it ended)."""
    calls = {}
    for part in parts:
        if isinstance(part, ToolCall):
            name, arguments, number = calls.setdefault(part.index, (part.name, "", part.id))
            assert (name, number) == (part.name, part.id) and part.index == len(calls) - 1
            calls[part.index] = (name, arguments + part.arguments, number)
    (end,) = [part for part in parts if isinstance(part, Finish)]
    assert parts[-1] is end
    assert len({number for *_, number in calls.values()}) == len(calls)
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Text)),
        [(name, arguments) for name, arguments, _ in calls.values()],
        end.reason,
    )


TEXT = 'a \\"}] \\u00e9'
A, B = '{"city": "Oslo", "days": 3}', f'{{"text": "{TEXT}"}}'
CALLS = {  # two calls as each family writes them
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "note", "arguments": {B}}}\n</tool_call>'
    ),
    "function_gemma": (
        "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}<end_function_call>"
        '<start_function_call>call:note{text:<escape>a "}] é<escape>}<end_function_call>'
    ),
    "gemma4": (
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:note{text:<|"|>a "}] é<|"|>}<tool_call|>'
    ),
    "harmony": (
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{A}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.note json<|message|>{B}<|call|>"
    ),
    "lfm2": f'<|tool_call_start|>[weather(city="Oslo", days=3), note(text="{TEXT}")]<|tool_call_end|>',
    "llama_pythonic": f'[weather(city="Oslo", days=3), note(text="{TEXT}")]',
    "llama3_json": (
        f'{{"name": "weather", "parameters": {A}}}; {{"name": "note", "parameters": {B}}}'
    ),
    "mistral": (
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {A}}}, '
        f'{{"name": "note", "arguments": {B}, "id": "123456789"}}]'
    ),
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]note[ARGS]{B}",
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=note>\n<parameter=text>\n"
        'a "}] é\n</parameter>\n</function>\n</tool_call>'
    ),
}
WANTED = [("weather", json.loads(A)), ("note", json.loads(B))]


def parsed(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", NAMES)
def test_calls_of_each_family(name):
    """Where its markers are tokens, and where they are text."""
    for marks in (marks_of(name), []):
        tokenizer = byte_level(marks)
        reading = Reading(tokenizer, families()[name], THINK, TOOLS)
        ids = tokenizer.encode(CALLS[name] + EOS)
        assert len(ids) < len(CALLS[name].encode()) or not marks or families()[name].bare
        parts = read(tokenizer, reading, ids)
        reasoning, text, calls, reason = told(parts)
        assert (reasoning, text, parsed(calls), reason) == ("", "", WANTED, "tool_calls"), marks
        pieces = [p for p in parts if isinstance(p, ToolCall)]
        whole = isinstance(families()[name].form, Pythonic)  # is read when it is whole
        assert len(pieces) == 4 if whole else len(pieces) > 5, "arguments come in pieces"
        if size := families()[name].id_size:
            assert all(len(p.id) == size and p.id.isalnum() for p in pieces)
        before = "" if families()[name].bare else "So: \n"
        full = f"<think>\nhm \n</think>\n\n{before}{CALLS[name]}"
        reasoning, text, calls, _ = told(read(tokenizer, reading, tokenizer.encode(full)))
        assert (reasoning, text, parsed(calls)) == ("hm", before.strip(), WANTED), marks


@pytest.mark.parametrize("name", [name for name in NAMES if not families()[name].bare])
def test_markers_in_other_tokens_are_text(name):
    """Control: in their own tokens they are calls, in the test before."""
    tokenizer = byte_level(marks_of(name))
    reading = Reading(tokenizer, families()[name], THINK, TOOLS)
    whole = f"<think>\nhm</think> {CALLS[name]} \n"
    assert told(read(tokenizer, reading, spelt(tokenizer, whole))) == ("", whole, [], "stop")


def test_what_a_call_holds_is_no_marker():
    """Markers as text within a string end no call, where the vocabulary lacks them."""
    tokenizer = byte_level([])
    reading = Reading(tokenizer, families()["hermes"], None, TOOLS)
    inner = {"text": "</tool_call> <tool_call> x"}
    text = f'<tool_call>\n{{"name": "note", "arguments": {json.dumps(inner)}}}\n</tool_call> after'
    _, text, calls, _ = told(read(tokenizer, reading, tokenizer.encode(text)))
    assert (text, parsed(calls)) == ("after", [("note", inner)])


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_of_a_call(name):
    """A reply that ends within its calls: what came of a call stays, what was none yet is text."""
    tokenizer = byte_level(marks_of(name))
    reading = Reading(tokenizer, families()[name], THINK, TOOLS)
    ids = tokenizer.encode(CALLS[name])
    wanted = told(read(tokenizer, reading, ids))[2]
    for end in range(1, len(ids)):
        _, text, calls, reason = told(read(tokenizer, reading, ids[:end], "length"))
        assert reason == "length"
        for (got, arguments), (full, all_of_it) in zip(calls, wanted, strict=False):
            assert got == full and all_of_it.startswith(arguments)
        if text:
            special = {i for i in ids[:end] if i in tokenizer.special}
            assert not calls or special or text in CALLS[name]


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[1, 2]",
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        "{}",
        '{"name": "note", "arguments": 3}',
    ],
)
def test_what_is_no_call_is_text(text):
    tokenizer = byte_level(marks_of("hermes"))
    reading = Reading(tokenizer, families()["hermes"], None, TOOLS)
    whole = f"a <tool_call>{text}</tool_call> b"
    assert told(read(tokenizer, reading, tokenizer.encode(whole))) == ("", whole, [], "stop")


def test_a_bare_call_names_a_tool():
    tokenizer = byte_level([])
    reading = Reading(tokenizer, families()["llama3_json"], None, TOOLS)
    for text in (
        '{"name": "Bob", "parameters": {"a": 1}}', '{"answer": 4', '{"name": "note"} x', "{", ' {"name"',
        f'Call {{"name": "weather", "parameters": {A}}}',
    ):  # fmt: skip
        assert told(read(tokenizer, reading, tokenizer.encode(text))) == ("", text, [], "stop")
    known = f' {{"name": "weather", "parameters": {A}}}'
    assert told(read(tokenizer, reading, tokenizer.encode(known)))[2:] == (
        [("weather", A)],
        "tool_calls",
    )


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[note('a')]", "[note(**a)]", "[note(text=a)]", "[note(text='a'", "[note(text=1)] x", "[]",
             "[Note(text=1)]", "[note.x(text=1)]", "[note(text=1), 2]", "[" * 300, "[note(text=" + "-" * 9000 + "1)]"],
)  # fmt: skip
def test_lists_that_are_no_calls(text):
    tokenizer = byte_level([])
    reading = Reading(tokenizer, families()["llama_pythonic"], None, TOOLS)
    _, said, calls, _ = told(read(tokenizer, reading, tokenizer.encode(text)))
    assert (said, calls) == (" x", [("note", '{"text": 1}')]) if text.endswith("x") else (text, [])


def test_values_of_python():
    tokenizer = byte_level([])
    reading = Reading(tokenizer, families()["llama_pythonic"], None, TOOLS)
    text = (
        "[note(a=True, b=None, c=-1.5, d=[1, (2,)], e={'x': 'it\\'s'}, f=null, g=\"\\/\\u00e9\")]"
    )
    ((_, arguments),) = parsed(told(read(tokenizer, reading, tokenizer.encode(text)))[2])
    assert arguments == {
        "a": True, "b": None, "c": -1.5, "d": [1, [2]], "e": {"x": "it's"}, "f": None, "g": "/é"
    }  # fmt: skip


def test_text_around_a_mark():
    """What is held back before a mark is certain there, and never joins what comes behind it."""
    tokenizer = byte_level(["<think>"])
    mark = tokenizer.added["<think>"]
    byte = {tokenizer.token_bytes(i): i for i in range(256)}
    for stops, text, pieces, stopped in (
        ((), b"a\xc3|\xa9b", ["a", "", "\ufffd", "\ufffd", "b"], False),
        (("xyz",), b"xy|z", ["", "", "xy", "z"], False),
        (("bc", "abcd"), b"abc|", ["", "", "", "a"], True),
    ):
        ids = [mark if letter == b"|" else byte[letter] for letter in map(bytes, zip(text))]
        script = Transcript(tokenizer, stops, np.zeros(0, np.int64), frozenset({mark}))
        ended = [script(token) for token in ids]
        assert ([script.take(1) for _ in ids], ended[-1]) == (pieces, stopped)
    plain = Transcript(tokenizer, ("xyz",), np.zeros(0, np.int64))
    for token in [byte[b"x"], byte[b"y"], mark, byte[b"z"]]:
        plain(token)
    assert plain.take() == "xy<think>z", "control: the mark's own text"


def test_reasoning_that_the_prompt_began():
    tokenizer = byte_level(["<think>", "</think>"])
    open_already = Reading(tokenizer, None, THINK, begun=True)
    for text, wanted in (
        ("\nhm <b> \n</think>\n\nYes \n", ("hm <b>", "Yes \n")),
        ("hm", ("hm", "")),
        ("</think>Yes", ("", "Yes")),
        ("hm</think>a<think>b</think>c", ("hmb", "ac")),
    ):
        assert told(read(tokenizer, open_already, tokenizer.encode(text)))[:2] == wanted
    plain = Reading(tokenizer, None, THINK)
    assert told(read(tokenizer, plain, tokenizer.encode("a</think> b ")))[:2] == (
        "",
        "a</think> b ",
    )


def test_channels():
    """What each header says, with its markers as tokens and as text; a header that is not whole says nothing."""
    whole = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Look. <|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.note<|message|>{B}<|end|>"
        "<|start|>assistant<|channel|>final<|message|> Yes <b>"
    )
    for marks in (marks_of("harmony"), []):
        tokenizer = byte_level(marks)
        reading = Reading(tokenizer, families()["harmony"], None, TOOLS)
        for more in ("", "<|return|>", "<|start|>assi"):
            found = told(read(tokenizer, reading, tokenizer.encode(whole + more)))
            assert found == ("hm", "Look.\n\nYes <b>", [("note", B)], "tool_calls")
        answer = grammar_of(
            reading, required=False, several=True, answer=StructuredOutputsParams(choice=["a"])
        )
        text = LLMatcher.grammar_from_lark(answer.grammar)
        for written, right in (
            ("<|channel|>final<|message|>a", True),
            (
                "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>a",
                True,
            ),
            ("<|channel|>final<|message|>b", False),
            ("a", False),
        ):
            matcher, ids = (
                LLMatcher(library(tokenizer), text, log_level=0),
                tokenizer.encode(written),
            )
            assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is right


def test_templates_show_their_family():
    tools = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    for name, source in {
        "hermes": "within <tool_call></tool_call> XML tags",
        "function_gemma": "<start_function_call>call:' + name + '{' + key + ':<escape>'",
        "gemma4": "{{- '<|tool_call>call:' + name + '{' -}}{{- '<|\"|>' + argument + '<|\"|>' -}}",
        "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=a>",
        "mistral": "[TOOL_CALLS] [",
        "harmony": "<|start|>assistant<|channel|>final<|message|>",
        "lfm2": "List of tools: <|tool_list_start|>[",
        "llama_pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        "mistral_args": "'[TOOL_CALLS]' + name + '[ARGS]'",
        "llama3_json": '<|start_header_id|> {"name": function name, "parameters": dictionary of argument name and '
        "its value}",
    }.items():
        assert family_of(tools + source) is families()[name]
    assert family_of(tools) is None and thinking_of(tools) is None


def library(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(
        tokenizer.settled_json,
        eos_token=tokenizer.vocabulary[EOS],
        n_vocab=len(tokenizer.vocabulary),
    )


def walk(tokenizer: Tokenizer, grammar: str, rng: random.Random, most: int) -> list[int]:
    """Tokens at random that a grammar lets come, until it is whole."""
    vocabulary = library(tokenizer)
    text = LLMatcher.grammar_from_lark(grammar)
    assert LLMatcher.validate_grammar(text, vocabulary) == ""
    matcher, found = LLMatcher(vocabulary, text, log_level=0), []
    while not matcher.is_stopped() and len(found) < most:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        token = rng.choice(allowed)
        if tokenizer.token(token) == EOS:
            return found
        assert matcher.try_consume_tokens([token]) == 1
        found.append(token)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_the_grammar_lets_come_is_a_call(name):
    """Whatever tokens come: the reply is calls whose arguments follow the schema, and nothing else."""
    rng = random.Random(name)
    for marks in (marks_of(name), []):
        tokenizer = byte_level(marks)
        for begun in (False, True):
            thinking = THINK if begun and marks else None
            reading = Reading(
                tokenizer, families()[name], thinking, TOOLS[:1], begun and bool(marks)
            )
            grammar = grammar_of(reading, required=True, several=False, answer=None).grammar
            for _ in range(3):
                while len(ids := walk(tokenizer, grammar, rng, 1500)) == 1500:
                    pass  # thoughts that do not end
                _, text, calls, reason = told(read(tokenizer, reading, ids))
                assert text == "" and reason == "tool_calls", tokenizer.decode(ids)
                ((called, arguments),) = parsed(calls)
                assert called == "weather" and {"city", "days"} <= {*arguments} <= {
                    *SCHEMA["properties"]
                }
                assert arguments["city"] in SCHEMA["properties"]["city"]["enum"]
                assert type(arguments["days"]) is int and 0 <= arguments["days"] <= 99
                assert all(type(flag) is bool for flag in arguments.get("flags", []))


@pytest.mark.parametrize("name", NAMES)
def test_no_reply_breaks_the_machine(name):
    """Pieces of calls in any order: each is read to its end, and words behind a call that is no call stay."""
    pieces = [
        *marks_of(name),
        "note",
        "weather(",
        '"a"',
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        '"name": ',
        ": ",
        ", ",
        "\n",
        " ",
    ]
    pieces += [
        "<function=note>",
        "</function>",
        "<parameter=text>",
        "</parameter>",
        "[ARGS]",
        '"arguments": ',
        "\\",
        "'",
    ]
    pieces += ['"', "5", "=", *CALLS[name].split(" "), CALLS[name]]
    rng = random.Random(name)
    for marks in (marks_of(name), []):
        tokenizer = byte_level(marks)
        for i in range(80):
            begun = rng.random() < 0.2
            reading = Reading(tokenizer, families()[name], THINK, TOOLS, begun)
            text = "".join(rng.choices(pieces, k=rng.randrange(1, 25)))
            ids = tokenizer.encode(f"{text} end of it")
            reasoning, said, calls, reason = told(
                read(tokenizer, reading, ids, rng.choice(("stop", "length")))
            )
            assert reason != "tool_calls" or calls
            assert (
                calls
                or families()[name].header
                or any(t.endswith("end of it") for t in (reasoning, said))
            ), (i, text)


def test_random_tokens_are_no_call():
    """Control of the test before."""
    tokenizer, rng = byte_level(marks_of("hermes")), random.Random(3)
    reading = Reading(tokenizer, families()["hermes"], None, TOOLS)
    ids = [257, *rng.choices(range(256), k=60), 258]
    _, text, calls, reason = told(read(tokenizer, reading, ids))
    assert text.startswith("<tool_call>") and (calls, reason) == ([], "stop")


def test_a_schema_that_spells_a_token_is_refused():
    """In a description it may."""
    for key, fine in (("description", True), ("const", False)):
        schema = {"type": "object", "properties": {"a": {key: "x</tool_call>"}}}
        tokenizer = byte_level(marks_of("hermes"))
        reading = Reading(tokenizer, families()["hermes"], None, [Tool("f", schema)])
        if fine:
            grammar_of(reading, required=True, several=True, answer=None)
        else:
            with pytest.raises(InputError, match="'</tool_call>', which is a token"):
                grammar_of(reading, required=True, several=True, answer=None)


def test_grammars_of_more_than_calls():
    """What each lets come, and what it does not."""
    tokenizer = byte_level(marks_of("hermes"))
    reading = Reading(tokenizer, families()["hermes"], None, TOOLS)
    vocabulary = library(tokenizer)
    one = CALLS["hermes"].split("\n<tool_call>")[0]
    both = f"{one}\n{one}"
    for required, several, takes, refuses in (
        (True, False, [one], [both, "Hi", f"Hi {one}"]),
        (True, True, [one, both], ["Hi", f"{one} Hi"]),
        (False, True, ["Hi", "<b>", one, f"Hi {both}"], ["<tool_call>x", one.replace("3", "true")]),
        (False, False, ["Hi", f"Hi {one}"], [both]),
    ):
        made = grammar_of(reading, required=required, several=several, answer=None)
        text = LLMatcher.grammar_from_lark(made.grammar)
        for whole, wanted in [*((t, True) for t in takes), *((t, False) for t in refuses)]:
            matcher, ids = LLMatcher(vocabulary, text, log_level=0), tokenizer.encode(whole)
            taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert taken is wanted, (required, several, whole)


@pytest.mark.parametrize(
    ("kind", "wanted", "other"),
    [
        ({"json": {"type": "object", "maxProperties": 0}}, "{}", "{"),
        ({"regex": 'a/b"|c\nd\\/'}, "c\nd/", "b"),
        ({"choice": ["yes", "no"]}, "no", "n"),
        ({"grammar": 'start: "{" b # {\nb: /[0-9]{2}/'}, "{12", "{1"),
    ],
)
def test_an_answer_has_its_form_behind_reasoning(kind, wanted, other):
    tokenizer = byte_level(marks_of("hermes"))
    for begun, before in ((True, "hm</think>\n"), (False, "<think>hm</think>"), (False, "")):
        reading = Reading(tokenizer, families()["hermes"], THINK, TOOLS, begun)
        answer = StructuredOutputsParams(**kind)
        made = grammar_of(reading, required=False, several=True, answer=answer).grammar
        text = LLMatcher.grammar_from_lark(made)
        assert LLMatcher.validate_grammar(text, library(tokenizer)) == "", made
        for answered, right in (
            (wanted, True),
            (CALLS["hermes"].split("\n<tool_call>")[0], True),
            (other, False),
        ):
            matcher = LLMatcher(library(tokenizer), text, log_level=0)
            ids = tokenizer.encode(before + answered)
            assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is right


def test_tags_refuse_what_they_cannot_hold():
    reading = Reading(byte_level(marks_of("qwen3_coder")), families()["qwen3_coder"], None)
    for schema, words in (
        ({"properties": {"a": {"type": "string", "pattern": "a+"}}}, "'pattern'"),
        ({"properties": {"a>": {}}}, "cannot stand in a tag"),
        ({"properties": {}, "required": ["b"]}, "'b'"),
        ({"anyOf": [{}]}, "'anyOf'"),
    ):
        tools = [Tool("f", {"type": "object", **schema})]
        with pytest.raises(InputError, match=words):
            grammar_of(
                Reading(reading.tokenizer, reading.family, None, tools),
                required=True,
                several=True,
                answer=None,
            )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("call:f{}", {}),
        ("call:f{a:1.5,b:-2,c:true,d:None,e:null}", {"a": 1.5, "b": -2, "c": True, "d": None, "e": None}),
        ("call:f{a:{b:[1,{c:<escape>x,{]}<escape>}],d:{}},e:[]}", {"a": {"b": [1, {"c": "x,{]}"}], "d": {}}, "e": []}),
        ("\ncall: f{ a: [<escape>x<escape>, <escape><escape>], b: yes }", {"a": ["x", ""], "b": "yes"}),
        ("call:f{<escape>a b<escape>:<escape><end_function_call><escape>}", {"a b": "<end_function_call>"}),
    ],
)  # fmt: skip
def test_values_with_bare_keys(text, wanted):
    """With their marks as text; a text may hold the block's end."""
    tokenizer = byte_level([])
    reading = Reading(tokenizer, families()["function_gemma"], None, TOOLS)
    whole = f"<start_function_call>{text}<end_function_call> after"
    _, said, calls, _ = told(read(tokenizer, reading, tokenizer.encode(whole)))
    assert (said, parsed(calls)) == ("after", [("f", wanted)])


def test_schemas_with_bare_keys():
    """What the grammar lets come is read as what the schema says; what it cannot hold is refused by name."""
    tokenizer, rng = byte_level(marks_of("gemma4")), random.Random(5)
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
            "b": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
            "c": {"type": "object", "properties": {"d": {"anyOf": [{"const": "z"}, {"type": "boolean"}]}}},
        },
        "required": ["b"],
    }  # fmt: skip
    reading = Reading(tokenizer, families()["gemma4"], None, [Tool("f", schema)])
    grammar = grammar_of(reading, required=True, several=False, answer=None).grammar
    seen = set()
    for _ in range(30):
        ids = walk(tokenizer, grammar, rng, 400)
        ((name, found),) = parsed(told(read(tokenizer, reading, ids))[2])
        assert name == "f" and 1 <= len(found["b"]) <= 2 and {*found["b"]} <= {"x", "y"}
        assert found.get("a") is None or found["a"] in range(10)
        assert found.get("c", {}).get("d", "z") in ("z", True, False)
        seen |= {*found}
    assert seen == {"a", "b", "c"}
    for wrong, words in (
        ({"type": "string", "pattern": "a"}, "'pattern' of a text"),
        ({}, "a schema of type None"),
        ({"type": "array"}, "a schema of type 'array'"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "'uniqueItems' of a list"),
        ({"const": [1]}, "an object or a list"),
        (True, "without a type"),
    ):  # fmt: skip
        tool = Tool("f", {"type": "object", "properties": {"a": wrong}})
        reading = Reading(tokenizer, families()["gemma4"], None, [tool])
        with pytest.raises(InputError, match=words):
            grammar_of(reading, required=True, several=True, answer=None)
