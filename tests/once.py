"""What tests make once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any


@contextmanager
def made_once(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """`make`, called once for the same arguments; what it made is closed at the end."""
    with ExitStack() as stack:
        yield cache(lambda *names, **options: stack.enter_context(make(*names, **options)))
