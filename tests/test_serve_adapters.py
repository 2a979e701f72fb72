"""Adapters that clients add to a model that is served, and take away."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import accel
from accel import cli
from accel.commands.demo import reference
from accel.serve import loading
from accel.serve.limits import Access
from accel.serve.loading import Models
from accel.serve.models import source

from . import adapter_case, serve_case
from .test_serve import error_of

JSON = {"content-type": "application/json"}
PROMPT = "import os\n\ndef "
ASK = {"model": "artifact", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
ASK |= {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An artifact with the adapter `one`; folders of adapters that clients may load, and of others."""
    folder, model = (
        tmp_path_factory.mktemp("adapters"),
        AutoModelForCausalLM.from_pretrained(reference()),
    )
    inside, outside, ends = folder / "inside", folder / "outside", ["q_proj", "v_proj"]
    one = adapter_case.write(inside / "one", model, ends, rank=3, alpha=9)
    adapter_case.write(inside / "two", model, ends, rank=5, alpha=20, seed=1)
    adapter_case.write(inside / "wide", model, ["k_proj"])
    adapter_case.write(inside / "dora", model, ends, use_dora=True, init_lora_weights="pissa")
    tensors = adapter_case.tensors_of(one)
    adapter_case.written(
        inside / "other",
        {name: t[:, 1:].contiguous() if "_A" in name else t for name, t in tensors.items()},
    )
    adapter_case.write(outside / "three", model, ends)
    (inside / "link").symlink_to(outside / "three")
    (inside / "linked").mkdir()
    for file in (outside / "three").iterdir():
        (inside / "linked" / file.name).symlink_to(file)
    shutil.copytree(inside / "two", inside / "deep")
    (inside / "deep" / "adapter_config.json").write_text("[" * 100_000)
    artifact = serve_case.build(folder, adapters={"one": one}, max_context=64, max_batch=2)
    with accel.load(artifact, threads=1) as built:
        built.load_adapter("two", inside / "two")
        want = {
            name: built.generate(PROMPT, 8, adapter=name, eos=[]).tokens[0]
            for name in (None, "one", "two")
        }
    assert len({tuple(tokens) for tokens in want.values()}) == 3
    return SimpleNamespace(artifact=artifact, inside=inside, outside=outside, want=want)


@pytest.fixture
def http(made):
    sources = [source(made.artifact, threads=1)]
    with (
        Models(sources, idle=None) as models,
        serve_case.over(models, access=Access("key", adapters=[made.inside])) as server,
        httpx.Client(base_url=server.url, timeout=60, headers={"x-api-key": "key"}) as found,
    ):
        found.models = models
        yield found


def ask(http, model):
    answer = http.post("/v1/completions", json={**ASK, "model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def bring(http, name, path, **more):
    body = json.dumps({"lora_name": name, "lora_path": path, **more})
    return http.post("/v1/load_lora_adapter", content=body, headers=JSON)


def take(http, name, **more):
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name, **more})


def ids(http):
    return {one["id"]: one["parent"] for one in http.get("/v1/models").json()["data"]}


def test_an_adapter_comes_and_goes(http, made):
    own = {"artifact": None, "artifact:one": "artifact"}
    assert ids(http) == own
    error = error_of(http.post("/v1/completions", json={**ASK, "model": "artifact:late"}), 404)
    assert error["code"] == "model_not_found"
    answer = bring(http, "late", str(made.inside / "two"), lora_int_id=3)
    assert answer.status_code == 200 and answer.json()["id"] == "artifact:late"
    assert "x-accel-ignored" not in answer.headers
    assert ids(http) == {**own, "artifact:late": "artifact"}
    names = {"artifact": None, "artifact:one": "one", "artifact:late": "two"}
    assert {name: ask(http, name) for name in names} == {n: made.want[a] for n, a in names.items()}
    assert bring(http, "late", "one").status_code == 200, "replaced, by a path in the folder"
    assert ask(http, "artifact:late") == made.want["one"]
    assert take(http, "late", model="artifact").json() == {
        "id": "artifact:late", "object": "model", "deleted": True,
    }  # fmt: skip
    assert ids(http) == own
    error_of(http.post("/v1/completions", json={**ASK, "model": "artifact:late"}), 404)


def test_requests_keep_what_they_use(http, made):
    """It is replaced only when nobody uses it, and taken away at any time."""
    assert bring(http, "late", "two").status_code == 200
    with ExitStack() as held:
        asyncio.run(http.models.use("artifact:late", held))
        error = error_of(bring(http, "late", "one"), 400)
        assert error["code"] == "adapter_in_use" and error["param"] == "lora_name"
        assert take(http, "late").status_code == 200 and "artifact:late" not in ids(http)
    assert bring(http, "late", "one").status_code == 200


def test_adapters_outlive_the_model_being_unloaded(http, made, tmp_path):
    said = []
    http.models._say = said.append
    kept = shutil.copytree(made.inside / "two", made.inside / "kept")
    assert bring(http, "late", "two").status_code == bring(http, "kept", "kept").status_code == 200
    shutil.rmtree(kept)
    (place,) = http.models.places
    http.models._unload(place)
    assert {"artifact:late", "artifact:kept"} <= {*ids(http)} and place.served is None
    assert ask(http, "artifact:late") == made.want["two"]
    assert "artifact:kept" not in ids(http)
    (line,) = [one for one in said if "kept" in one]
    assert line.startswith("artifact: the adapter kept is left out")
    http.models._unload(place)
    assert take(http, "late").status_code == 200
    assert place.served is None and ask(http, "artifact") == made.want[None]


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("one", "two", "the artifact's own"),
        ("a/b", "two", "give letters, digits"),
        ("late", "nothing", "does not exist"),
        ("late", "", "holds no adapter_config.json"),
        ("late", "deep", "is not a configuration"),
        ("late", "wide", "k_proj"),
        ("late", "dora", "pissa"),
        ("late", "other", "trained for another base model"),
        ("late", "../outside/three", "is in no folder of this server's --adapters"),
        ("late", "link", "is in no folder"),
        ("late", "linked", "is in no folder"),
        ("late", "/etc", "is in no folder"),
        ("late", "\0", "is in no folder"),
        ("late", "a" * 5000, "is in no folder"),
        ("late", "\ud800", "is in no folder"),
    ],
)
def test_what_is_refused(http, made, name, path, said):
    error = error_of(bring(http, name, path), 400)
    assert said in error["message"] and str(made.outside) not in error["message"]
    assert [*ids(http)] == ["artifact", "artifact:one"]


def test_what_is_no_request(http, monkeypatch):
    monkeypatch.setattr(loading, "MOST_ADAPTERS", 1)
    assert bring(http, "late", "two").status_code == bring(http, "late", "one").status_code == 200
    assert error_of(bring(http, "more", "one"), 400)["code"] == "too_many_adapters"
    error = error_of(take(http, "lat"), 404)
    assert error["code"] == "adapter_not_found" and "did you mean 'late'" in error["message"]
    assert "the artifact's own" in error_of(take(http, "one"), 400)["message"]
    for body in ({"lora_path": "two"}, {"lora_name": 3, "lora_path": "two"}, {"lora_name": "a"}):
        error_of(http.post("/v1/load_lora_adapter", json=body), 400)
    deep = http.post("/v1/load_lora_adapter", content="[" * 100_000, headers=JSON)
    assert "nested too deeply" in error_of(deep, 400)["message"]
    assert error_of(bring(http, "a", "one", model="other"), 404)["code"] == "model_not_found"


def test_only_with_a_key_and_folders(made):
    sources = [source(made.artifact, threads=1)]
    for access, status in (
        (Access(adapters=[made.inside]), 403),
        (Access("key"), 403),
        (Access("other", adapters=[made.inside]), 401),
    ):
        with (
            Models(sources) as found,
            serve_case.over(found, access=access) as server,
            httpx.Client(base_url=server.url, headers={"x-api-key": "key"}) as client,
        ):
            error_of(bring(client, "late", "two"), status)
            error_of(take(client, "one"), status)
    for arguments, words in (
        (["--adapters", "nothing", "--api-key", "k"], "--adapters nothing is no folder"),
        (["--adapters", str(made.inside)], "give an --api-key too"),
    ):
        result = CliRunner().invoke(cli.app, ["serve", str(made.artifact), *arguments])
        assert result.exit_code == 1 and words in result.stderr
