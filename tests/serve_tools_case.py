"""A server over one small model under several names, each with a chat template of its own; tests script its replies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import accel
from accel.runtime.serve.engine import Engine
from accel.serve.models import Served

from . import serve_case

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]")
HERMES = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}assistant:{{ opening or '' }}{{ reasoning_effort or '' }}{{ enable_thinking | default('') }}
{#- </think> #}"""
MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ messages[-1].content }}
{# [TOOL_CALLS] #}"""
HARMONY = "{{ messages[-1].content }}{# <|start|><|channel|><|message|> #}"
THOUGHTS = (
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}{# </think> #}"
)
NO_TOOLS = "{{ 'the word tools' }} tools {{ messages[-1].content }}"
UNKNOWN = "{{ tools }}{{ messages[-1].content }}"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Weather.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now"}},
]


class Scripted:
    """An engine whose replies are these tokens, then the model's end token."""

    def __init__(self, engine):
        self.engine, self.script = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, request):
        self.prompt = request.prompt
        if self.script:

            def follow(ids, logits):
                at = len(ids) - len(request.prompt)
                logits[:] = -1e9
                logits[self.script[at] if at < len(self.script) else 1] = 0
                return logits

            params = dataclasses.replace(request.params, logits_processors=[follow])
            request = dataclasses.replace(request, params=params)
        return self.engine.submit(request)


def script(running: Any, *parts: Any) -> None:
    """The next replies are these texts; a text within is in its own tokens, one in a list spelt in others."""
    tokenizer = running.models[0].tokenizer
    running.engine.script = [
        token
        for part in parts
        for token in (
            tokenizer.encode(part, special=False)
            if isinstance(part, str)
            else [i for letter in part[0] for i in tokenizer.encode(letter, special=False)]
        )
    ]


@contextmanager
def serving(folder: Path, max_context: int = 1024) -> Iterator[Any]:
    """The server; its `engine` is a `Scripted`."""
    options = {"marks": MARKS, "max_context": max_context, "max_batch": 2}
    artifact = serve_case.build(folder, template=HERMES, **options)
    with ExitStack() as stack:
        model = stack.enter_context(accel.load(artifact, threads=1))
        engine = Engine(model, max_waiting=8)
        stack.callback(engine.close, drain=False)
        scripted = Scripted(engine)
        templates = {"hermes": None, "mistral": MISTRAL, "plain": NO_TOOLS, "unknown": UNKNOWN}
        templates |= {"harmony": HARMONY, "thoughts": THOUGHTS}
        found = [Served(name, model, scripted, text) for name, text in templates.items()]
        running = stack.enter_context(serve_case.listening(found))
        running.engine = scripted
        yield running
