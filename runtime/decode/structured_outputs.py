"""Output that follows a JSON schema, a regular expression, a choice or a grammar, by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from accel.ir.errors import InputError, extra, shown
from accel.runtime.call import Logits
from accel.runtime.decode.grammar_trial import try_grammar
from accel.runtime.decode.schema_limits import OPTIONS, check_schema
from accel.runtime.inputs.ints import Ints
from accel.runtime.inputs.text import Tokenizer

KINDS = ("json", "regex", "choice", "grammar")
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_LONGEST = 1 << 17  # characters of GBNF, which Python reads


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the new text must be, with vLLM's names; exactly one. Raises InputError.

    Args:
        json: a JSON schema: a dict, its text, or a class with `model_json_schema()` (pydantic).
        regex: a regular expression that the whole text matches, in Rust's syntax (no look-around, no
            back-references).
        choice: strings, of which the text is one.
        grammar: a grammar in Lark's syntax, as llguidance reads it, that begins at `start`; or in llama.cpp's (GBNF),
            that begins at `root`.
        disable_any_whitespace: JSON without whitespace between its tokens.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InputError(
                f"structured_outputs: {' and '.join(given) or 'nothing'} given; give one of {', '.join(KINDS)}"
            )
        for kind in ("regex", "grammar"):
            if not isinstance(getattr(self, kind), str | None):
                raise InputError(
                    f"structured_outputs: {kind} is {shown(getattr(self, kind))}; give a string"
                )
        if self.disable_any_whitespace and self.json is None:
            raise InputError("structured_outputs: disable_any_whitespace goes with json only")
        try:
            self.source.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"structured_outputs: {self.kind} holds a lone surrogate ({shown(error.object[error.start])}), which "
                "no UTF-8 text does; leave it out"
            ) from None

    @property
    def kind(self) -> str:
        """Which one it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def source(self) -> str:
        """It as text: a JSON schema, a regular expression or a Lark grammar."""
        if self.json is not None:
            return _schema(self.json)
        if self.choice is not None:
            return _choice(self.choice)
        return str(self.regex if self.grammar is None else self.grammar)


class Grammar:
    """Params that were compiled for a model's vocabulary; rows follow it each by itself."""

    def __init__(
        self, params: StructuredOutputsParams, tokenizer: Tokenizer | None, vocab_size: int
    ):
        """Raises InputError: llguidance is not installed or does not take it, or there is no tokenizer."""
        if tokenizer is None:
            raise InputError(
                "structured_outputs needs a tokenizer, but this model has none; build with tokenizer=…"
            )
        llguidance = _library()
        matcher, source = llguidance.LLMatcher, params.source
        loose = {**OPTIONS, "whitespace_flexible": not params.disable_any_whitespace}
        if params.kind == "json":
            check_schema(json.loads(source))
        if params.kind == "grammar" and _GBNF.search(source):
            source = _as_lark(source)
        try_grammar(llguidance, params.kind, source, loose)
        vocabulary = _vocabulary(tokenizer, vocab_size)
        try:
            if params.kind == "json":
                text = matcher.grammar_from_json_schema(source, overrides=loose)
            elif params.kind == "regex":
                text = matcher.grammar_from_regex(source)
            else:
                text = matcher.grammar_from_lark(source)
            wrong = matcher.validate_grammar(text, vocabulary)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise InputError(f"structured_outputs: {params.kind} is not valid: {_line(wrong)}")
        self._start = matcher(vocabulary, text, log_level=0)
        self._own_end: list[int] = [t for t in vocabulary.eos_tokens if t < vocab_size]

    def begin(self, prompt_size: int, ends: Sequence[int]) -> Guide:
        """For a row with a prompt of so many tokens, which these tokens end."""
        return Guide(self._start.deep_copy(), prompt_size, self._own_end, ends)


class Guide:
    """Which tokens the grammar of one row lets follow. Its parser goes to whatever path it is asked about, and rolls
    back what it does not share with the last one.
    """

    def __init__(self, matcher: Any, start: int, own_end: Sequence[int], ends: Sequence[int]):
        """`start`: tokens of the prompt; `own_end`: what the grammar's vocabulary ends a text with; `ends`: what
        ends this row.
        """
        self._matcher, self._start = matcher, start
        self._own_end, self._ends = list(own_end), list(ends)
        self._path: list[int] = []  # tokens that the parser has
        self._sure = 0  # of them the row has accepted: all paths begin with these

    def branch(self) -> Guide:
        """Another that goes on from here by itself."""
        other = Guide(self._matcher.deep_copy(), self._start, self._own_end, self._ends)
        other._path, other._sure = list(self._path), self._sure
        return other

    def restrict(self, logits: Logits, seen: Ints) -> None:
        """Set logits [V] to -inf for tokens that may not follow `seen` [n]: an end where the text is not whole, too.

        Behind an end, a text that ends the row (`complete`), or a token that may not come, nothing is restricted.
        Raises InputError where no token may follow, or the grammar is too complex.
        """
        if not self._goes(seen):
            return
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=logits.size, bitorder="little").view(np.bool_)
        allowed[self._own_end] = False
        allowed[self._ends] = self._matcher.is_accepting()
        if not allowed.any():
            if self._path and self._matcher.is_stopped():  # a draft goes on behind the row's end
                return
            raise InputError(
                "structured_outputs: the grammar lets no token follow: the text is not whole, but the vocabulary has "
                "nothing that goes on; or it is, and the request has no end token (eos)"
            )
        logits[~allowed] = -np.inf

    def complete(self, seen: Ints) -> bool:
        """Whether the text of `seen`, which a row has accepted, is whole, and nothing may follow."""
        whole = self._goes(seen)
        self._check()
        self._sure = len(self._path)
        return whole and bool(self._matcher.is_stopped())

    def _goes(self, seen: Ints) -> bool:
        """Bring the parser to these tokens; whether the grammar takes them all."""
        same = min(self._sure, len(self._path), seen.size - self._start)
        rest = seen[self._start + same :].tolist()
        ahead = self._path[same:]
        shared = 0
        while shared < min(len(ahead), len(rest)) and ahead[shared] == rest[shared]:
            shared += 1
        if shared < len(ahead):
            self._matcher.rollback(len(ahead) - shared)
            del self._path[same + shared :]
        rest = rest[shared:]
        if set(rest).intersection(self._ends):
            return False
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._path += rest[:taken]
        return bool(taken == len(rest))

    def _check(self) -> None:
        if self._matcher.is_error():
            wrong = self._matcher.get_error().partition("\n")[0]
            raise InputError(f"structured_outputs: llguidance gave up: {wrong}")


def _schema(value: Any) -> str:
    """The text of a JSON schema."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(f"structured_outputs: json is not JSON: {error}") from None
    elif hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if not isinstance(value, dict | bool):
        raise InputError(
            f"structured_outputs: json is {type(value).__name__}; give a JSON schema: a dict, its text, or a pydantic "
            "model"
        )
    if value is False:
        raise InputError("structured_outputs: json is the schema false, which no text follows")
    try:
        return json.dumps({} if value is True else value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"structured_outputs: json is no JSON schema: {error}") from None


def _as_lark(text: str) -> str:
    """A grammar of llama.cpp's in Lark's syntax. Raises InputError."""
    if len(text) > _LONGEST:
        raise InputError(
            f"structured_outputs: grammar has {len(text):,} characters; give at most {_LONGEST:,} of GBNF"
        )
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the reader raises plain ones, and RecursionError
        told = "it is nested too deeply" if isinstance(error, RecursionError) else _line(str(error))
        raise InputError(f"structured_outputs: grammar is not valid: {told}") from None


def _line(text: str) -> str:
    """What llguidance says, in a line that is not endless: it lists special tokens, and the grammar."""
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _choice(value: Any) -> str:
    """A grammar of strings."""
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not value
        or not all(isinstance(one, str) and one for one in value)
    ):
        raise InputError(
            f"structured_outputs: choice is {shown(value)}; give a list of non-empty strings"
        )
    return "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value)


def _library() -> Any:
    with extra("grammar"):
        import llguidance
    return llguidance


@lru_cache(maxsize=8)
def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Any:
    """The tokenizer as llguidance reads it. Raises InputError where it does not."""
    size = max(vocab_size, 1 + max(tokenizer.vocabulary.values(), default=0))
    try:
        return _library().LLTokenizer(tokenizer.settled_json, n_vocab=size)
    except ValueError as error:
        raise InputError(
            f"structured_outputs: llguidance does not read this model's tokenizer: {error}"
        ) from None
