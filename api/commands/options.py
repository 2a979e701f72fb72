"""Options that several commands take, described once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from accel.ir.errors import InputError

Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="NAME|FILE",
        help="Recipe name or TOML file (default: base). Repeat it to merge recipes.",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="tokenizer.json, or the folder that holds it (or older files, such as vocab.json with merges.txt). "
        "Default: the one in the model directory.",
    ),
]
MaxContext = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Maximum sequence length in tokens (at most the model's own limit).",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Allow Python code from the model directory to run."),
]
Download = Annotated[
    bool,
    typer.Option(
        "--download",
        help="Let huggingface_hub download what the Hugging Face cache lacks of the repository MODEL.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Compute threads. Default: OMP_NUM_THREADS, or the number of physical cores.",
    ),
]
Kernels = Annotated[
    str,
    typer.Option(
        metavar="auto|NAME",
        help="Kernel variant (listed by inspect). Default: auto, the fastest measured on this machine.",
    ),
]
PublicKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Refuse an artifact that is not signed with this key."),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", "--max-new-tokens", metavar="N", help="Maximum number of new tokens."
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop before this text. May be repeated."),
]
Temperature = Annotated[
    float, typer.Option(metavar="X", help="Sampling temperature; 0 is greedy decoding.")
]
TopK = Annotated[
    int | None, typer.Option(metavar="N", help="Sample from the N most likely tokens.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Nucleus sampling: the most likely tokens with total probability X."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Sample from tokens with at least X times the highest probability."
    ),
]
RepetitionPenalty = Annotated[
    float, typer.Option(metavar="X", help="Values above 1 penalise tokens that already occurred.")
]
Sampler = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,OPTION=X…]",
        help="What is drawn from where there is a temperature: the method and the options of a recipe's [sample], such "
        "as typical,mass=0.9. Default: the one of the model's recipe.",
    ),
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Random seed, for reproducible sampling.")
]
Adapter = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Adapter of the artifact (listed by inspect)."),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Jinja file, or the name of one of the model's templates. Default: the model's own.",
    ),
]
MergeAdapter = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="LoRA or DoRA adapter that peft saved, merged into the weights.",
    ),
]


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked."""

    temperature: Temperature = 0.0
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = 1.0
    sampler: Sampler = None
    seed: Seed = None

    def options(self) -> dict[str, Any]:
        """As `SamplingParams` takes them."""
        return {**vars(self), "sampler": None if self.sampler is None else sampler(self.sampler)}


@dataclass(frozen=True)
class Loading:
    """How an artifact is opened."""

    threads: Threads = None
    kernels: Kernels = "auto"
    public_key: PublicKey = None


@dataclass(frozen=True)
class Building:
    """How a model that is no artifact is compiled, for this command alone."""

    recipe: Recipes = None
    tokenizer: Tokenizer = None
    max_context: MaxContext = 2048
    merge_adapter: MergeAdapter = None
    trust_remote_code: TrustRemoteCode = False
    download: Download = False

    def options(self) -> dict[str, Any]:
        """As `optimize` takes them."""
        return {**vars(self), "recipe": recipe(self.recipe)}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command in whose place the options of a parameter that is a dataclass stand, one for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    shown, groups = list[Parameter](), dict[str, Any]()
    for name, one in signature(command).parameters.items():
        if is_dataclass(kind := hints[name]):
            groups[name] = kind
            own = get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                default = Parameter.empty if field.default is MISSING else field.default
                shown.append(
                    Parameter(
                        field.name,
                        Parameter.KEYWORD_ONLY,
                        default=default,
                        annotation=own[field.name],
                    )
                )
        else:
            shown.append(one.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {one.name: one.annotation for one in shown}
    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    return run


# an option as errors name it, in Python's words; not a part of a path
_PYTHON = re.compile(r"(?<![\w/.=-])([a-z]\w*)=(\{[^}]*\}|'[^']*'|[^\s,;:()]+)")
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def sampler(text: str) -> dict[str, Any]:
    """What `SamplingParams` takes, out of `typical,mass=0.9`. Raises InputError."""
    from accel.runtime.sample import named

    use, *pairs = text.split(",")
    found: dict[str, Any] = {"use": use.strip()}
    for pair in pairs:
        name, mark, value = (part.strip() for part in pair.partition("="))
        if not mark:
            raise InputError(f"--sampler {text}: {pair!r} is no option; write NAME,OPTION=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:  # a word
            found[name] = value
    named(found)
    return found


def recipe(recipes: list[str] | None) -> str | list[str]:
    """What `optimize` takes, out of the --recipe options; "base" where there are none."""
    names = recipes or ["base"]
    return names[0] if len(names) == 1 else names


def spelled(text: str, commands: Mapping[str, Any], current: str) -> str:
    """A message with options of the command line in place of Python's, which errors write as `name=value`.

    `commands`: click's, by name; `current`: the one that runs. Of an option that it lacks, the command is named.
    """

    def words(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        for command in (current, *commands):
            params = commands[command].params if command in commands else ()
            found = next((one for one in params if one.name == name), None)
            if found is not None and (told := _written(found, value)):
                return told if command == current else f"accel-compile {command} {told}"
        return match[0]

    return _PYTHON.sub(words, text)


def speech(context: typer.Context) -> Callable[[str], str]:
    """`spelled`, within a command."""
    commands = getattr(context.find_root().command, "commands", {})
    return partial(spelled, commands=commands, current=str(context.info_name))


def _written(option: Any, value: str) -> str:
    """As it is typed; "": it cannot be."""
    own = "--" + option.name.replace("_", "-")
    flag = own if own in option.opts else option.opts[0]
    if not flag.startswith("--"):
        return ""
    if getattr(option, "is_flag", False):
        off = next(iter(option.secondary_opts), "")
        return str(flag) if value == "True" else str(off) if value == "False" else ""
    free = value.startswith(("{", "…"))  # whatever the user wants
    return f"{flag} {option.metavar or 'VALUE' if free else value.strip(chr(39))}"


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, and not left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def template(path_or_name: str) -> str:
    """The text of a Jinja file, or a template's name. Raises InputError."""
    path = Path(path_or_name)
    if path.is_file():
        return utf8(path.read_bytes(), path_or_name)
    if path.suffix or path.parent != Path("."):
        raise InputError(
            f"--chat-template {path_or_name}: there is no such file; give a Jinja file"
        )
    return path_or_name


def utf8(data: bytes, name: str) -> str:
    """Bytes that a user gave as text. Raises InputError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x}); convert it"
        ) from None
