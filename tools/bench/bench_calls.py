"""What tools, reasoning and forced calls cost a server, beside plain completions of the same prompt.

    python tools/bench/bench_calls.py PLAIN [DRAFTS] [--minutes 1.8] [--tokens 128] [--seed 1]

PLAIN is an artifact of a model whose chat template knows tools, DRAFTS one of the same model with a recipe that drafts.
Each is served by `accel-compile serve`. A round asks, in an order that changes, for a chat whose answer is read as
text, reasoning and calls, for one that begins in reasoning, and for a call that has to come (`tool_choice`). Beside
each is a completion of the same prompt's token ids and of the same length, streamed as it is. Prompts are new in each
round. Compared are the processor time of the server's processes for the whole request, and the seconds after its first
token; a table tells medians of ratios of a round, with the least and the greatest. A second table has what reading and
telling a token costs by itself, without a model.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import typer
from soak import KEY, served
from soak_clients import CHAT, COMPLETIONS

from accel.reference.kinds import prompts, questions
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.serve.reply.family import family_of, thinking_of
from accel.runtime.serve.reply.forms import Tool
from accel.runtime.serve.reply.machine import Machine, Reading
from accel.runtime.serve.request import Event, Usage
from accel.serve.replies import ChatReply, Choice, CompletionReply

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
TEXT = 4000  # tokens that are read
THINKS = {"chat_template_kwargs": {"thoughts": True}}


@dataclass(frozen=True)
class Run:
    """One request: its tokens, seconds of the server's processor time, and seconds from its first token to its last."""

    tokens: int
    worked: float
    after: float


class Server:
    """One that runs, and its client."""

    def __init__(self, url: str, process: psutil.Process):
        self.http = httpx.Client(base_url=url, timeout=300, headers={"x-api-key": KEY})
        self._process = process

    def worked(self) -> float:
        """Seconds of processor time since its start, of its processes together."""
        processes = [self._process, *self._process.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in processes)


def ask(server: Server, path: str, **body: Any) -> Run:
    """A request, streamed."""
    asked = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    begun, last = server.worked(), dict[str, Any]()
    with server.http.stream("POST", path, json=asked) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                last |= json.loads(line.removeprefix("data: "))
    if "timings" not in last:
        raise SystemExit(f"{path}: {last or answer.status_code}")
    worked, after = server.worked() - begun, last["timings"]["predicted_ms"] / 1000
    return Run(last["usage"]["completion_tokens"], worked, after)


def beside(server: Server, chat: dict[str, Any], first: bool) -> tuple[Run, Run]:
    """A chat, and a completion of its prompt of the same length; `first`: that one is asked for first."""
    prompt = {
        key: chat[key] for key in ("messages", "tools", "chat_template_kwargs") if key in chat
    }
    ids = server.http.post("/tokenize", json=prompt).raise_for_status().json()["tokens"]
    if "tool_choice" in chat:  # its length is known behind it
        forced = ask(server, CHAT, **chat)
        return forced, ask(
            server, COMPLETIONS, prompt=ids, max_tokens=forced.tokens, ignore_eos=True
        )
    read = {**chat, "ignore_eos": True}
    plain = {"prompt": ids, "max_tokens": chat["max_tokens"], "ignore_eos": True}
    if first:
        other = ask(server, COMPLETIONS, **plain)
        return ask(server, CHAT, **read), other
    return ask(server, CHAT, **read), ask(server, COMPLETIONS, **plain)


def line(pairs: list[tuple[float, float]]) -> str:
    """A row of the table: the ratios of pairs of seconds."""
    found = [one / other for one, other in pairs]
    return f"{median(found):.3f} ({min(found):.3f} .. {max(found):.3f})"


def reading(artifact: Path) -> Iterator[str]:
    """Rows of a table: microseconds of this thread for each token of a text that is read and told in chunks."""
    tokenizer = Tokenizer(artifact / "tokenizer.json")
    source = (artifact / "chat_template.jinja").read_text() + THOUGHTS
    tools = [Tool(WRITE["name"], WRITE["parameters"])]
    known = Reading(tokenizer, family_of(source), thinking_of(source), tools)
    kinds = {
        "a completion": (CompletionReply, Reading(tokenizer)),
        "tools": (ChatReply, known),
        "tools, in reasoning": (ChatReply, replace(known, begun=True)),
    }
    stream = tokenizer.stream()
    ids = tokenizer.encode("".join(prompts("edit", 40, 1)), special=False)[:TEXT]
    events, usage = [Event(token, stream.push(token)) for token in ids], Usage(0, 0)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(5):
        for name, (reply, how) in kinds.items():
            choice, told = Choice(Machine(how)), reply("m", tokenizer, top=None, usage=True)
            begun = time.thread_time()
            for event in events:
                for piece in told.pieces(0, *choice.take(event, usage)):
                    json.dumps(piece)
            found[name].append(1e6 * (time.thread_time() - begun) / len(events))
    for name, all_of_them in found.items():
        yield f"| {name} | {median(all_of_them):.1f} ({min(all_of_them):.1f} .. {max(all_of_them):.1f}) |"


def main(
    plain: Annotated[Path, typer.Argument(help="an artifact")],
    drafts: Annotated[Path | None, typer.Argument(help="one that drafts")] = None,
    minutes: Annotated[
        float, typer.Option(help="as many rounds as go into it, one at least")
    ] = 1.8,
    tokens: Annotated[int, typer.Option(min=2, help="of texts")] = 128,
    most: Annotated[int, typer.Option(min=2, help="tokens of a call")] = 128,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 1,
) -> None:
    """Measure, and print a table."""
    start = time.monotonic()
    artifacts = [plain] if drafts is None else [plain, drafts]
    with ExitStack() as stack:
        template = Path(stack.enter_context(TemporaryDirectory())) / "template.jinja"
        template.write_text((plain / "chat_template.jinja").read_text() + THOUGHTS)
        options = ["--chat-template", str(template)]
        servers = []
        for one in artifacts:
            servers.append(Server(*stack.enter_context(served([one], options))))
        texts = list(questions("edit", 100, seed))
        cases: dict[str, dict[str, Any]] = {
            "tools": {"max_tokens": tokens},
            "tools, in reasoning": {"max_tokens": tokens, **THINKS},
            "a forced call": {"max_tokens": most, **MUST},
        }
        found: dict[str, list[tuple[Run, Run]]] = {}
        for turn, text in enumerate(texts):
            begun = time.monotonic()
            chat = {"messages": [{"role": "user", "content": text}], "tools": TOOLS}
            todo = [
                (name, i) for name in cases for i in range(len(servers)) if not i or "call" in name
            ]
            random.Random(turn).shuffle(todo)
            for name, i in todo:
                pair = beside(servers[i], {**chat, **cases[name]}, turn % 2 == 0)
                if turn:  # the first warms up
                    found.setdefault(f"{name}{', drafts' * i}", []).append(pair)
            now = time.monotonic()
            if turn and now - start + now - begun > 60 * minutes:
                break
    print(f"{turn} rounds\n")
    print("| | tokens | processor time | after the first token |\n|---|---|---|---|")
    for name in sorted(found):
        pairs = found[name]
        worked = line([(one.worked, other.worked) for one, other in pairs])
        after = line([(one.after, other.after) for one, other in pairs])
        size = round(median(one.tokens for one, _ in pairs))
        print(f"| {name} | {size} | {worked} | {after} |")
    if drafts is not None:
        both = list(zip(found["a forced call, drafts"], found["a forced call"], strict=True))
        worked = line([(one.worked, other.worked) for (one, _), (other, _) in both])
        after = line([(one.after, other.after) for (one, _), (other, _) in both])
        print(f"| a forced call: drafts over none | | {worked} | {after} |")
    print("\n| microseconds of the reader for a token | |\n|---|---|")
    for row in reading(plain):
        print(row)


if __name__ == "__main__":
    typer.run(main)
