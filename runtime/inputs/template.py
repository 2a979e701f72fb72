"""What a child of `chat` does: renders one chat template. It imports nothing of accel.

A template is a program that came with a model, so it runs in Jinja's sandbox: no attribute beyond plain data, no
change of what it is given. What it does is looked at before it is done, where that says what is wrong; for all else
the process has limits of time and memory.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_BITS = 1 << 16  # of a number
_PADS = {
    *("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"),  # methods
    *("batch", "indent", "round", "slice", "tojson", "wordwrap"),  # filters
}
_WRITES = {"%", "format", "join", "pprint", "string", "tojson"}  # all that they are given, as text
_WIDE = {  # a width in a format: of five digits, or from a value
    "%": re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*(?:\d{5}|\*)"),
    "format": re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)"),
}
_limits = SimpleNamespace(end=0.0, seconds=0.0, size=0)  # of this rendering


def work(request: dict[str, Any]) -> dict[str, Any]:
    """A template with variables -> {"text"}, or {"wrong", "told"}; `variables` None: it is only read. `seconds`;
    `size`: characters of a text, entries of a list.
    """
    _limits.end = time.monotonic() + request["seconds"]
    _limits.seconds, _limits.size = request["seconds"], request["size"]
    try:
        template = _compiled(request["source"])
        given = request["variables"]
        return {"text": "" if given is None else template.render(given)}
    except TemplateSyntaxError as error:
        return {"wrong": "syntax", "told": f"line {error.lineno}: {error.message}"}
    except _Refused as error:
        return {"wrong": "refused", "told": str(error.message)}
    except (_Stopped, SecurityError, OverflowError, RecursionError) as error:
        return {"wrong": "stopped", "told": str(error) or type(error).__name__}
    except MemoryError:
        raise
    except Exception as error:  # whatever a template's own expressions raise
        kind = "undefined" if isinstance(error, UndefinedError) else "failed"
        return {"wrong": kind, "told": f"{type(error).__name__}: {error}"}


class _Refused(TemplateError):
    """`raise_exception` of a template."""


class _Stopped(Exception):
    """A limit was reached."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, by which training finds the assistant's tokens: its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Limits(NodeTransformer):
    """Each turn of a loop and each `~` goes through the sandbox."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("joined")
        return nodes.Call(join, node.nodes, [], None, None).set_lineno(node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on the time and on what one operation makes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # nothing is computed when a template is read
            finalize=_weighed,
        )
        self.filters = {name: _limited(name, f) for name, f in self.filters.items()}
        self.filters["tojson"] = _limited("tojson", _tojson)
        self.filters["format"] = _limited("%", do_format)
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Limits().visit(tree)
        tree.set_environment(self)
        return tree

    def call(self, context: Any, function: Any, /, *args: Any, **more: Any) -> Any:
        owner = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        name = getattr(owner, "__name__", "").removesuffix("_map")
        _check(name, getattr(owner, "__self__", None), [*args, *more.values()])
        return super().call(context, function, *args, **more)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _check("%", left, [right])
        elif operator == "+":
            _fits(_length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            _fits(bits * right if operator == "**" else bits + right.bit_length(), _BITS)
        elif operator == "*":
            times = [side for side in (left, right) if isinstance(side, int)]
            _fits(max(times, default=0) * max(_length(left), _length(right)))
        return super().call_binop(context, operator, left, right)

    def tick(self) -> None:
        """A turn of a loop: `call` has looked at the clock."""

    def joined(self, *parts: Any) -> str:
        """What `~` makes."""
        return self.concat(str(_weighed(part)) for part in parts)

    @staticmethod
    def concat(parts: Any) -> str:
        """The text of pieces: of a block, a macro or the whole."""
        found, size = [], 0
        for part in parts:
            size += len(part)
            _fits(size)
            found.append(part)
        return "".join(found)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    return _sandbox().from_string(source)


@lru_cache(maxsize=1)
def _sandbox() -> Environment:
    return _Sandbox()


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is not given what makes too much."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # its context, or environment

    @wraps(function)
    def run(*args: Any, **more: Any) -> Any:
        subject, *rest = args[skip:] or [None]
        _check(name, subject, [*rest, *more.values()])
        return function(*args, **more)

    return run


def _check(name: str, subject: Any, values: list[Any]) -> None:
    """Raise _Stopped where the time is over, or a call makes far more than it is given."""
    if time.monotonic() > _limits.end:
        raise _Stopped(f"it took more than {_limits.seconds:g} s")
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if name in _PADS:
        _fits(max(numbers, default=0) * max(1, _length(subject)))
    elif name == "replace" and len(values) > 1:
        _fits(str(subject).count(str(values[0])) * len(str(values[1])))
    elif name == "join" and values:
        _fits(_length(subject) * _length(values[0]))
    if name in _WRITES:
        _weighed([subject, *values])
    if name in _WIDE and isinstance(subject, str) and _WIDE[name].search(subject):
        raise _Stopped("it formats a value to a great width")


def _fits(size: int, limit: int | None = None) -> None:
    limit = _limits.size if limit is None else limit
    if size > limit:
        raise _Stopped(f"it makes a value of size {size:,}; at most {limit:,} are allowed")


def _weighed(value: Any) -> Any:
    """The value, whose text is not too long: a list that holds another twice writes it twice."""
    size, left = 0, [value]
    while left:
        one = left.pop()
        size += 1 + _length(one)
        _fits(size)
        if isinstance(one, Namespace):
            raise _Stopped("it writes a namespace")
        if isinstance(one, (list, tuple)):
            left.extend(one)
        elif isinstance(one, dict):
            left.extend([*one, *one.values()])
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _raise(message: Any) -> None:
    raise _Refused(str(_weighed(message)))


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without Jinja's escapes for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
