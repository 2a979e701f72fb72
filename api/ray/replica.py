"""Ray Serve around the server of `accel-compile serve`: a replica is that application over an engine of its own."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from accel.ir.errors import InputError
from accel.ray.room import actor_environment, check_room, machines, share
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.inputs.prompts import as_count
from accel.runtime.serve.opening import check_served
from accel.serve.app import application
from accel.serve.gate import ANY_HOST
from accel.serve.limits import Access, Limits
from accel.serve.loading import Models
from accel.serve.models import source


@serve.ingress()
class Replica:
    """Loads the artifact in its own process: all that travels there is a path and options."""

    def __init__(
        self, path: str, key: str | None, limits: Limits | None, how: dict[str, Any]
    ) -> None:
        """`how`: of `accel.serve.models.source`. Raises AccelError."""
        self._stack = ExitStack()
        served = self._stack.enter_context(source(Path(path), **how).open())
        models = Models([served])
        self._made = application(models, access=Access(key, [ANY_HOST]), limits=limits)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._made

    def __del__(self) -> None:
        self._stack.close()


def app(
    path: str | os.PathLike[str],
    *,
    replicas: int = 1,
    cpus: float = 1,
    max_batch: int | None = None,
    max_waiting: int = 64,
    key: str | None = None,
    limits: Limits | None = None,
    chat_template: str | None = None,
    mapped: bool = False,
) -> serve.Application:
    """The server of an artifact, for `ray.serve.run`. It is checked here and loaded by each replica, at the same path
    on every machine.

    Args:
        path: the artifact's folder. The model's id is its name.
        replicas: how many, each with a model and an engine.
        cpus: CPUs of each; its compute threads are as many, at least one.
        max_batch, max_waiting: as of `Engine`, of each. Ray gives a replica as many requests as both together, and
            keeps as many more; beyond them it answers 503.
        key, limits: as of `accel.serve.app.application`.
        chat_template: in place of the model's own: its text, or the name of one.
        mapped: replicas of a machine share the weights in memory, and none packs a copy. Low-bit weights are shared in
            any case; calls of several tokens over others take longer so.

    Raises:
        AccelError: the artifact cannot be served, an option is out of range, or the Ray that runs has too few CPUs.
    """
    artifact = open_artifact(path)
    check_served(artifact)
    most = artifact.facts.max_batch
    if max_batch is not None:
        most = as_count(max_batch, "max_batch", 1, most)
    as_count(max_waiting, "max_waiting", 1)
    as_count(replicas, "replicas", 1)
    if key is not None and not (key.isascii() and key.strip()):
        raise InputError("key is empty or not ASCII; give letters, digits and signs")
    threads = share(cpus)
    if ray.is_initialized():
        check_room(machines(), replicas, cpus, "replicas")
    room = most + max_waiting
    deployed = serve.deployment(
        Replica,
        name="accel",
        num_replicas=replicas,
        max_ongoing_requests=room,
        max_queued_requests=room,
        ray_actor_options={"num_cpus": cpus, "runtime_env": actor_environment(threads)},
    )
    how = {"max_batch": most, "max_waiting": max_waiting, "threads": threads, "mapped": mapped}
    folder = str(artifact.path.resolve())
    return deployed.bind(folder, key, limits, {**how, "chat_template": chat_template})
