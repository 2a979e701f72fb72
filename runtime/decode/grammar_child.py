"""What `grammar_trial` runs: compiles one grammar, which may overflow the stack and so end this process. It imports
nothing of accel, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from typing import Any

# Lark's strings, expressions and comments, and special tokens, of which this process knows one
_LEXEMES = re.compile(
    r'(?P<kept>"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*)|<[^<>\s]*>'
)
_SPECIAL = "<|tool|>"
_LEAST = 1 << 18
_USUAL = 1 << 21  # bytes of a stack without a limit (glibc)


def compile_grammar(kind: str, source: str, overrides: dict[str, Any]) -> None:
    """As `Grammar` does, for a vocabulary of bytes. What is not valid raises, or not: nobody asks."""
    from llguidance import LLMatcher, LLTokenizer

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
    """Bytes of the stack of a thread of the parent; no core is dumped where one overflows."""
    with contextlib.suppress(ImportError):  # of POSIX systems
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
        if limit != resource.RLIM_INFINITY:
            return limit
    return _USUAL


def main() -> None:
    """Read the grammar from stdin, and try it with half the stack that a thread of the parent has."""
    given = json.load(sys.stdin)
    sys.path.append(given["packages"])
    threading.stack_size(max(_stack() // 2, _LEAST) & ~0xFFFF)
    threading.excepthook = lambda _: None
    thread = threading.Thread(
        target=compile_grammar, args=(given["kind"], given["source"], given["overrides"])
    )
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
