"""The application: the endpoints, behind the gates."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from accel.ir.errors import AccelError
from accel.serve import errors
from accel.serve.body import IGNORED
from accel.serve.errors import ApiError
from accel.serve.gate import BodyGate, HeadGate, HostGate, KeyGate
from accel.serve.limits import Access, Limits
from accel.serve.loading import Models
from accel.serve.metrics import Metrics, Watched
from accel.serve.serving import Holding, Serving
from accel.serve.stream import Gone


def application(
    models: Models, *, access: Access | None = None, limits: Limits | None = None
) -> FastAPI:
    """The server's application."""
    access = access or Access()
    adapters = () if access.key is None else access.adapters
    serving = Serving(models, Metrics(models), limits or Limits(), adapters)
    app = FastAPI(title="accel", openapi_url=None)  # its pages of docs would fetch scripts
    app.state.live = serving.live  # for who ends the server
    endpoints = import_module(f"{__package__}.endpoints")
    for name in sorted(one.name for one in pkgutil.iter_modules(endpoints.__path__)):
        import_module(f"{endpoints.__name__}.{name}").add(app, serving)
    _guard(app, serving, access)
    return app


def _guard(app: FastAPI, serving: Serving, access: Access) -> None:
    """Let errors be answers, and requests pass the gates."""
    for kind, handler in (
        (ApiError, errors.on_exception),
        (AccelError, errors.on_exception),
        (HTTPException, errors.on_http_exception),
        (Gone, errors.on_gone),
        (Exception, errors.on_exception),
    ):
        app.add_exception_handler(kind, handler)
    app.add_middleware(Holding)
    app.add_middleware(BodyGate, most=serving.limits.body, live=serving.live)
    if access.key is not None:
        app.add_middleware(KeyGate, key=access.key)
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients send many of their own
            expose_headers=["Retry-After", IGNORED],
        )
    if access.key is None:
        app.add_middleware(HostGate, allowed=access.hosts)
    app.add_middleware(HeadGate)
    routes = [route for route in app.routes if isinstance(route, Route)]
    app.add_middleware(Watched, metrics=serving.metrics, routes=routes)
