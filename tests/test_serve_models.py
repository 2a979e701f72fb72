"""Several models behind one server: loaded when they are asked for, unloaded for others, or when nobody asks."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import httpx
import psutil
import pytest
from fastapi import Request
from typer.testing import CliRunner

from accel import cli
from accel.ir.errors import InputError
from accel.runtime.artifact.artifact import open_artifact
from accel.runtime.serve.opening import memory_of
from accel.serve import loading, stream
from accel.serve.endpoints import health
from accel.serve.errors import ApiError
from accel.serve.limits import Limits
from accel.serve.loading import Models
from accel.serve.models import source
from accel.serve.schemas import Schema

from . import serve_case
from .test_serve import error_of, metrics

ASK = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
WAIT = 10.0


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return serve_case.build(tmp_path_factory.mktemp("models"), max_context=128, max_batch=2)


@pytest.fixture
def paths(artifact, tmp_path):
    """The artifact under three names."""
    return [shutil.copytree(artifact, tmp_path / name) for name in "abc"]


@contextmanager
def serving(paths, monkeypatch=None, drain=20.0, seconds=60.0, **options):
    """A client of a server of artifacts that are not loaded; `options` of `Models`."""
    sources = [source(path, threads=1, max_waiting=2) for path in paths]
    with (
        Models(sources, **options) as models,
        serve_case.over(models, drain=drain, limits=Limits(1 << 20, seconds)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        http.models, http.server, http.size = models, server, sources[0].bytes
        yield http


def ask(http, model, **more):
    return http.post("/v1/completions", json={**ASK, "model": model, **more})


def loaded(http):
    return [one["id"] for one in http.get("/v1/models").json()["data"] if one["loaded"]]


@contextmanager
def held(http, model):
    """As by a request that runs."""
    with ExitStack() as stack:
        asyncio.run(http.models.use(model, stack))
        yield


def until(said):
    end = time.monotonic() + WAIT
    while not said():
        assert time.monotonic() < end
        time.sleep(0.005)


class Gate:
    """Loads wait until it is open, or until one of them is broken."""

    def __init__(self, monkeypatch):
        self.begun, self.open, self.broken = [], threading.Event(), set()
        opened = loading.Source.open

        @contextmanager
        def gated(source):
            self.begun.append(source.name)
            assert self.open.wait(WAIT)
            if source.name in self.broken:
                raise MemoryError("no room")
            with opened(source) as served:
                yield served

        monkeypatch.setattr(loading.Source, "open", gated)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def test_a_model_is_loaded_once_for_all_who_ask(paths, gate):
    gate.open.set()
    with serving(paths) as http, ThreadPoolExecutor(6) as pool:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["a", "b", "c"]
        assert loaded(http) == []
        assert ask(http, "a").status_code == 200 and loaded(http) == ["a"]
        gate.open.clear()
        waits = [pool.submit(ask, http, "b") for _ in range(2)]
        until(lambda: len(http.models.places[1].waits) == 2)
        error_of(ask(http, "b"), 429)  # --max-waiting
        assert http.get("/health").json() == {"status": "ok"}
        assert ask(http, "a").status_code == 200, "another model answers"
        assert http.get("/v1/models/b").json()["loaded"] is False
        gate.open.set()
        texts = [one.result().json()["choices"][0]["text"] for one in waits]
        assert texts == [ask(http, "a").json()["choices"][0]["text"]] * 2
        assert gate.begun == ["a", "b"] and loaded(http) == ["a", "b"]
        found = metrics(http)
        assert [found["accel_loaded", name] for name in "abc"] == [1, 1, 0]
        assert found["accel_loads_total", "b"] == 1 and found["accel_requests_total", "b"] == 2


def test_an_answer_at_once_has_its_model_loaded(paths, monkeypatch):
    class Asked(Schema):
        model: str

    def add(app, serving):
        @app.post("/v1/context")
        async def context(request: Request):
            return await serving.at_once(request, Asked, answer)

        def answer(asked):
            served, _ = serving.models.find(asked.model)
            assert serving.models.places[1].users == {None: 1}
            return {"context": served.model.facts.max_context}

    monkeypatch.setattr(health, "add", add)
    with serving(paths[:2]) as http:
        with pytest.raises(ApiError, match="the model b is not loaded"):
            http.models.find("b")
        asked = {"model": "b"}
        assert http.post("/v1/context", json=asked).json() == {"context": 128}
        assert loaded(http) == ["b"] and not http.models.places[1].users
        error_of(http.post("/v1/context", json={"model": "c"}), 404)


def test_what_cannot_be_loaded_is_an_error_and_may_be_tried_again(paths, gate):
    said = []
    gate.open.set()
    gate.broken.add("a")
    with serving(paths[:2], say=said.append) as http:
        error = error_of(ask(http, "a"), 500)
        assert error["code"] == "load_failed" and "the model a cannot be loaded" in error["message"]
        assert said == ["a cannot be loaded: MemoryError: no room"]
        assert ask(http, "b").status_code == 200
        gate.broken.clear()
        assert ask(http, "a").status_code == 200 and gate.begun == ["a", "b", "a"]
        assert metrics(http)["accel_load_failures_total", "a"] == 1


def test_an_artifact_that_is_broken_or_gone_after_the_start(paths):
    said = []
    with serving(paths, say=said.append) as http:
        with open(paths[0] / "weights.bin", "r+b") as file:
            file.write(b"\0\1\2\3")
        kept = paths[1].rename(paths[1].with_name("kept"))
        for name in "ab":
            error = error_of(ask(http, name), 500)
            assert str(paths[0].parent) not in error["message"], "no path of the server"
        assert "weights.bin" in said[0] and "b cannot be loaded" in said[1]
        assert ask(http, "c").status_code == 200
        kept.rename(paths[1])
        assert ask(http, "b").status_code == 200
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["a", "b", "c"]


def test_the_least_used_makes_room_and_none_that_runs(paths):
    size = source(paths[0]).bytes
    with serving(paths, memory=2 * size) as http:
        for name in "abac":
            assert ask(http, name).status_code == 200
        assert loaded(http) == ["a", "c"]
        with held(http, "a"):
            assert ask(http, "c").status_code == 200
            assert ask(http, "b").status_code == 200
            assert loaded(http) == ["a", "b"], "c was used later than a, but a runs"
        found = metrics(http)
        assert found["accel_loads_total", "a"] == 1 and found["accel_requests_total", "a"] == 2
        assert found["accel_requests_total", "c"] == 2 and not found["accel_loaded", "c"]


def test_a_request_waits_in_order_until_what_runs_has_ended(paths):
    """One of a model that has to go comes behind it; if nobody waits any more, nothing goes."""
    size, order = source(paths[0]).bytes, []

    def asked(name):
        assert ask(http, name).status_code == 200
        order.append(name)

    with serving(paths, memory=size) as http, ThreadPoolExecutor(2) as pool:
        with held(http, "a"):
            with pytest.raises(httpx.ReadTimeout):  # it goes away
                ask(httpx.Client(base_url=http.server.url, timeout=0.1), "b")
            until(lambda: not http.models.places[1].asked_for())
            assert ask(http, "a").status_code == 200, "nobody waits for b"
            first = pool.submit(asked, "b")
            until(lambda: http.models.places[0].leaving)
            second = pool.submit(asked, "a")
            until(lambda: http.models.places[0].waits)
            assert not order and loaded(http) == ["a"]
        first.result(), second.result()
        assert order == ["b", "a"] and loaded(http) == ["a"]


def test_what_never_fits(paths, monkeypatch):
    size = source(paths[0]).bytes
    with pytest.raises(InputError, match=f"--memory: a takes about {size:,} bytes"):
        Models([source(path) for path in paths], memory=size - 1)
    with serving(paths[:2], memory=2 * size) as http:
        assert ask(http, "b").status_code == 200
        again = loading.Source.again
        monkeypatch.setattr(
            loading.Source, "again", lambda one: replace(again(one), bytes=3 * size)
        )
        answer = ask(http, "a")
        error = error_of(answer, 503)
        assert error["code"] == "model_too_large" and int(answer.headers["retry-after"]) > 0
        error_of(ask(http, "a"), 503)
        assert loaded(http) == ["b"], "nothing made room for it"
        monkeypatch.undo()
        assert ask(http, "a").status_code == 200


def test_a_model_nobody_uses_is_unloaded(paths, monkeypatch):
    """Its memory is given back, its threads end, and its figures stay."""
    here, trimmed, trim = psutil.Process(), list[int](), loading.trim
    monkeypatch.setattr(
        loading, "trim", lambda: (trimmed.append(here.memory_info().rss), trim())[1]
    )
    with serving(paths[:1], idle=0.3) as http:
        http.models.load("a")
        with held(http, "a"):
            assert ask(http, "a", max_tokens=100, ignore_eos=True).status_code == 200
            time.sleep(0.35)
            assert loaded(http) == ["a"], "it is used"
        full, threads = here.memory_info().rss, threading.active_count()
        until(lambda: loaded(http) == [])
        until(lambda: threading.active_count() < threads)
        assert "accel-engine" not in [one.name for one in threading.enumerate()]
        until(lambda: trimmed)
        assert full - here.memory_info().rss > 0
        assert metrics(http)["accel_generated_tokens_total", "a"] >= 100
        assert ask(http, "a").status_code == 200 and loaded(http) == ["a"]
        found = metrics(http)
        assert found["accel_loads_total", "a"] == 2 and found["accel_requests_total", "a"] == 2


def test_a_model_is_used_until_the_last_event_of_a_stream(paths, monkeypatch):
    told, put = [], stream.EventStream._put
    with serving(paths[:1]) as http:
        (place,) = http.models.places
        monkeypatch.setattr(
            stream.EventStream,
            "_put",
            lambda *given: told.append(dict(place.users)) or put(*given),
        )
        assert "[DONE]" in ask(http, "a", stream=True).text
        assert told == [{None: 1}] * len(told) and len(told) > 1
        until(lambda: not place.users)
        for wrong in ({"temperature": -1}, {"prompt": []}):
            assert ask(http, "a", **wrong).status_code == 400
        until(lambda: not place.users)


def test_a_time_limit_and_the_end_of_the_server_end_the_wait_for_a_load(paths, gate):
    with serving(paths[:2], seconds=0.2) as http:
        assert error_of(ask(http, "a"), 504)["code"] == "timeout"
        gate.open.set()
    gate.open.clear()
    with serving(paths[:2], drain=0.1) as http, ThreadPoolExecutor(1) as pool:
        wait = pool.submit(ask, http, "a")
        until(lambda: http.models.places[0].waits)
        http.server.tell()
        assert error_of(wait.result(), 503)["code"] == "shutting_down"
        gate.open.set()


def test_what_a_model_is_counted_with(artifact):
    """Its files, and the state of whole contexts; twice where two processes hold both."""
    found = open_artifact(artifact)
    each, files = found.report["kv_bytes_per_token"], sum(f.bytes for f in found.files.values())
    assert memory_of(found, 2) - memory_of(found, 1) == 128 * each
    assert memory_of(found, 2) == files + 2 * 128 * each
    split = {**found.recipe, "tables": {"schedule": {"use": "splitwise"}}}
    split = replace(found, manifest=replace(found.manifest, recipe=split))
    assert memory_of(split, 2) == 2 * memory_of(found, 2)


def test_the_command(artifact, tmp_path, monkeypatch):
    def said(*arguments):
        result = CliRunner().invoke(cli.app, ["serve", "--port", "0", *map(str, arguments)])
        assert result.exit_code in (1, 2) and not result.stdout
        return result.stderr

    for option, value in (("--memory", "0"), ("--memory", "nan"), ("--idle-unload", "-1")):
        assert option in said(artifact, option, value)
    assert "--memory: artifact takes about" in said(artifact, "--memory", "0.001")
    assert "two artifacts are named artifact" in said(artifact, artifact)
    other = shutil.copytree(artifact, tmp_path / "other")
    (other / "weights.bin").write_bytes(b"")
    assert "weights.bin" in said(artifact, other), "each is checked at the start"


def test_ctrl_c_while_a_model_loads(artifact, tmp_path):
    other = shutil.copytree(artifact, tmp_path / "other")
    command = [
        sys.executable,
        "-m",
        "accel.cli",
        "serve",
        artifact,
        other,
        "--port",
        "0",
        "--drain",
        "0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            url = re.search(r"http://\S+", run.stdout.readline())[0]
            asked = {**ASK, "model": "other"}
            with ThreadPoolExecutor(1) as pool:
                wait = pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=60)
                end = time.monotonic() + WAIT
                while b"weights.bin" not in maps(run.pid) and time.monotonic() < end:
                    time.sleep(0.001)
                run.send_signal(signal.SIGINT)
                assert wait.result().status_code in (200, 503)
            assert run.wait(30) == 128 + signal.SIGINT
            assert "Traceback" not in run.stderr.read()
        finally:
            run.kill()


def maps(process):
    try:
        with open(f"/proc/{process}/maps", "rb") as file:
            return file.read()
    except OSError:
        return b"weights.bin"
