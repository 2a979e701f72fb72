"""serve: an OpenAI-compatible HTTP server over artifacts."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from accel.commands import options
from accel.ir.errors import InputError, extra

EXAMPLES = """\b
Examples:
  accel-compile serve ./artifact
  accel-compile serve ./artifact ./artifact-int4 --memory 8 --idle-unload 600
  ACCEL_API_KEY=secret accel-compile serve ./artifact --host 0.0.0.0
"""


@dataclass(frozen=True)
class Address:
    """Where clients reach the server."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 takes any that is free.")
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="ACCEL_API_KEY",
            metavar="KEY",
            help="Ask clients for this key, but at /, /health and /metrics. Default: ask for none.",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Without a key: a name by which clients may call this machine, beside localhost and "
            "addresses; * for any. Repeatable.",
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A site whose pages may use the server, such as https://app.example; * for any. "
            "Repeatable. Default: none.",
        ),
    ] = None
    adapters: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="With a key: a folder of LoRA adapters that clients may load. Repeatable. Default: none.",
        ),
    ] = None


@dataclass(frozen=True)
class RequestLimits:
    """What clients may ask for."""

    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Most texts that run at once; never more than the artifact's max_batch, the default.",
        ),
    ] = None
    max_waiting: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Most texts that wait; beyond it clients are answered 429."
        ),
    ] = 64
    max_body: Annotated[
        float, typer.Option(min=0.001, max=1e6, metavar="MB", help="Largest body of a request.")
    ] = 4.0
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Longest time of a request, in seconds.")
    ] = 600.0
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            max=1e6,
            metavar="S",
            help="After SIGTERM: seconds that the requests taken have to end.",
        ),
    ] = 30.0
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse fields that are not known. Default: the header X-Accel-Ignored names them.",
        ),
    ] = False


@dataclass(frozen=True)
class Loaded:
    """Which models are loaded."""

    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            metavar="GB",
            help="Most memory of the models that are loaded, weights and state; those that nobody uses make room. "
            "Default: no limit.",
        ),
    ] = None
    idle_unload: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=1e9,
            metavar="S",
            help="Unload a model that nobody used for so many seconds. Default: never.",
        ),
    ] = None


@options.grouped
def serve(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Artifacts. A model's id is the name of its folder."),
    ],
    *,
    address: Address,
    bounds: RequestLimits,
    loaded: Loaded,
    chat_template: options.ChatTemplate = None,
    sampler: options.Sampler = None,
    loading: options.Loading,
) -> None:
    """Serve artifacts to clients of OpenAI and Anthropic, with a page at / that compares them.

    One artifact is loaded at the start. Of several each is checked then, and loaded when it is first asked for.

    GET /v1/models, POST /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages (whole, or
    streamed as server-sent events), POST /v1/messages/count_tokens, /v1/embeddings, /infill (as
    llama.cpp's), /tokenize and /detokenize, /v1/load_lora_adapter and /v1/unload_lora_adapter, GET /health,
    GET /metrics (Prometheus). Ctrl-C or SIGTERM ends it: no new requests, and those taken end within --drain
    seconds. Needs the extra `serve`.
    """
    with extra("serve"):
        import prometheus_client as _  # noqa: F401  (the rest of the extra comes by the next two)

        from accel.serve.app import application
        from accel.serve.limits import Access, Limits
        from accel.serve.loading import Models
        from accel.serve.models import source
        from accel.serve.server import LOOPBACK, bound, server

    api_key = address.api_key
    if api_key is not None and not (api_key.isascii() and api_key.strip()):
        raise InputError("--api-key is empty or not ASCII; give letters, digits and signs")
    origins = address.cors or []
    for origin in origins:
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise InputError(
                f"--cors {origin} is no origin; give one such as https://app.example, or *"
            )
    for folder in address.adapters or []:
        if not folder.is_dir():
            raise InputError(f"--adapters {folder} is no folder; give one that holds adapters")
        if api_key is None:
            raise InputError("--adapters lets clients have files read; give an --api-key too")
    text = None if chat_template is None else options.template(chat_template)
    drawn = None if sampler is None else options.sampler(sampler)
    how = {"max_batch": bounds.max_batch, "max_waiting": bounds.max_waiting, **vars(loading)}
    with bound(address.host, address.port) as listener, ExitStack() as stack:
        sources = [source(path, text, drawn, **how) for path in paths]
        memory = None if loaded.memory is None else round(loaded.memory * 1e9)
        say = partial(typer.echo, err=True)
        models = stack.enter_context(
            Models(sources, memory=memory, idle=loaded.idle_unload, say=say)
        )
        if len(sources) == 1:
            models.load(sources[0].name)
        app = application(
            models,
            access=Access(api_key, address.allowed_host or [], origins, address.adapters or []),
            limits=Limits(round(bounds.max_body * 1e6), bounds.timeout, bounds.strict),
        )
        host, number = listener.getsockname()[:2]
        if host not in LOOPBACK and api_key is None:
            typer.echo("whoever reaches this address may use it: no --api-key is set", err=True)
        shown = f"[{host}]" if ":" in host else host

        def ready() -> None:
            typer.echo(f"serving on http://{shown}:{number}")

        server(app, bounds.drain, ready).run(sockets=[listener])
