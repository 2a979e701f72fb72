"""Triton's interpreter for the tests: it changes its language once, not at each call of a function, which is half of
their time.
"""

import inspect
from types import FunctionType, SimpleNamespace


def once() -> None:
    """Let it do so from now on. The language stays changed: nothing is compiled in a process that interprets."""
    import triton.language as tl
    from triton.runtime import interpreter

    changed, change = set[frozenset[str]](), interpreter._patch_lang
    kept = SimpleNamespace(restore=lambda: None)

    def patch(fn: FunctionType) -> SimpleNamespace:
        seen = [one for one in fn.__globals__.values() if inspect.ismodule(one)]
        names = frozenset(one.__name__ for one in seen if one in (tl, tl.core))
        if names not in changed:
            change(fn)
            changed.add(names)
        return kept

    interpreter._patch_lang = patch
