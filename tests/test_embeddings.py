"""Texts become vectors: those of the model's own recipe, by Python and by the server."""

import base64
import json
import struct
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
import torch

import accel
from accel.commands.demo import reference
from accel.compiler.load.sentence import sentence_recipe
from accel.ir.embedding import Embedding
from accel.ir.errors import ArtifactError, CaptureError, InputError, RecipeError
from accel.ir.facts import Facts
from accel.ir.fields import Fields
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.model.embed import batches
from accel.runtime.serve.embedder import Embedder, Late
from accel.runtime.serve.engine import Engine, Full
from accel.serve import prompts
from accel.serve.limits import Limits
from accel.serve.models import Served

from . import adapter_case, serve_case
from .test_serve import error_of

TEXTS = ["def f(x):", "a", "for i in range(10):\n    print(i)\n" * 3, "import os", "a"]
LAYERS, WIDTH, VOCABULARY, CONTEXT = 2, 32, 4096, 64
MODES = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
RECIPE = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def model_of(kind):
    """A small transformers model without a head, with weights of some size."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(1)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2} if kind == "llama" else {"pad_token_id": 1}
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, num_hidden_layers=LAYERS, max_position_embeddings=128, **sizes, **more
    )  # fmt: skip
    made = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for name, one in made.named_parameters():
            one.normal_(0, 0.3 if one.dim() > 1 else 0.1)
            one += 1.0 if name.endswith("norm.weight") or name.endswith("LayerNorm.weight") else 0.0
    return made


def write(folder, kind="bert", pooling="mean_tokens", modules=RECIPE, **limits):
    """A directory as sentence-transformers saves it, with the bundled tokenizer."""
    module = model_of(kind)
    module.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((reference() / "tokenizer.json").read_bytes())
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    modes = {f"pooling_mode_{one}": one == pooling for one in MODES}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes), encoding="utf-8")
    told = json.dumps({"max_seq_length": CONTEXT, "do_lower_case": False, **limits})
    (folder / "sentence_bert_config.json").write_text(told, encoding="utf-8")
    return module


def by_hand(module, ids, pooling="mean", normalize=True):
    """Of each text alone, by transformers."""
    found = []
    for one in ids:
        with torch.no_grad():
            vectors = module(input_ids=torch.tensor([one])).last_hidden_state[0]
        vector = {"mean": vectors.mean(0), "cls": vectors[0], "last": vectors[-1]}[pooling]
        found.append(vector / vector.norm() if normalize else vector)
    return torch.stack(found).numpy()


def tokenizer():
    return Tokenizer(reference() / "tokenizer.json")


def ids_of(texts):
    return [tokenizer().encode(text) for text in texts]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An encoder's artifact from a directory, and its module."""
    folder = tmp_path_factory.mktemp("embeddings")
    module = write(folder)
    out = tmp_path_factory.mktemp("artifacts") / "small"
    accel.optimize(folder, out=out, max_batch=3, verify=False).close()
    return SimpleNamespace(path=out, module=module, folder=folder)


@pytest.fixture(scope="module")
def model(built):
    with accel.load(built.path, threads=1) as found:
        yield found


def test_vectors_are_those_of_the_directorys_recipe(built, model):
    """Batches mix lengths, and the order stays."""
    assert model.facts.embedding == Embedding("mean", True, WIDTH, True)
    assert model.facts.max_context == CONTEXT
    got, want = model.embed(TEXTS), by_hand(built.module, ids_of(TEXTS))
    assert got.dtype == np.float32 and np.abs(got - want).max() < 1e-5
    assert np.array_equal(model.embed("a"), model.embed([tokenizer().encode("a")]))
    assert np.abs(model.embed(["a"]) - got[1:2]).max() < 1e-6
    assert np.abs(got[0] - got[2]).max() > 0.01, "all texts have one vector"
    shuffled = [TEXTS[i] for i in (2, 0, 3)]
    assert np.abs(model.embed(shuffled) - want[[2, 0, 3]]).max() < 1e-5


def test_fewer_dimensions(model):
    whole, cut = model.embed(TEXTS), model.embed(TEXTS, dimensions=8)
    want = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert cut.shape == (len(TEXTS), 8) and np.abs(cut - want).max() < 1e-6
    assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    for wrong in (0, WIDTH + 1, -1, 1.5, True):
        with pytest.raises(InputError, match="dimensions = .* from 1 to 32"):
            model.embed(TEXTS, dimensions=wrong)


@pytest.mark.few(1)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "llama"])
def test_each_pooling_of_encoders_and_decoders(kind, pooling):
    """A decoder's tokens see those before them, an encoder's all: with padding on the right."""
    module = model_of(kind)
    ids = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
    with accel.optimize(
        module, pooling=pooling, target="eager", max_batch=2, max_context=CONTEXT, verify=False
    ) as model:
        assert model.facts.embedding.both_ways == (kind != "llama")
        got, want = model.embed(ids), by_hand(module, ids, pooling)
        assert np.abs(got - want).max() < 1e-5
        other = {"mean": "cls", "cls": "last", "last": "mean"}[pooling]
        assert np.abs(got - by_hand(module, ids, other)).max() > 1e-3, "another pooling passes"


def test_a_decoder_that_was_saved_with_its_head(tmp_path):
    """Its recipe normalises nothing, so nothing is; the head is left out."""
    from transformers import AutoModelForCausalLM

    module = write(tmp_path, "llama", "lasttoken", RECIPE[:2])
    (tmp_path / "model.safetensors").unlink()
    whole = AutoModelForCausalLM.from_config(module.config)
    whole.model.load_state_dict(module.state_dict())
    whole.save_pretrained(tmp_path)
    with accel.optimize(tmp_path, target="eager", max_batch=2, verify=False) as model:
        assert model.facts.embedding == Embedding("last", False, WIDTH, False)
        want = by_hand(module, ids_of(TEXTS), "last", normalize=False)
        assert np.abs(model.embed(TEXTS) - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modules": [*RECIPE, {"type": "a.Dense"}]}, "names Transformer, Pooling, Normalize, Dense"),
        ({"modules": [{**RECIPE[0], "path": "0_Transformer"}, *RECIPE[1:]]}, "in the folder"),
        ({"modules": [RECIPE[0], {**RECIPE[1], "path": "../other"}]}, "outside of the directory"),
        ({"modules": {}}, "no list"),
        ({"modules": [1]}, "no list"),
        ({"pooling": "max_tokens"}, "pools by max_tokens"),
        ({"pooling": "none"}, "pools by nothing"),
        ({"do_lower_case": True}, "do_lower_case"),
    ],
)  # fmt: skip
def test_recipes_that_are_computed_otherwise_are_refused(tmp_path, monkeypatch, change, said):
    none = SimpleNamespace(save_pretrained=print)
    monkeypatch.setattr("tests.test_embeddings.model_of", lambda kind: none)
    write(tmp_path, **change)
    with pytest.raises(CaptureError, match=rf"{said}.*pooling=mean"):
        sentence_recipe(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text("{", encoding="utf-8")
    (tmp_path / "modules.json").write_text(json.dumps(RECIPE), encoding="utf-8")
    with pytest.raises(CaptureError, match="cannot be read"):
        sentence_recipe(tmp_path)
    (tmp_path / "modules.json").unlink()
    assert sentence_recipe(tmp_path) is None


def test_what_does_not_go_together(built, model, server, tmp_path):
    for ask in (
        lambda: model.generate("a"),
        lambda: next(iter(model.stream("a"))),
        model.chat,
        lambda: model.logits([[1]]),
    ):
        with pytest.raises(InputError, match="gives vectors, and no text"):
            ask()
    for recipe, said in (("prompt-lookup", "draft = prompt-lookup"), ("int4", "weights = ")):
        with pytest.raises(RecipeError, match=f"{said}.* gives vectors, not text"):
            accel.optimize(built.folder, recipe, target="eager")
    with pytest.raises(InputError, match="pooling 'max' does not exist"):
        accel.optimize(built.folder, pooling="max")
    with pytest.raises(CaptureError, match="pooling: an ExportedProgram"):
        program = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
        accel.optimize(program, pooling="mean")
    adapter = adapter_case.write(tmp_path / "lora", built.module, ["query"])
    with pytest.raises(InputError, match="adapters: .* merge_adapter"):
        accel.optimize(built.folder, adapters={"a": adapter})
    with pytest.raises(InputError, match="makes text, not vectors"):
        server.models[1].embed("a")
    for texts, said in (([], "texts are empty"), (["a", ""], "text 1 is empty"),
                        (["a", "b " * 70], "text 1 has .* max_context is 64"),
                        ([[1], [VOCABULARY]], "text 1.*4096")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            model.embed(texts)
    facts = Facts("m", 8, 8, embedding=Embedding("max"))
    with pytest.raises(ArtifactError, match="embedding.pooling is 'max'"):
        Facts.from_json(Fields(json.loads(json.dumps(facts.to_json()))))


def test_batches_are_by_length_and_hold_every_text_once():
    lengths = np.random.default_rng(0).integers(1, 600, 200).tolist()
    parts = list(batches(lengths, 32))
    assert sorted(i for part in parts for i in part) == list(range(200))
    widest = [max(lengths[i] for i in part) for part in parts]
    assert widest == sorted(widest, reverse=True)
    assert all(len(p) <= 32 and len(p) * w <= 8192 for p, w in zip(parts, widest, strict=True))
    assert list(batches([20_000], 4)) == [[0]]


# The server


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    path = serve_case.build(tmp_path_factory.mktemp("text"), max_context=64, max_batch=2)
    with accel.load(path, threads=1) as text, Engine(text) as engine, Embedder(model) as embedder:
        found = [Served("vectors", model, embedder), Served("text", text, engine)]
        with serve_case.listening(found) as running:
            yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def test_the_openai_client_gets_what_embed_gives(client, http, model):
    """As numbers and in base64, which it asks for by itself; of text and of token ids."""
    want = model.embed(TEXTS)
    for how in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model="vectors", input=TEXTS, **how)
        assert [one.index for one in found.data] == list(range(len(TEXTS)))
        assert np.array_equal(np.array([x.embedding for x in found.data], np.float32), want)
        assert found.usage.prompt_tokens == sum(map(len, ids_of(TEXTS))) == found.usage.total_tokens
    raw = http.post("/v1/embeddings", json={"model": "vectors", "input": "a", "encoding_format": "base64"})  # fmt: skip
    (one,) = raw.json()["data"]
    assert struct.unpack("<32f", base64.b64decode(one["embedding"])) == tuple(want[1].tolist())
    for given, row in ((ids_of(TEXTS), want), (ids_of(["a"])[0], want[1:2]), ("a", want[1:2])):
        data = client.embeddings.create(model="vectors", input=given).data
        assert np.abs(np.array([x.embedding for x in data]) - row).max() < 1e-6
    cut = client.embeddings.create(model="vectors", input="a", dimensions=4).data[0].embedding
    assert np.abs(np.array(cut) - model.embed("a", dimensions=4)[0]).max() < 1e-6
    listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
    assert (listed["vectors"]["embedding"], listed["vectors"]["chat"]) == (WIDTH, False)
    assert listed["text"]["embedding"] is None
    assert 'accel_prompt_tokens_total{model="vectors"}' in http.get("/metrics").text


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"input": []}, 400, "input", "texts are empty"),
        ({"input": ["a", ""]}, 400, "input", "text 1 is empty"),
        ({"input": ["a"] * 2049}, 400, "input", "2,049 texts"),
        ({"input": ["a"] * 500_000}, 413, None, "values"),
        ({"input": ["a", "b " * 100]}, 400, "input", "text 1 has"),
        ({"input": ["a", "b " * 100_000]}, 400, "input", "text 1 has far more tokens"),
        ({"input": [[1, 2], [VOCABULARY]]}, 400, "input", "text 1"),
        ({"input": [-1]}, 400, "input", "-1"),
        ({"input": [1.5]}, 400, "input", "text 0"),
        ({"input": {"a": 1}}, 400, "input", "texts are dict"),
        ({"input": [["a"]]}, 400, "input", "text 0"),
        ({"input": "\ud800"}, 400, "input", "surrogate"),
        ({"dimensions": 0}, 400, "dimensions", "from 1 to 32"),
        ({"dimensions": 33}, 400, "dimensions", "from 1 to 32"),
        ({"dimensions": "4"}, 400, "dimensions", "integer"),
        ({"encoding_format": "int8"}, 400, "encoding_format", "'float' or 'base64'"),
        ({"model": "text"}, 400, "model", "makes text, not vectors"),
        ({"model": "vector"}, 404, "model", "did you mean 'vectors'"),
    ],
)  # fmt: skip
def test_wrong_requests_are_named(http, change, status, param, words):
    body = json.dumps({"model": "vectors", "input": "a", **change})
    headers = {"content-type": "application/json"}
    error = error_of(http.post("/v1/embeddings", content=body, headers=headers), status)
    assert (error["param"], words in error["message"]) == (param, True), error


def test_no_text_comes_of_a_model_of_vectors(http):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        error = error_of(http.post(path, json={"model": "vectors", **body}), 400)
        assert error["param"] == "model" and "/v1/embeddings" in error["message"]
    found = http.post("/tokenize", json={"model": "vectors", "prompt": "a"})
    assert found.json()["tokens"] == ids_of(["a"])[0]


def test_requests_take_turns_and_are_not_let_wait_for_ever(model, monkeypatch):
    """A full queue, a request that takes too long, an engine that closes."""
    ids = prompts.as_prompts(TEXTS * 4, model.facts, model.tokenizer)
    with Embedder(model, max_waiting=1) as engine:
        with pytest.raises(Late):
            engine.embed(ids, seconds=0.0)
        assert engine.stats == {**engine.stats, "running": 0, "waiting": 0}
        with engine._changed:
            engine._running, engine._waiting = True, 1
        with pytest.raises(Full, match="1 requests wait"):
            engine.embed(ids)
        with engine._changed:
            engine._waiting = 0
        with pytest.raises(Late):
            engine.embed(ids, seconds=0.05)
        with engine._changed:
            engine._running = False
        assert engine.embed(ids[:1]).shape == (1, WIDTH)
        with pytest.raises(InputError, match="no text"):
            engine.submit(None)
    with pytest.raises(InputError, match="closed"):
        engine.embed(ids)
    slow = Served("vectors", model, Embedder(model))
    with serve_case.listening([slow], limits=Limits(seconds=1e-9)) as one:
        answer = httpx.post(f"{one.url}/v1/embeddings", json={"input": "a"})
        assert error_of(answer, 504)["code"] == "timeout"


@pytest.mark.long
def test_minilm(real_model, tmp_path):
    """all-MiniLM-L6-v2 against transformers, pooled and normalised by hand, in one padded batch."""
    from transformers import AutoModel, AutoTokenizer

    folder = real_model("minilm")
    texts = [*TEXTS, "Ein Text über naïve Füchse 🦊", "The quick brown fox " * 40, "x"]
    given = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        vectors = AutoModel.from_pretrained(folder).eval()(**given).last_hidden_state
    mask = given["attention_mask"][..., None].float()
    want = torch.nn.functional.normalize((vectors * mask).sum(1) / mask.sum(1)).numpy()
    with accel.optimize(folder, out=tmp_path / "minilm", max_batch=4) as model:
        got = model.embed(texts)
    assert model.facts.max_context == 256
    assert float((got * want).sum(1).min()) >= 0.9999 and np.abs(got - want).max() < 1e-5
