"""chat: a conversation with a model in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel.commands import options
from accel.commands.console import waited
from accel.commands.source import open_model
from accel.ir.errors import AccelError, InputError, unknown

if TYPE_CHECKING:
    from accel.runtime.decode.sampling_params import SamplingParams
    from accel.runtime.model.chat import Chat
    from accel.runtime.model.stream import Stream

EXAMPLES = """\b
Examples:
  accel-compile chat ./artifact
  accel-compile chat ./artifact --system "Answer in one sentence." --temperature 0.7
  accel-compile chat ./artifact --chat-template template.jinja --load talk.json
  echo "What is a monad?" | accel-compile chat ./artifact
"""
_MORE = "\\"  # at the end of a line: the message goes on in the next


@options.grouped
def chat(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|MODEL",
            help="Artifact, model directory, GGUF file or cached repository (org/name).",
        ),
    ],
    *,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    load: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="Go on from a file that /save wrote."
        ),
    ] = None,
    chat_template: options.ChatTemplate = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--max-new-tokens",
            metavar="N",
            help="Maximum number of tokens of an answer. Default: what the context leaves.",
        ),
    ] = None,
    sampling: options.Sampling,
    adapter: options.Adapter = None,
    loading: options.Loading,
    building: options.Building,
) -> None:
    """Talk with a model: messages from the terminal or stdin, a line each.

    The model's chat template makes prompts of them. Tokens of earlier turns are not run again. A line that
    ends with a backslash goes on in the next; Ctrl-C ends an answer, Ctrl-D the conversation; /help lists
    the commands. A model is compiled first, for this conversation only.
    """
    from accel.runtime.decode.sampling_params import SamplingParams
    from accel.runtime.inputs.chat import check_template

    template = None if chat_template is None else {"chat_template": options.template(chat_template)}
    named = None if template is None else template["chat_template"]
    with open_model(
        path,
        context,
        check=lambda config: check_template(config, named),
        **vars(loading),
        **building.options(),
    ) as model:
        params = SamplingParams(
            max_tokens=model.facts.max_context if max_new_tokens is None else max_new_tokens,
            **sampling.options(),
        )
        with model.chat(system, adapter=adapter, chat_template_kwargs=template) as talk:
            if load is not None:
                talk.messages = _read(load)
            Terminal(talk, params, options.speech(context)).run()


class Terminal:
    """Reads lines, answers messages, and does what lines that begin with / say. A method `_do_NAME` is a command,
    its docstring the help.
    """

    def __init__(self, chat: Chat, params: SamplingParams, say: Callable[[str], str] = str):
        """`say`: an error's text in the command line's words."""
        self._chat = chat
        self._params = params
        self._say = say
        self._person = sys.stdin.isatty()
        self._ended = False

    def run(self) -> None:
        """Until the lines end, or /exit."""
        if self._person:
            _line_editing()
            typer.echo("/help lists the commands; Ctrl-D ends the conversation.", err=True)
        while not self._ended:
            try:
                text = self._message()
            except EOFError:
                break
            except KeyboardInterrupt:
                typer.echo("", err=True)
                continue
            if not text.strip():
                continue
            try:
                self._take(text)
            except AccelError as error:
                if not self._person:
                    raise
                typer.echo(f"error: {self._say(' '.join(str(error).split()))}", err=True)
        if self._person:
            typer.echo("", err=True)

    def _message(self) -> str:
        """A line, and those that it goes on in. Raises EOFError."""
        lines = [self._line("> ")]
        while lines[-1].endswith(_MORE):
            lines[-1] = lines[-1].removesuffix(_MORE)
            lines.append(self._line(". "))
        return "\n".join(lines)

    def _line(self, mark: str) -> str:
        if self._person:
            return input(mark)
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return options.utf8(line, "stdin").rstrip("\r\n")

    def _take(self, text: str) -> None:
        if not text.startswith("/") or text.startswith("//"):
            self._answer(self._chat.send(text.removeprefix("/"), self._params))
            return
        name, _, rest = text[1:].partition(" ")
        commands = _commands()
        if name not in commands:
            raise InputError(
                f"{unknown('command', '/' + name, ['/' + one for one in commands])}; // begins a message with /"
            )
        commands[name](self, rest.strip())

    def _answer(self, stream: Stream) -> None:
        try:
            with stream:
                for piece in waited(stream):
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._person:
                raise
        typer.echo()
        if self._person:
            self._do_stats("")

    def _do_help(self, _: str) -> None:
        """list the commands"""
        width = max(map(len, _commands()))
        for name, command in _commands().items():
            typer.echo(f"/{name:<{width}}  {command.__doc__}", err=True)

    def _do_system(self, text: str) -> None:
        """TEXT: replace the system message; without TEXT remove it"""
        messages = self._chat.messages
        if messages and messages[0]["role"] == "system":
            del messages[0]
        if text:
            messages.insert(0, {"role": "system", "content": text})

    def _do_history(self, _: str) -> None:
        """print the conversation"""
        for message in self._chat.messages:
            typer.echo(f"[{message['role']}] {message['content']}")

    def _do_undo(self, _: str) -> None:
        """remove your last message and its answer"""
        if not self._chat.undo():
            raise InputError("there is no message to remove; write one")

    def _do_retry(self, _: str) -> None:
        """answer your last message again; with a temperature and no --seed the answer differs"""
        asked = [one["content"] for one in self._chat.messages if one["role"] == "user"]
        if not asked:
            raise InputError("there is no message to answer; write one")
        before = list(self._chat.messages)
        self._chat.undo()
        try:
            self._answer(self._chat.send(asked[-1], self._params))
        except AccelError:
            self._chat.messages = before
            raise

    def _do_reset(self, _: str) -> None:
        """forget all but the system message"""
        self._chat.messages = [one for one in self._chat.messages[:1] if one["role"] == "system"]

    def _do_save(self, file: str) -> None:
        """FILE: write the conversation as JSON; --load FILE goes on from it"""
        if not file:
            raise InputError("/save needs a file; write /save talk.json")
        text = json.dumps(self._chat.messages, indent=1, ensure_ascii=False)
        try:
            data = text.encode("utf-8")
            with Path(file).expanduser().open("xb") as written:
                written.write(data)
        except FileExistsError:
            raise InputError(f"{file} exists; give another name, or remove it first") from None
        except (OSError, RuntimeError, ValueError) as error:  # also an unknown home, a surrogate
            why = getattr(error, "strerror", None) or error
            raise InputError(f"/save {file}: {why}; give another path") from None

    def _do_stats(self, _: str) -> None:
        """speed of the last answer, and how much context is left"""
        stats, left = self._chat.stats, self._chat.context_left
        said = f"{left} of {self._chat.max_context} tokens left"
        if stats:
            said = (
                f"{stats['tokens']} tokens ({stats['finish'][0]}), {stats['tokens_per_second']:.0f} tokens/s, "
                f"prompt of {stats['prompt_tokens']} ({stats['reused']} reused) in "
                f"{stats['prefill_seconds']:.2f} s, {said}"
            )
        typer.echo(f"[{said}]", err=True)

    def _do_exit(self, _: str) -> None:
        """end the conversation"""
        self._ended = True


def _commands() -> dict[str, Callable[[Terminal, str], None]]:
    return {
        name.removeprefix("_do_"): command
        for name, command in vars(Terminal).items()
        if name.startswith("_do_")
    }


def _line_editing() -> None:
    """Arrow keys and a history for `input`, where Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:  # Windows: the console has its own
        pass


def _read(file: Path) -> list[dict[str, Any]]:
    """Messages that /save wrote. Raises InputError."""
    try:
        found = json.loads(options.utf8(file.read_bytes(), str(file)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}); give a file that /save wrote") from None
    if not isinstance(found, list) or not all(
        isinstance(one, dict) and all(isinstance(one.get(k), str) for k in ("role", "content"))
        for one in found
    ):
        raise InputError(
            f'{file} holds no conversation; give a JSON list of {{"role": …, "content": …}}, as /save writes it'
        )
    return found
