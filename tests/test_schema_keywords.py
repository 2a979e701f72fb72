"""Each keyword of JSON Schema: the grammar takes no text whose value a validator refuses, or it is refused by name."""

import json
import random
import re

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from accel.ir.errors import InputError
from accel.runtime.decode.schema_limits import EXACT, OPTIONS, check_schema

BYTES = LLTokenizer("byte")
DEFS = {
    "r": {"type": "integer"},
    "s": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
BOUNDS = [0, 1, -1, 2, 3, 1.5, 0.1, -2.5, 10, 2**31, EXACT, EXACT + 1, EXACT + 2, -EXACT - 1]
VALUES = [1, "a", "ab", None, True, [1, 2], {"a": 1}, 1.5, 0, {}, [], EXACT + 2]
LEAVES = [None, True, 0, 1, -1, 2, 3, 1.5, 0.1, 10, 2.5, "", "a", "ab", "abc", "b", "é", 1.0, EXACT]
LEAVES += [EXACT + 1, EXACT + 2, 2**63, 10**20]
NAMES = ["a", "b", "aa", "c", "é"]
KEYWORDS = {  # -> what it may hold, of a schema with so many levels below
    "type": lambda r, d: r.choice([*TYPES, ["string", "object"], ["integer", "null"]]),
    "properties": lambda r, d: {n: schema(r, d) for n in r.sample(NAMES, 2)},
    "patternProperties": lambda r, d: {r.choice(["^a", "b$", "é", "."]): schema(r, d)},
    "additionalProperties": lambda r, d: schema(r, d),
    "propertyNames": lambda r, d: {"pattern": "^a"},
    "required": lambda r, d: r.sample(NAMES, r.randint(1, 2)),
    "dependentRequired": lambda r, d: {"a": ["b"]},
    "dependentSchemas": lambda r, d: {"a": schema(r, d)},
    "unevaluatedProperties": lambda r, d: schema(r, d),
    "minProperties": lambda r, d: r.randint(0, 3),
    "maxProperties": lambda r, d: r.randint(0, 3),
    "items": lambda r, d: schema(r, d),
    "prefixItems": lambda r, d: [schema(r, d) for _ in range(r.randint(1, 3))],
    "unevaluatedItems": lambda r, d: schema(r, d),
    "uniqueItems": lambda r, d: True,
    "contains": lambda r, d: schema(r, d),
    "minItems": lambda r, d: r.randint(0, 3),
    "maxItems": lambda r, d: r.randint(0, 3),
    "minLength": lambda r, d: r.randint(0, 3),
    "maxLength": lambda r, d: r.randint(0, 3),
    "pattern": lambda r, d: r.choice(["^a", "b", "^[ab]*$", "a$", "^(a|é)", "^.$"]),
    "minimum": lambda r, d: r.choice(BOUNDS),
    "maximum": lambda r, d: r.choice(BOUNDS),
    "exclusiveMinimum": lambda r, d: r.choice(BOUNDS),
    "exclusiveMaximum": lambda r, d: r.choice(BOUNDS),
    "multipleOf": lambda r, d: r.choice([1, 2, 5, 0.5, 3, 1.5, 10, EXACT + 2]),
    "enum": lambda r, d: r.sample(VALUES, r.randint(1, 5)),
    "const": lambda r, d: r.choice(VALUES),
    "anyOf": lambda r, d: [schema(r, d) for _ in range(2)],
    "oneOf": lambda r, d: [schema(r, d) for _ in range(2)],
    "allOf": lambda r, d: [schema(r, d) for _ in range(2)],
    "not": lambda r, d: schema(r, d),
    "if": lambda r, d: schema(r, d),
    "$ref": lambda r, d: r.choice(["#/$defs/r", "#/$defs/s"]),
}


def schema(rng, depth, *needed):
    if not depth:
        return rng.choice([{"type": "integer"}, {"type": "string"}, {}, True, {"const": 1}])
    chosen = dict.fromkeys([*needed, *rng.sample(list(KEYWORDS), rng.randint(0, 2))])
    made = {keyword: KEYWORDS[keyword](rng, depth - 1) for keyword in chosen}
    return made | ({"type": KEYWORDS["type"](rng, 0)} if rng.random() < 0.5 else {})


def text(rng, depth=2):
    """JSON, in which names come twice and letters are escaped."""
    kind = rng.random()
    if depth and kind < 0.4:
        names = [rng.choice([*NAMES, "ab", "x"]) for _ in range(rng.randint(0, 4))]
        inner = [f"{spelt(rng, name)}: {text(rng, depth - 1)}" for name in names]
        return "{" + ", ".join(inner) + "}"
    if depth and kind < 0.55:
        return "[" + ", ".join(text(rng, depth - 1) for _ in range(rng.randint(0, 4))) + "]"
    leaf = rng.choice(LEAVES)
    return spelt(rng, leaf) if isinstance(leaf, str) else json.dumps(leaf)


def spelt(rng, word):
    if rng.random() < 0.2:
        return '"' + "".join(f"\\u{ord(letter):04x}" for letter in word) + '"'
    return json.dumps(word, ensure_ascii=False)


def matcher(given, options=OPTIONS):
    """None where it is refused."""
    try:
        if options is OPTIONS:
            check_schema(given)
        made = LLMatcher.grammar_from_json_schema(json.dumps(given), overrides=options)
    except ValueError:  # InputError is one
        return None
    return None if LLMatcher.validate_grammar(made, BYTES) else LLMatcher(BYTES, made, log_level=0)


def takes(grammar, given):
    grammar, data = grammar.deep_copy(), list(given.encode())
    return grammar.try_consume_tokens(data) == len(data) and grammar.is_accepting()


def wrongly_taken(keyword, options=OPTIONS, schemas=30, texts=60):
    """(schema, text) that the grammar takes and the validator refuses."""
    rng = random.Random(keyword)
    for _ in range(schemas):
        given = {**schema(rng, 2, keyword), "$defs": DEFS}
        if (grammar := matcher(given, options)) is None:
            continue
        validator = jsonschema.Draft202012Validator(given)
        for _ in range(texts):
            one = text(rng)
            if takes(grammar, one) and not validator.is_valid(json.loads(one)):
                yield given, one


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_what_the_grammar_takes_is_valid(keyword):
    assert not list(wrongly_taken(keyword))


def test_without_the_limits_some_is_not():
    """The control: the same texts, as llguidance is by itself."""
    for keyword in ("minProperties", "properties", "patternProperties", "const", "minimum"):
        assert any(wrongly_taken(keyword, {"whitespace_flexible": True})), keyword


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "integer", "minimum": -(2**63) + 1}, "minimum has -9223372036854775807, and"),
        ({"properties": {"a": {"enum": [1, [2**53]]}}}, "enum has 9007199254740992, and"),
        ({"$defs": {"const": {"maximum": 1e300}}}, "maximum has 1e+300"),
        ({"anyOf": [{"minProperties": 2, "required": ["a", "a"]}]}, "minProperties is 2, and"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, "exclusiveMinimum = 1 beside maximum = 1.5"),
        ({"exclusiveMaximum": -1, "allOf": [{"minimum": -1.5}]}, "exclusiveMaximum = -1 beside minimum"),
        ({"$ref": "#/$defs/a", "exclusiveMaximum": 2, "$defs": {"a": {"minimum": 1.5}}}, "beside minimum = 1.5"),
        ({"minProperties": float("inf")}, "minProperties is inf"),
        ({"foo": {"bar": {"minProperties": 3}}, "$ref": "#/foo/bar"}, "minProperties is 3"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(given, said):
    with pytest.raises(InputError, match=re.escape(said)):
        check_schema(given)


def test_names_and_values_are_no_keywords():
    check_schema({"properties": {"minProperties": {"type": "integer"}, "const": {"enum": [1]}}})
    check_schema({"const": {"minProperties": 5}, "default": {"minimum": 2**60}})
    check_schema({"minProperties": 2, "required": ["a", "b"], "maximum": EXACT})
    check_schema({"exclusiveMinimum": 0, "maximum": 1})
    apart = {"a": {"maximum": 0.5}, "b": {"anyOf": [{"exclusiveMinimum": 0}, {"$ref": "#/a"}]}}
    check_schema({"properties": apart})
    check_schema({"exclusiveMinimum": 0, "properties": {"a": {"maximum": 0.5}}})
    check_schema({"items": {"minProperties": 1}, "exclusiveMinimum": True})
