"""What a child of `grammar_trial` does: compiles one grammar, which may overflow the stack and so end this process. It
imports nothing of accel.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import Any

from llguidance import LLMatcher, LLTokenizer

# Lark's strings, expressions and comments, and special tokens, of which this process knows one
_LEXEMES = re.compile(
    r'(?P<kept>"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*)|<[^<>\s]*>'
)
_SPECIAL = "<|tool|>"
_LEAST = 1 << 18
_USUAL = 1 << 21  # bytes of a stack without a limit (glibc)


def work(request: dict[str, Any]) -> None:
    """Compile it with half the stack that a thread of the parent has."""
    threading.stack_size(max(_stack() // 2, _LEAST) & ~0xFFFF)
    threading.excepthook = lambda _: None
    thread = threading.Thread(target=_compile, kwargs=request)
    thread.start()
    thread.join()


def _compile(kind: str, source: str, overrides: dict[str, Any]) -> None:
    """As `Grammar` does, for a vocabulary of bytes. What is not valid raises, or not: nobody asks."""
    vocabulary = LLTokenizer("byte")
    if kind == "json":
        text = LLMatcher.grammar_from_json_schema(source, overrides=overrides)
    elif kind == "regex":
        text = LLMatcher.grammar_from_regex(source)
    else:
        source = _LEXEMES.sub(lambda found: found["kept"] or _SPECIAL, source)
        text = LLMatcher.grammar_from_lark(source)
    matcher = LLMatcher(vocabulary, text, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()


def _stack() -> int:
    """Bytes of the stack of a thread of the parent."""
    with contextlib.suppress(ImportError):  # of POSIX systems
        import resource

        limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
        if limit != resource.RLIM_INFINITY:
            return limit
    return _USUAL
