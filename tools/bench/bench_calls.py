"""What tools, reasoning and forced calls cost a server, beside plain completions of the same prompt.

    python tools/bench/bench_calls.py PLAIN [DRAFTS] [--rounds 4] [--tokens 64] [--seed 1]

PLAIN is an artifact of a model whose chat template knows tools, DRAFTS one of the same model with a recipe that drafts.
Each is served by `accel-compile serve`. A round asks, in an order that changes, for a chat whose answer is read as
text, reasoning and calls, for one that begins in reasoning, and for a call that has to come (`tool_choice`). Beside
each is a completion of the same prompt's token ids and of the same length, streamed as it is. Prompts are new in each
round. Compared are the seconds after the first token and those of the whole request; a table tells medians of ratios
of a round, with the least and the greatest.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from soak import served
from soak_clients import CHAT, COMPLETIONS

from accel.reference.kinds import questions

THOUGHTS = "{% if thoughts %}<think>\n{% endif %}{# </think> #}"  # behind the model's own template
WRITE = {
    "name": "write_file",
    "description": "Write a file anew.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WRITE}]
MUST = {"tool_choice": "required", "parallel_tool_calls": False}
THINKS = {"chat_template_kwargs": {"thoughts": True}}


@dataclass(frozen=True)
class Run:
    """One request: its tokens, milliseconds from the first token to the last, and of all of it."""

    tokens: int
    after: float
    whole: float


def ask(http: httpx.Client, path: str, **body: Any) -> Run:
    """A request, streamed."""
    asked = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    begun, last = time.perf_counter(), dict[str, Any]()
    with http.stream("POST", path, json=asked) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                last |= json.loads(line.removeprefix("data: "))
    if "timings" not in last:
        raise SystemExit(f"{path}: {last or answer.status_code}")
    whole = 1000 * (time.perf_counter() - begun)
    return Run(last["usage"]["completion_tokens"], last["timings"]["predicted_ms"], whole)


def beside(http: httpx.Client, chat: dict[str, Any], first: bool) -> tuple[Run, Run]:
    """A chat, and a completion of its prompt of the same length; `first`: that one is asked for first."""
    prompt = {
        key: chat[key] for key in ("messages", "tools", "chat_template_kwargs") if key in chat
    }
    ids = http.post("/tokenize", json=prompt).raise_for_status().json()["tokens"]
    if "tool_choice" in chat:  # its length is known behind it; once more, for the order
        tokens = ask(http, CHAT, **chat).tokens
    else:
        tokens, chat = chat["max_tokens"], {**chat, "ignore_eos": True}
    plain = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True}
    if first:
        other = ask(http, COMPLETIONS, **plain)
        return ask(http, CHAT, **chat), other
    return ask(http, CHAT, **chat), ask(http, COMPLETIONS, **plain)


def line(pairs: list[tuple[float, float]]) -> str:
    """A row of the table: the ratios of pairs of milliseconds."""
    found = [one / other for one, other in pairs]
    return f"{median(found):.3f} ({min(found):.3f} .. {max(found):.3f})"


def main(
    plain: Annotated[Path, typer.Argument(help="an artifact")],
    drafts: Annotated[Path | None, typer.Argument(help="one that drafts")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="of texts")] = 64,
    most: Annotated[int, typer.Option(min=2, help="tokens of a call")] = 128,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 1,
) -> None:
    """Measure, and print a table."""
    artifacts = [plain] if drafts is None else [plain, drafts]
    with ExitStack() as stack:
        template = Path(stack.enter_context(TemporaryDirectory())) / "template.jinja"
        template.write_text((plain / "chat_template.jinja").read_text() + THOUGHTS)
        options = ["--chat-template", str(template)]
        https = []
        for one in artifacts:
            url, _ = stack.enter_context(served([one], options))
            head = {"x-api-key": "soak"}
            https.append(httpx.Client(base_url=url, timeout=300, headers=head))
        texts = list(questions("edit", rounds + 1, seed))
        cases: dict[str, dict[str, Any]] = {
            "tools": {"max_tokens": tokens},
            "tools, in reasoning": {"max_tokens": tokens, **THINKS},
            "a forced call": {"max_tokens": most, **MUST},
        }
        found: dict[str, list[tuple[Run, Run]]] = {}
        for turn, text in enumerate(texts):
            chat = {"messages": [{"role": "user", "content": text}], "tools": TOOLS}
            todo = [
                (name, i) for name in cases for i in range(len(https)) if not i or "call" in name
            ]
            random.Random(turn).shuffle(todo)
            for name, i in todo:
                pair = beside(https[i], {**chat, **cases[name]}, turn % 2 == 0)
                if turn:  # the first warms up
                    found.setdefault(f"{name}{', drafts' * i}", []).append(pair)
    print("| | tokens | after the first token | whole request |\n|---|---|---|---|")
    for name in sorted(found):
        pairs = found[name]
        after = line([(one.after, other.after) for one, other in pairs])
        whole = line([(one.whole, other.whole) for one, other in pairs])
        size = round(median(one.tokens for one, _ in pairs))
        print(f"| {name} | {size} | {after} | {whole} |")
    if drafts is not None:
        both = list(zip(found["a forced call, drafts"], found["a forced call"], strict=True))
        after = line([(one.after, other.after) for (one, _), (other, _) in both])
        whole = line([(one.whole, other.whole) for (one, _), (other, _) in both])
        print(f"| a forced call: drafts over none | | {after} | {whole} |")


if __name__ == "__main__":
    typer.run(main)
