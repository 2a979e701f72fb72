"""run: continue a prompt and stream the text."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accel.commands import options
from accel.commands.console import print_json, waited
from accel.commands.source import open_model
from accel.ir.errors import InputError

if TYPE_CHECKING:
    from accel.runtime.decode.logprobs import Logprob
    from accel.runtime.decode.structured_outputs import StructuredOutputsParams
    from accel.runtime.model.compiled import CompiledModel
    from accel.runtime.model.output import Output

EXAMPLES = """\b
Examples:
  accel-compile run ./artifact --prompt "def quicksort("
  echo "import os" | accel-compile run ./artifact --temperature 0.8 --top-p 0.95 --seed 7
  accel-compile run ./my-model --prompt-file prompt.txt --max-new-tokens 200 --stop "\\n\\n"
  accel-compile run ./artifact --adapter poet --prompt "Once upon a time"
  accel-compile run ./artifact --prompt-file system.txt --save-session system.session
  accel-compile run ./artifact --session system.session --prompt "And now?"
  accel-compile run ./artifact --prompt "Once upon" --temperature 1.2 --sampler typical,mass=0.9
  accel-compile run ./artifact --tokens 1,5,9 --json
  accel-compile run ./my-model --target triton --prompt "def quicksort("
  accel-compile run ./my-t5 --input "translate English to German: Good morning."
  accel-compile run ./my-whisper --input features.npy --language fr --task translate
  accel-compile run ./artifact --prompt "A person: " --json-schema person.json
  accel-compile run ./artifact --prompt "import os" -n 3 --temperature 0.8 --logprobs 2 --json
"""


@dataclass(frozen=True)
class PromptOptions:
    """What is continued, and kept."""

    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Prompt text.")] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="File with the prompt. Default: stdin.",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(metavar="1,2,3", help="Prompt as token ids, for models without a tokenizer."),
    ] = None
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="TEXT|FILE.npy",
            help="Encoder input of an encoder-decoder model: text, or a .npy file with features or token "
            "ids. The prompt is then the start of the decoder's output.",
        ),
    ] = None
    language: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Language that is spoken, for a speech model such as Whisper. Default: detected.",
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a speech model: transcribe or translate."),
    ] = None
    timestamps: Annotated[
        bool | None,
        typer.Option(help="Of a speech model: write the times of each piece of text, or none."),
    ] = None
    session: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Go on from a session that --save-session wrote: the prompt follows its tokens.",
        ),
    ] = None
    save_session: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Compute the prompt, save the session to FILE, and stop."
        ),
    ] = None


@dataclass(frozen=True)
class StopOptions:
    """Where a text ends."""

    stop: options.Stop = None
    eos: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-ids",
            "--eos",
            metavar="ID",
            help="Stop at this token instead of the model's own. May be repeated.",
        ),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the model's end-of-sequence token.")
    ] = False


@dataclass(frozen=True)
class OutputOptions:
    """What is given beside one text."""

    samples: Annotated[
        int,
        typer.Option("-n", metavar="N", help="Number of samples, with --temperature and --json."),
    ] = 1
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Give the log-probability of each token and of the N most likely ones; with --json.",
        ),
    ] = None
    scorer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            help="Artifact of a model that compares two texts (a cross-encoder): a search goes by its scores.",
        ),
    ] = None


@dataclass(frozen=True)
class StructureOptions:
    """What the text is to follow."""

    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="The text is JSON of this schema."
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(metavar="R", help="The text matches this regular expression (Rust's syntax)."),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="The text follows this Lark grammar."
        ),
    ] = None


@dataclass(frozen=True)
class Built(options.Building):
    """How a model is compiled, and what runs it."""

    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What runs a model: onnx (ONNX Runtime on the CPU), triton (Triton kernels and CUDA graphs on a CUDA "
            "GPU, for all recipes but those whose methods need equal bits in any batch or the cache in the host's "
            "memory, which are refused by name) or eager (PyTorch's reference; slow).",
        ),
    ] = "onnx"


@options.grouped
def run(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|MODEL",
            help="Artifact, model directory, GGUF file or cached repository (org/name).",
        ),
    ],
    *,
    prompts: PromptOptions,
    adapter: options.Adapter = None,
    max_new_tokens: options.MaxNewTokens = 64,
    sampling: options.Sampling,
    ends: StopOptions,
    more: OutputOptions,
    structure: StructureOptions,
    loading: options.Loading,
    building: Built,
    as_json: options.Json = False,
) -> None:
    """Continue a prompt and stream the text.

    A model is compiled first, for this run only. The options --target, --recipe, --tokenizer,
    --max-context, --merge-adapter, --trust-remote-code and --download apply only to that build.
    """
    from accel.runtime.decode.sampling_params import SamplingParams

    if not as_json and (more.samples > 1 or more.logprobs is not None):
        raise typer.BadParameter("-n and --logprobs give more than a text; add --json")
    prompt = _prompt(
        prompts.prompt, prompts.prompt_file, prompts.tokens, needed=prompts.source is None
    )
    params = SamplingParams(
        max_tokens=max_new_tokens,
        **sampling.options(),
        stop=ends.stop or None,
        stop_token_ids=ends.eos or (),
        ignore_eos=ends.ignore_eos or bool(ends.eos),
        n=more.samples,
        logprobs=more.logprobs,
        structured_outputs=_structure(structure.json_schema, structure.regex, structure.grammar),
    )
    settings: dict[str, Any] = {
        "encoder_input": None if prompts.source is None else _source(prompts.source),
        "language": prompts.language,
        "task": prompts.task,
        "timestamps": prompts.timestamps,
        "adapter": adapter,
        "sampling_params": params,
    }
    opened = open_model(path, context, **vars(loading), **building.options())
    with opened as model, _scorer(more.scorer) as settings["scorer"]:
        if prompts.save_session is not None:
            if prompts.session is not None:
                raise typer.BadParameter("--session and --save-session: use one of them")
            with model.prompt_session(prompt, adapter=adapter) as held:
                held.save(prompts.save_session)
        elif prompts.session is not None:
            if more.samples > 1:
                raise typer.BadParameter("--session gives one sample; leave -n out")
            with model.open_session(prompts.session) as held:
                _stream(model, prompt, {**settings, "session": held}, as_json)
        elif as_json:
            out = model.generate(prompt, **settings)
            found = [_found(out, i) for i in range(more.samples)]
            shown = found[0] if more.samples == 1 else {"samples": found}
            print_json({**shown, "stats": out.stats})
        else:
            _stream(model, prompt, settings)


def _scorer(path: Path | None) -> AbstractContextManager[CompiledModel | None]:
    """The model that gives texts their scores."""
    from accel.runtime.model.load import load

    return nullcontext() if path is None else load(path)


def _structure(
    json_schema: Path | None, regex: str | None, grammar: Path | None
) -> StructuredOutputsParams | None:
    """What the text is to follow, of at most one option."""
    from accel.runtime.decode.structured_outputs import StructuredOutputsParams

    given = {"json": json_schema, "regex": regex, "grammar": grammar}
    texts: dict[str, Any] = {
        kind: options.utf8(value.read_bytes(), str(value)) if isinstance(value, Path) else value
        for kind, value in given.items()
        if value is not None
    }
    if len(texts) > 1:
        names = {"json": "--json-schema", "regex": "--regex", "grammar": "--grammar"}
        raise typer.BadParameter(f"{' and '.join(names[kind] for kind in texts)}: use one of them")
    return StructuredOutputsParams(**texts) if texts else None


def _found(out: Output, i: int) -> dict[str, Any]:
    """One sample, as JSON."""
    told: dict[str, Any] = {
        "tokens": out.tokens[i],
        "text": out.text[i] if out.text is not None else None,
        "finish_reason": out.finish_reason[i],
        "stop_reason": out.stop_reason[i],
    }
    if out.logprobs is not None:
        told["logprobs"] = _scores(out.logprobs[i])
    return told


def _scores(lines: Sequence[Mapping[int, Logprob]]) -> list[dict[int, dict[str, Any]]]:
    """The log-probabilities of each token, as JSON."""
    return [{token: asdict(one) for token, one in line.items()} for line in lines]


def _source(text: str) -> Any:
    """What the encoder takes: text, or the array in a .npy file."""
    if not text.endswith(".npy"):
        return options.utf8(text.encode("utf-8", "surrogateescape"), "--input")
    from numpy.lib import format as npy

    try:
        with open(text, "rb") as file:
            return npy.read_array(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--input {text} cannot be read as a NumPy array ({error}); write it with numpy.save"
        ) from None


def _prompt(
    text: str | None, file: Path | None, tokens: str | None, needed: bool
) -> str | list[int] | None:
    """The one prompt that was given; stdin where none was and one is needed."""
    names = {"--prompt": text, "--prompt-file": file, "--tokens": tokens}
    given = [name for name, value in names.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} both give a prompt; use one of them")
    if tokens is not None:
        return _ids(tokens)
    if text is not None:
        return options.utf8(text.encode("utf-8", "surrogateescape"), "--prompt")
    if file is not None:
        return options.utf8(file.read_bytes(), str(file)).removesuffix("\n")
    if not needed:
        return None
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter(
            'no prompt; give --prompt TEXT, --prompt-file FILE, --tokens "1,2,3" or text on stdin'
        )
    return options.utf8(sys.stdin.buffer.read(), "stdin").removesuffix("\n")


def _ids(text: str) -> list[int]:
    """Token ids out of `1,2,3` or `1 2 3`."""
    parts = text.replace(",", " ").split()
    for part in parts:
        if not part.removeprefix("-").isdecimal():
            raise typer.BadParameter(
                f"--tokens: {part!r} is not a token id; write token ids as 1,2,3"
            )
    return [int(part) for part in parts]


def _stream(
    model: CompiledModel,
    prompt: str | list[int] | None,
    settings: dict[str, Any],
    as_json: bool = False,
) -> None:
    """Text as it comes; token ids, with commas, for a prompt of token ids. `as_json`: all of it at the end."""
    with model.stream(prompt, **settings) as stream:
        if as_json:
            pieces = list(stream)
            text = "".join(pieces) if isinstance(prompt, str) else None
            told: dict[str, Any] = {
                "tokens": stream.tokens,
                "text": text,
                "finish_reason": stream.finish_reason,
                "stop_reason": stream.stop_reason,
            }
            if settings["sampling_params"].logprobs is not None:
                told["logprobs"] = _scores(stream.logprobs)
            print_json({**told, "stats": stream.stats})
            return
        between, silent = "", True
        for piece in waited(stream):
            text = piece if isinstance(piece, str) else f"{between}{piece}"
            between, silent = ",", silent and not text
            sys.stdout.write(text)
            sys.stdout.flush()
        stats = stream.stats
    typer.echo()
    if silent and stats["finish"][0] == "eos":
        typer.echo(
            "note: the text ended with its first token; --ignore-eos goes on, and a chat model answers in "
            "`accel-compile chat`",
            err=True,
        )
    if sys.stderr.isatty():
        figures = stats["speculation"]
        drafts = (
            f"{figures['accepted']} of {figures['drafted']} drafted tokens accepted, "
            if figures
            else ""
        )
        typer.echo(
            f"[{stats['tokens']} tokens ({stats['finish'][0]}), {drafts}"
            f"{stats['tokens_per_second']:.0f} tokens/s, "
            f"prompt of {stats['prompt_tokens']} in {stats['prefill_seconds']:.2f} s]",
            err=True,
        )
