"""Chat templates: messages -> the text of a prompt, as transformers renders it, without transformers.

A template is a program that came with a model. It runs in a process of its own, whose time and memory are limited
(`template`), so nothing that it does ends or holds up this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from accel.ir.errors import AccelError, ArtifactError, InputError, shown, unknown
from accel.runtime.inputs.child import ChildDied, ChildLate, Children, plain
from accel.runtime.inputs.tokenizer_config import DEFAULT, TokenizerConfig

SECONDS = 10.0  # of one rendering
SIZE = 1 << 23  # characters of a text, entries of a list
_GRACE = 0.5  # seconds that one which looks at its clock has to say so
_MEMORY = 1 << 29  # bytes of addresses


def render(
    config: TokenizerConfig,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    **variables: Any,
) -> str:
    """The text of a conversation. Its arguments are those of `Tokenizer.apply_chat_template`.

    Raises:
        InputError: there is no template, or it refuses these messages.
        ArtifactError: the artifact's template is no Jinja, or was stopped.
    """
    _check_messages(messages)
    # as transformers: of templates many fail at a value that is none, few at one that is not there
    messages = [{key: v for key, v in m.items() if v is not None} for m in messages]
    if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError(
            "tools are not all JSON schemas; give a list of dicts (transformers.utils.get_json_schema makes one of "
            "a Python function)"
        )
    source = template_of(config, chat_template, tools)
    theirs = source in config.templates.values()
    act = "give a prompt of plain text or token ids" if theirs else "correct it"
    wrong: type[AccelError] = ArtifactError if theirs else InputError
    given = {**config.special, **variables, "messages": messages, "tools": tools}
    given |= {"documents": documents, "add_generation_prompt": add_generation_prompt}
    found = _asked(source, plain(given, "messages and variables"))
    if "text" in found:
        text: str = found["text"]
        return text
    kind, told = found["wrong"], found["told"]
    if kind == "syntax":
        raise wrong(f"the chat template is no Jinja template: {told}; {act}")
    if kind == "refused":
        raise InputError(f"the chat template refuses these messages: {told}; change them")
    if kind == "stopped":
        raise wrong(f"the chat template was stopped: {told}; do not trust it: {act}")
    told = f"({told}); check their roles and contents, and the variables that you gave"
    bare = _bare(messages) if kind == "undefined" else ""
    raise InputError(f"the chat template cannot render these messages {bare or told}")


def _asked(source: str, variables: dict[str, Any] | None) -> dict[str, Any]:
    """What the template's process says, as `template.work`; variables None: of its syntax alone."""
    import jinja2
    import markupsafe

    places = [Path(str(module.__file__)) for module in (jinja2, markupsafe)]
    folders = dict.fromkeys(str(place.parent.parent) for place in places)
    asked = {"source": source, "variables": variables, "seconds": SECONDS, "size": SIZE}
    try:
        found: dict[str, Any] = _children().ask(asked, SECONDS + _GRACE, [*folders])
        return found
    except ChildLate:
        return {"wrong": "stopped", "told": f"it took more than {SECONDS:g} s"}
    except ChildDied as error:
        return {"wrong": "stopped", "told": f"it ended its process ({error})"}


@lru_cache(maxsize=1)
def _children() -> Children:
    return Children(Path(__file__).with_name("template.py"), memory=_MEMORY)


def _bare(messages: Sequence[Mapping[str, Any]]) -> str:
    """What to say of the first message without content; empty: all have some."""
    for i, message in enumerate(messages):
        if "content" not in message:
            others = ", ".join(map(shown, sorted(map(str, message.keys() - {"role"}))))
            beside = f", only {others}" if others else ""
            return f'because message {i} has no content{beside}; write {{"role": …, "content": …}}'
    return ""


def check_template(config: TokenizerConfig, chat_template: str | None) -> None:
    """Raise InputError where there is no template of this name (None: none at all), or the text is no Jinja; nothing is
    rendered.
    """
    found = _asked(template_of(config, chat_template, None), None)
    if "wrong" in found:
        raise InputError(f"the chat template is no Jinja template: {found['told']}; correct it")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InputError(
            f"messages are {messages!r:.60}; give a list of dicts, such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(
                f'message {i} has no role; write {{"role": "user", "content": …}} '
                "(roles of most templates: system, user, assistant, tool)"
            )


def template_of(config: TokenizerConfig, asked: str | None, tools: Any) -> str:
    """The source of the template that was asked for: by its name, as text, or none. Raises InputError."""
    known = config.templates
    if asked is not None:
        if asked not in known and "{" not in asked:
            raise InputError(f"{unknown('chat template', asked, known)}; or give a template's text")
        return known.get(asked, asked)
    name = "tool_use" if tools is not None and "tool_use" in known else DEFAULT
    if name in known:
        return known[name]
    if known:
        raise InputError(f"chat_template: give one of {', '.join(sorted(known))}")
    raise InputError(
        "this model has no chat template: its tokenizer came without one. Give a prompt of plain text, or a "
        "Jinja template with chat_template=…"
    )
