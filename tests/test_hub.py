"""Models by the id of their repository: found in the user's Hugging Face cache, downloaded only when asked."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as hub
import models
import pytest
from typer.testing import CliRunner

import accel
from accel import cli
from accel.compiler.explain.subject import subject
from accel.compiler.load.hub import model_folder

COMMIT = "0" * 40
FILES = ("config.json", "generation_config.json", "model.safetensors")


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def one_error(result, *words):
    """It ended with an error, whose line holds these words."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 1 and len(lines) == 1, result.output
    assert all(word in lines[0] for word in words), lines[0]
    return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model directory, with files that a download leaves out."""
    folder = tmp_path_factory.mktemp("model")
    models.ARCHITECTURES["llama"]().save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "consolidated.safetensors").write_bytes(b"once more")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache, empty; nobody answers at the hub's address."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def put(cache: Path, name: str, model: Path, files=FILES) -> Path:
    """A repository as huggingface_hub lays it out."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file in files:
        shutil.copy(model / file, snapshot / file)
    return snapshot


@pytest.mark.long
def test_a_repository_in_the_cache_is_compiled_by_its_id(cache, model):
    snapshot = put(cache, "org/tiny-llama", model)
    assert model_folder("org/tiny-llama") == snapshot
    words = ("--tokens", "5,6,7", "--json", "--max-context", 64, "--max-tokens", 8)
    named, direct = (call("run", given, *words) for given in ("org/tiny-llama", model))
    assert json.loads(named.stdout)["tokens"] == json.loads(direct.stdout)["tokens"]
    assert subject("org/tiny-llama", 64, lambda *_: None).program.facts.name == "LlamaForCausalLM"


def test_a_name_that_is_nowhere(cache, model, tmp_path):
    put(cache, "org/tiny-llama", model)
    near = "near names in the cache: org/tiny-llama"
    for name in ("org/tiny-lama", "other/Tiny-Llama"):
        with pytest.raises(accel.CaptureError, match="neither a folder nor a repository") as raised:
            accel.optimize(name)
        assert near in str(raised.value) and "download=True" in str(raised.value)
    one_error(call("build", "org/tiny-lama", "--out", tmp_path / "out"), near, "--download")
    one_error(call("run", "org/tiny-lama", "--tokens", "1"), near, "--download", "an artifact")
    with pytest.raises(accel.CaptureError, match="does not exist; give a GGUF file or a model dir"):
        model_folder("a/b/c")


def test_a_file_that_is_nowhere_is_no_repository(cache, tmp_path, monkeypatch):
    """Only what can be compiled is near, and no GGUF file is downloaded by its path."""
    monkeypatch.chdir(tmp_path)
    for download in (False, True):
        with pytest.raises(accel.CaptureError, match="exist; give a GGUF file or") as raised:
            model_folder("tiny.Q4_1.gguf", download)
        assert "download" not in str(raised.value)
    commands = (["build", "tiny.Q4_1.gguf", "--out", "x"], ["run", "tiny.Q4_1.gguf"])
    Path("choose-tiny.Q4_1.gguf").mkdir()  # results, which nothing compiles
    for words in commands:
        assert "did you mean" not in one_error(call(*words), "give a GGUF file")
    Path("tiny.Q4_0.gguf").write_bytes(b"GGUF")
    for words in commands:
        one_error(call(*words), "did you mean tiny.Q4_0.gguf?")


def test_a_cache_with_nothing_in_it(cache):
    with pytest.raises(accel.CaptureError) as raised:
        model_folder("org/name")
    assert "near names" not in str(raised.value)


def test_a_repository_without_its_weights(cache, model):
    put(cache, "org/half", model, FILES[:1])
    with pytest.raises(accel.CaptureError, match="org/half lies .* in part only; .* download=True"):
        model_folder("org/half")


def test_a_download_that_fails_is_an_error_of_ours(cache):
    with pytest.raises(accel.CaptureError, match="org/name cannot be downloaded .* network"):
        model_folder("org/name", download=True)


@pytest.fixture
def served(model, monkeypatch):
    """A hub on this machine that has one repository; the paths that it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.split("?")[0]
            asked.append((self.command, path))
            names = [p.name for p in model.iterdir()]
            if path.startswith("/api/models/org/served/revision/"):
                told = {
                    "id": "org/served",
                    "sha": COMMIT,
                    "siblings": [{"rfilename": n} for n in names],
                }
                body = json.dumps(told).encode()
            elif path.startswith("/api/models/org/served/tree/"):
                files = [{"type": "file", "path": n, "size": 1, "oid": n} for n in names]
                body = json.dumps(files).encode()
            elif path.startswith("/org/served/resolve/") and path.rpartition("/")[2] in names:
                body = (model / path.rpartition("/")[2]).read_bytes()
            else:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{path.rpartition("/")[2]}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    yield asked
    server.shutdown()
    server.server_close()


def test_only_a_download_asks_the_hub(cache, served, model):
    with pytest.raises(accel.CaptureError, match="neither a folder nor"):
        model_folder("org/served")
    assert not served
    folder = model_folder("org/served", download=True)
    assert served and sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    assert all((folder / n).read_bytes() == (model / n).read_bytes() for n in FILES)
    served.clear()
    assert model_folder("org/served") == folder and not served
    (folder / FILES[0]).unlink()
    with pytest.raises(accel.CaptureError, match="in part only"):
        model_folder("org/served")
