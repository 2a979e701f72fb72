"""What a request passes before anything reads it: the head's limits, hosts, keys, other pages, the server's end."""

import json
import logging
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest
from typer.testing import CliRunner

from accel import cli
from accel.serve import connection, gate
from accel.serve.limits import Access

from . import serve_case
from .test_serve import error_of

ASKED = {"model": "artifact", "prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return serve_case.build(tmp_path_factory.mktemp("gates"), max_context=64, max_batch=2)


@pytest.fixture(scope="module")
def server(artifact):
    with serve_case.running([artifact], access=Access(hosts=["my.box"])) as found:
        yield found


def address(server):
    return ("127.0.0.1", int(server.url.rpartition(":")[2]))


def answer(open_socket):
    """All that comes until the other side ends."""
    open_socket.settimeout(20)
    found = b""
    try:
        while part := open_socket.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_a_head_without_an_end_is_refused(server):
    """Before it fills the memory: it is not read to the end."""
    sent = 0
    with socket.create_connection(address(server), 20) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        try:
            while sent < 8 << 20:
                sent += one.send(b"x" * (1 << 16))
        except OSError:
            pass
        else:
            assert b" 431 " in answer(one)
    assert sent < 8 << 20, "it was closed"


@pytest.mark.parametrize("lines", [1, 101], ids=["large", "many"])
def test_a_whole_head_that_is_too_large_is_refused(server, lines):
    value = "x" * (70_000 if lines == 1 else 1)
    head = "".join(f"X{i}: {value}\r\n" for i in range(lines))
    with socket.create_connection(address(server), 20) as one:
        one.sendall(f"GET /health HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode())
        one.shutdown(socket.SHUT_WR)
        said = answer(one)
    first, _, body = said.partition(b"\r\n\r\n")
    assert b" 431 " in first.split(b"\r\n")[0]
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_what_is_no_http_is_told_in_json(server):
    with socket.create_connection(address(server), 20) as one:
        one.sendall(b"hello\r\n\r\n")
        assert json.loads(answer(one).partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_head_that_does_not_come_is_left(server, monkeypatch):
    """Also a second one; those that come are answered, one after the other."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for before in (b"", b"GET /health HT"):
        with socket.create_connection(address(server), 20) as one:
            one.sendall(before)
            assert answer(one) == b""
    with socket.create_connection(address(server), 20) as one:
        one.settimeout(20)
        for _ in range(3):
            one.sendall(whole)
            found = one.recv(1 << 16)
            while b'"ok"' not in found:
                found += one.recv(1 << 16)
            time.sleep(0.2)
        one.sendall(whole[:20])
        assert answer(one) == b""


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:99", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("192.0.2.7", 200),
        ("my.box:80", 200), ("a.localhost.", 200), ("evil.example", 403), ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403), ("evil.example:127", 403), ("", 403),
    ],
)  # fmt: skip
def test_hosts(server, host, status):
    found = httpx.get(f"{server.url}/v1/models", headers={"host": host})
    assert found.status_code == status
    if status == 403:
        assert error_of(found, 403)["code"] == "host_not_allowed"


def test_a_key_is_taken_in_both_headers_and_no_host_is_asked_for(artifact):
    with serve_case.running([artifact], access=Access("key")) as server:
        url = f"{server.url}/v1/models"
        for headers, status in (
            ({"x-api-key": "key"}, 200),
            ({"authorization": "Bearer key"}, 200),
            ({"authorization": "Basic a", "x-api-key": "key"}, 200),
            ({"x-api-key": "other"}, 401),
            ({}, 401),
        ):
            assert httpx.get(url, headers={"host": "a.name", **headers}).status_code == status


def test_other_pages_read_nothing_unless_they_may(server, artifact):
    def asks(url, origin):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "anthropic-version,x-api-key,x-stainless-lang"
        before = httpx.options(f"{url}/v1/completions", headers=asked)
        told = httpx.get(f"{url}/health", headers={"origin": origin}).headers
        return before.status_code, told.get("access-control-allow-origin")

    assert asks(server.url, "https://a.example") == (405, None)
    access = Access("key", origins=["https://a.example"])
    with serve_case.running([artifact], access=access) as other:
        assert asks(other.url, "https://a.example") == (200, "https://a.example")
        assert asks(other.url, "https://b.example") == (400, None)


def test_half_a_body_is_told_that_the_server_ends(artifact, monkeypatch):
    """When the time to end is over, not when the body's is."""
    assert gate.BODY_SECONDS > 20
    said = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handle", said.append)
    with serve_case.running([artifact], drain=0.3) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        with socket.create_connection(address(server), 20) as one:
            one.sendall(head)
            time.sleep(0.2)
            server.tell()
            told = answer(one)
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert b" 503 " in told and b"shutting_down" in told
    assert not said, "no traceback"


def test_who_is_told_that_it_serves_is_answered(artifact):
    """It is said once connections are taken."""
    command = [sys.executable, "-m", "accel.cli", "serve", artifact, "--port", "0"]
    command += ["--threads", "1", "--allowed-host", "my.box", "--cors", "https://a.example"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            url = re.search(r"http://\S+", run.stdout.readline())[0]
            headers = {"host": "my.box", "origin": "https://a.example"}
            found = httpx.get(f"{url}/health", headers=headers, timeout=1)
            assert found.headers["access-control-allow-origin"] == "https://a.example"
        finally:
            run.terminate()


def test_an_origin_is_no_name(artifact):
    said = CliRunner().invoke(cli.app, ["serve", str(artifact), "--cors", "a.example"])
    assert said.exit_code == 1 and "--cors a.example is no origin" in said.stderr
