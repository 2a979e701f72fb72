"""`accel-compile`: the command line. Each command is a file in `commands/`, imported light: what
runs an artifact imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from accel.commands import (
    bench,
    build,
    chat,
    choose,
    demo,
    explain,
    inspect,
    map,
    options,
    recipes,
    run,
    serve,
    sign,
    smoke,
    train,
    verify,
)
from accel.ir.errors import AccelError

_EXAMPLES = """\b
Examples:
  accel-compile demo
  accel-compile build ./my-model --out ./artifact
  accel-compile run ./artifact --prompt "def quicksort("
  accel-compile chat ./artifact
  accel-compile serve ./artifact
  accel-compile map ./artifact prompts.parquet ./texts
  accel-compile recipes float16
  accel-compile explain snapkv
  accel-compile choose ./my-model --prompts prompts.jsonl
  accel-compile train kvquant ./my-model
  accel-compile smoke llama

Every command has --help. An error prints one line and exits with 1 (wrong usage: 2). Set
ACCEL_TRACEBACK=1 for the traceback.
"""


class Guarded(TyperGroup):
    """A command group whose errors are one line on stderr, and whose exit codes tell them apart."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """As click's `main`; in standalone mode no exception but SystemExit leaves it."""

        def plain() -> Any:
            return super(Guarded, self).main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )

        if not standalone_mode:
            return plain()
        given = sys.argv[1:] if args is None else args
        command = next((word for word in given if not word.startswith("-")), "")
        sys.exit(_guard(plain, lambda text: options.spelled(text, self.commands, command)))


app = typer.Typer(
    cls=Guarded,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for module in (
    build,
    run,
    chat,
    serve,
    map,
    recipes,
    explain,
    choose,
    train,
    inspect,
    sign,
    verify,
    smoke,
    bench,
    demo,
):
    name = module.__name__.rpartition(".")[2]
    app.command(name, epilog=module.EXAMPLES)(getattr(module, name))


def _version(asked: bool) -> None:
    if asked:
        from accel.ir.version import VERSION

        typer.echo(f"accel-compile {VERSION}")
        raise typer.Exit()


@app.callback(invoke_without_command=True, epilog=_EXAMPLES)
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile a language model to an ONNX artifact and run it without PyTorch."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """The entry point. SIGTERM and SIGHUP end it as Ctrl-C does: everything is cleaned up."""
    for name in ("SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, _leave)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character
    app(prog_name="accel-compile")


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _guard(command: Callable[[], Any], spelled: Callable[[str], str]) -> int:
    """Run a command; its exit code. `spelled`: an error's text in the command line's words."""
    try:
        code = int(command() or 0)  # typer makes Ctrl-C the code 130
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except Exception as error:
        if os.environ.get("ACCEL_TRACEBACK"):
            import traceback

            traceback.print_exc()
        text, code = error_text(error)
        typer.echo(f"error: {spelled(' '.join(text.split()))}", err=True)
    if code == 130:
        typer.echo("interrupted", err=True)
    return code


def error_text(error: Exception) -> tuple[str, int]:
    """What to tell a user of an exception, and the exit code."""
    if hasattr(error, "format_message"):  # click's usage errors, whichever click typer brings
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "accel-compile"
        return f"{error.format_message()} (see {command} --help)", 2
    if isinstance(error, AccelError):
        return str(error), 1
    if isinstance(error, MemoryError):
        return "out of memory; close other programs, or give a smaller model or --max-context", 1
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}; give another path, or fix this one", 1
    return (
        f"{type(error).__name__}: {error}: this is a bug in accel: run again with "
        "ACCEL_TRACEBACK=1 and report what it prints"
    ), 1


def _forget_stdout() -> None:
    """The reader went away: nothing more may be flushed to it, not even when Python exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    main()
