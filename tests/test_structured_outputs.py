"""Grammars on the bundled model: what is sampled matches, truncated text begins like something that does, and drafts
change nothing.
"""

import json
import random
import re
import sys

import numpy as np
import pytest

import accel
from accel import StructuredOutputsParams
from accel.commands.demo import reference
from accel.ir.errors import ExtraError, InputError, shown
from accel.ir.recipe import Recipe, bundled
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.structured_outputs import Grammar, Guide

PROMPTS = ["import os\n\ndef main(", "The answer: ", "for i in range(3):"]
HOT = {"temperature": 1.0}


@pytest.fixture(scope="module")
def model():
    with accel.optimize(reference(), max_context=512, max_batch=3, verify=False) as built:
        yield built


def schema(rng, depth=2):
    """A small JSON schema, whose strings and arrays are short."""
    kinds = ["string", "integer", "boolean", "enum", "null"] + ["object", "array"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "enum":
        return {"enum": rng.sample(["red", 'a "b"', 3, True, None, "é"], 3)}
    if kind == "string":
        return {"type": kind, "maxLength": rng.randint(1, 8)}
    if kind == "integer":
        return {"type": kind, "minimum": rng.randint(-20, 5), "maximum": rng.randint(6, 300)}
    if kind == "array":
        return {"type": kind, "items": schema(rng, depth - 1), "maxItems": rng.randint(1, 3)}
    if kind == "object":
        names = rng.sample(["a", "name", "x-y", "Größe"], rng.randint(1, 3))
        properties = {name: schema(rng, depth - 1) for name in names}
        needed = [name for name in names if rng.random() < 0.7]
        return {
            "type": kind,
            "properties": properties,
            "required": needed,
            "additionalProperties": False,
        }
    return {"type": kind}


def valid(value, of):
    """Whether a value is of such a schema."""
    if "enum" in of:
        return any(value == one and type(value) is type(one) for one in of["enum"])
    if of["type"] == "object":
        return (
            isinstance(value, dict) and value.keys() <= of["properties"].keys() and value.keys() >= set(of["required"])
            and all(valid(v, of["properties"][k]) for k, v in value.items())
        )  # fmt: skip
    if of["type"] == "array":
        return (
            isinstance(value, list)
            and len(value) <= of["maxItems"]
            and all(valid(v, of["items"]) for v in value)
        )
    if of["type"] == "string":
        return isinstance(value, str) and len(value) <= of["maxLength"]
    if of["type"] == "integer":
        return type(value) is int and of["minimum"] <= value <= of["maximum"]
    return value is None if of["type"] == "null" else isinstance(value, bool)


def regex(rng, depth=2):
    """A small regular expression that Python and Rust read alike."""
    atoms = ["[a-f]", "[0-9]", "x", "é", r"\.", " ", "[^a-z]{2}", "ab"]
    if not depth:
        return rng.choice(atoms)
    parts = [regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    kind = rng.random()
    if kind < 0.4:
        return "(?:" + "|".join(parts) + ")"
    if kind < 0.7:
        return "(?:" + "".join(parts) + ")" + rng.choice(["?", "{1,3}", "+", "{2}"])
    return "".join(parts)


def parses(text, of):
    try:
        return valid(json.loads(text), of)
    except ValueError:
        return False


def goes_on(model, params, tokens):
    """Whether tokens begin something that the grammar takes."""
    guide: Guide = Grammar(params, model.tokenizer, model.facts.vocab_size).begin(0, ())
    return guide._goes(np.array(tokens, np.int64))


def check(model, cases, limit=60):
    """cases: (params, whether a text is whole) -> how many texts were whole, and cut."""
    whole = cut = free = 0
    for seed, (params, good) in enumerate(cases):
        out = model.generate(PROMPTS, limit, structured_outputs=params, seed=seed, **HOT)
        for tokens, text, reason in zip(out.tokens, out.text, out.finish_reason, strict=True):
            if reason == "stop":
                assert good(text), (params, text)
                whole += 1
            else:
                assert (
                    reason == "length" and len(tokens) == limit and goes_on(model, params, tokens)
                ), (params, text)
                cut += 1
        free += sum(
            bool(good(text)) for text in model.generate(PROMPTS, limit, seed=seed, **HOT).text
        )
    assert free < whole / 10, "without the grammar the same seeds hardly ever match"
    return whole, cut


def json_cases(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        of = schema(rng)
        yield (
            StructuredOutputsParams(json=of, disable_any_whitespace=True),
            lambda text, of=of: parses(text, of),
        )


def regex_cases(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        one = regex(rng)
        if one:
            yield StructuredOutputsParams(regex=one), re.compile(one, re.S).fullmatch


@pytest.mark.long
def test_sampled_json_follows_its_schema(model):
    whole, cut = check(model, json_cases(8))
    assert whole > 15, (whole, cut)


@pytest.mark.long
def test_sampled_text_matches_its_expression(model):
    whole, cut = check(model, regex_cases(12))
    assert whole > 20, (whole, cut)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_of_both(model, seed):
    assert check(model, json_cases(60, seed))[0] > 100
    assert check(model, regex_cases(60, seed))[0] > 100


def test_truncated_text_says_so(model):
    of = {"type": "array", "items": {"type": "integer"}, "minItems": 40}
    params = StructuredOutputsParams(json=of, disable_any_whitespace=True)
    out = model.generate("x = ", 9, structured_outputs=params)
    assert out.finish_reason == ["length"] and goes_on(model, params, out.tokens[0])
    assert not goes_on(
        model, params, [*out.tokens[0], model.tokenizer.encode("z", special=False)[0]]
    )


def test_a_choice_and_a_grammar(model):
    choice = ["yes", 'no "maybe"', "a\nb\\c", "naïve"]
    params = StructuredOutputsParams(choice=choice)
    assert set(
        model.generate(PROMPTS * 4, 20, structured_outputs=params, seed=2, **HOT).text
    ) <= set(choice)
    lark = 'start: "(" start ")" | DIGITS\nDIGITS: /[0-9]{1,3}/'
    for text in model.generate(
        PROMPTS, 60, structured_outputs=StructuredOutputsParams(grammar=lark), **HOT
    ).text:
        inner = text.strip("()")
        assert inner.isdecimal() and text == "(" * (text.count("(")) + inner + ")" * text.count("(")


def test_a_class_with_a_schema_and_text_are_schemas_too(model):
    class Point:
        @staticmethod
        def model_json_schema():
            return {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }

    for of in (Point, json.dumps(Point.model_json_schema())):
        params = StructuredOutputsParams(json=of, disable_any_whitespace=True)
        assert json.loads(model.generate("p", 20, structured_outputs=params).text[0]).keys() == {
            "x"
        }


def test_it_ends_with_an_end_token_only_where_it_may(model):
    """[0-9]+ goes on for ever: an end token ends it, and only behind a digit; without one, the limit does."""
    params = StructuredOutputsParams(regex="[0-9]+")
    end = model.facts.eos[0]
    out = model.generate(PROMPTS, 30, structured_outputs=params, logit_bias={end: 30.0})
    assert all(
        tokens[-1] == end and text.isdecimal()
        for tokens, text in zip(out.tokens, out.text, strict=True)
    )
    assert out.finish_reason == ["stop"] * 3 and out.stats["finish"] == ["eos"] * 3
    never = model.generate("x", 30, structured_outputs=params, logit_bias={end: 30.0}, eos=[])
    assert never.finish_reason == ["length"] and end not in never.tokens[0]
    exact = model.generate(
        "x", 30, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"), eos=[]
    )
    assert (
        exact.finish_reason == ["stop"]
        and exact.text[0].isdecimal()
        and exact.stop_reason == [None]
    )


def test_a_batch_gets_what_each_prompt_gets_alone(model):
    params = StructuredOutputsParams(regex="([a-z]{1,4} ?){3,9}[.]")
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        out = model.generate(PROMPTS, 30, structured_outputs=params, **options)
        alone = [
            model.generate(p, 30, structured_outputs=params, **options).tokens[0] for p in PROMPTS
        ]
        assert out.tokens == alone
    samples = model.generate(
        PROMPTS[0], 30, structured_outputs=params, temperature=0.8, seed=3, n=4
    )
    assert samples.tokens[0] == alone[0] and len(set(samples.text)) > 1


def test_it_streams(model):
    params = StructuredOutputsParams(regex="[0-9]{2}-[0-9]{2}")
    want = model.generate("x", 20, structured_outputs=params)
    stream = model.stream("x", 20, structured_outputs=params)
    assert "".join(stream) == want.text[0] and stream.finish_reason == "stop"


def nested(depth):
    """A schema of arrays of arrays ..."""
    of = {"enum": [1]}
    for _ in range(depth):
        of = {"type": "array", "items": of}
    return of


INVALID = [
    ({"json": {"type": "foo"}}, "json is not valid: Invalid type: foo"), ({"regex": "[0-9"}, "regex is not valid"),
    ({"regex": "(?=a)b"}, "regex is not valid"), ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"json": "{a"}, "json is not JSON"), ({"json": 3}, "json is int"), ({"json": {"enum": [{1, 2}]}}, "set"),
    ({"regex": 3}, "regex is 3"), ({"choice": []}, "choice is []"), ({"choice": "ab"}, "choice is 'ab'"),
    ({"choice": [""]}, "non-empty"), ({}, "nothing given"), ({"regex": "a", "choice": ["b"]}, "regex and choice given"),
    ({"regex": "a", "disable_any_whitespace": True}, "goes with json only"),
    ({"json": False}, "the schema false, which no text follows"), ({"json": "false"}, "the schema false"),
    ({"json": {"const": float("nan")}}, "no JSON schema: Out of range float"),
    ({"json": '{"const": NaN}'}, "no JSON schema: Out of range float"),
    ({"json": {"enum": ["\ud83d"]}}, "json holds a lone surrogate"),
    ({"json": '{"enum": ["\\ud83d"]}'}, "json holds a lone surrogate"),
    ({"choice": ["\ud83d"]}, "choice holds a lone surrogate"), ({"regex": "\ud83d"}, "regex holds a lone"),
    ({"grammar": 'start: "\ud83d"'}, "grammar holds a lone surrogate"),
    ({"json": nested(200)}, "json is not valid: recursion limit exceeded"),
    ({"json": nested(100_000)}, "no JSON schema: maximum recursion depth"),
    ({"json": "[" * 100_000}, "json is not JSON: maximum recursion depth"),
    ({"grammar": "start: <|none|>"}, 'unknown special token: "<|none|>"'),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), INVALID, ids=shown)
def test_what_is_not_valid_is_said_in_a_line(model, given, said):
    with pytest.raises(InputError, match=re.escape(said)) as error:
        model.generate("x", structured_outputs=StructuredOutputsParams(**given))
    assert "\n" not in str(error.value)


def chain(depth):
    """A schema whose references form a chain."""
    defs = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "null"}]} for i in range(depth)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{depth}": {"type": "integer"}}}


def rules(depth, end):
    """A grammar whose rules form a chain."""
    return (
        "start: a0\n" + "".join(f'a{i}: a{i + 1} "x"\n' for i in range(depth)) + f"a{depth}: {end}"
    )


OVERFLOWS = [
    {"json": chain(3000)}, {"json": chain(1500)}, {"grammar": rules(20_000, '"a"')},
    {"grammar": rules(6000, '"a"')}, {"grammar": rules(6000, "<|none|>")},
]  # fmt: skip


@pytest.mark.parametrize(
    "given", OVERFLOWS, ids=["references", "definitions", "long", "rules", "special"]
)
def test_what_overflows_the_stack_of_llguidance_is_refused(model, given):
    """It ends the process that compiles it."""
    params = StructuredOutputsParams(**given)
    with pytest.raises(InputError, match="more than llguidance can compile: .*SIGSEGV"):
        model.generate("x", structured_outputs=params)


def test_the_schema_true_is_any_json(model):
    params = StructuredOutputsParams(json=True)
    assert goes_on(model, params, model.tokenizer.encode('{"a": [1, null]}', special=False))
    assert not goes_on(model, params, model.tokenizer.encode("{a", special=False))


def test_without_the_library_or_a_tokenizer_it_is_refused(model, monkeypatch):
    params = StructuredOutputsParams(regex="a")
    with monkeypatch.context() as patch:
        patch.setattr(model, "tokenizer", None)
        with pytest.raises(InputError, match="needs a tokenizer"):
            model.generate([5], structured_outputs=params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ExtraError, match=re.escape("'.[grammar]'")):
        model.generate("x", structured_outputs=params)


def test_what_leaves_no_token_is_said(model):
    digits = {model.tokenizer.encode(str(n), special=False)[0]: float("-inf") for n in range(10)}
    with pytest.raises(InputError, match="no token may follow"):
        model.generate(
            "x", structured_outputs=StructuredOutputsParams(regex="[0-9]"), logit_bias=digits
        )
    assert model.generate("x", 3).tokens


DRAFTS = sorted(
    {n for n in bundled() if {"draft"} & Recipe.load(n).tables.keys()}
    - {"lookahead-reasoning"}  # keeps drafted steps that differ in blanks
    | {"jacobi", "lookahead", "pearl"}
)


def milder(ids, logits):
    logits[int(ids[-1]) % 3 :: 3] -= 2
    return logits


CONSTRAINED = {
    "json": {"structured_outputs": StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "boolean"}}},
        disable_any_whitespace=True,
    )},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{30,60}")},
    "functions": {"logits_processors": [milder], "logit_bias": {201: -5.0}},
}  # fmt: skip
REPEATING = ["def f(x):\n    return x + 1\n\ndef f(x):\n    return", "import os\nimport"]


@pytest.fixture(scope="module")
def plainly():
    with accel.optimize(
        reference(), "batch-invariant", max_context=512, max_batch=4, verify=False
    ) as built:
        yield built


@pytest.mark.long
@pytest.mark.parametrize("name", DRAFTS)
def test_every_recipe_that_drafts_gives_the_same(plainly, name, monkeypatch):
    """All drafts are tried, whether they pay or not."""
    monkeypatch.setattr(
        accel.CompiledModel,
        "_context",
        lambda self, judge=None: DecodeContext(self._methods, None, self),
    )
    with accel.optimize(
        reference(), [name, "batch-invariant"], max_context=512, max_batch=4, verify=False
    ) as drafts:
        for options in CONSTRAINED.values():
            want = plainly.generate(REPEATING, 60, logprobs=1, **options)
            got = drafts.generate(REPEATING, 60, logprobs=1, **options)
            assert (got.tokens, got.finish_reason) == (want.tokens, want.finish_reason)
            for mine, due in zip(sum(got.logprobs, []), sum(want.logprobs, []), strict=True):
                assert mine.keys() == due.keys()
                np.testing.assert_allclose(
                    [mine[t].logprob for t in due], [one.logprob for one in due.values()], atol=1e-3
                )
        assert got.stats["speculation"]["drafted"] > 0
