"""Cross-encoders: a small BERT with random weights, beside transformers; in Python, and by POST /v1/rerank."""

import json
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

import accel
from accel.ir.embedding import Embedding, Pairs
from accel.ir.errors import AccelError
from accel.runtime.serve.embedder import Embedder
from accel.serve.models import Served

from . import serve_case, test_embeddings
from .test_serve import error_of

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefghijklmnopqrst"]
QUERY = "a b c"
DOCUMENTS = ["d e f g", "a b", "t", "c b a d e f g h i j k l m", "a b c"]


def write(folder, labels=1, **config):
    """A directory as transformers saves a cross-encoder."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    told = BertConfig(vocab_size=len(WORDS), max_position_embeddings=40, num_labels=labels, **sizes)  # fmt: skip
    module = BertForSequenceClassification(told).eval()
    with torch.no_grad():
        for name, one in module.named_parameters():
            one.normal_(0, 0.4 if one.dim() > 1 else 0.1)
            one += 1.0 if name.endswith("LayerNorm.weight") else 0.0
    module.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}), encoding="utf-8")
    found = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]")
    )
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    found.save(str(folder / "tokenizer.json"))
    return SimpleNamespace(module=module, tokenizer=found)


def by_hand(made, query, texts):
    """Each pair alone, by transformers: numbers before any sigmoid."""
    found = []
    for text in texts:
        told = made.tokenizer.encode(query, text)
        given = {"input_ids": told.ids, "token_type_ids": told.type_ids}
        with torch.no_grad():
            found.append(
                made.module(**{k: torch.tensor([v]) for k, v in given.items()}).logits.item()
            )
    return np.array(found, np.float32)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cross")
    made = write(folder / "model")
    accel.optimize(folder / "model", out=folder / "cross", max_batch=3, verify=False).close()
    return SimpleNamespace(made=made, path=folder / "cross", folder=folder)


@pytest.fixture(scope="module")
def model(built):
    with accel.load(built.path, threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def http(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    test_embeddings.write(folder / "model")
    accel.optimize(folder / "model", out=folder / "vectors", max_batch=2, verify=False).close()
    with (
        accel.load(folder / "vectors", threads=1) as vectors,
        Embedder(model) as cross,
        Embedder(vectors) as other,
        serve_case.listening([Served("cross", model, cross), Served("vectors", vectors, other)]) as running,
        httpx.Client(base_url=running.url, timeout=60) as found,
    ):  # fmt: skip
        yield found


def test_scores_are_those_of_transformers(built, model):
    """Types of tokens count, and batches of several lengths do not."""
    logits = by_hand(built.made, QUERY, DOCUMENTS)
    scores = model.score(QUERY, DOCUMENTS)
    assert scores.dtype == np.float32 and np.ptp(logits) > 0.2
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-5)
    swapped = by_hand(built.made, DOCUMENTS[0], [QUERY])
    np.testing.assert_allclose(
        model.score(DOCUMENTS[0], [QUERY]), 1 / (1 + np.exp(-swapped)), atol=1e-5
    )
    pairs = Pairs(len(WORDS), True)
    assert model.facts.embedding == Embedding("cls", False, 1, True, pairs)
    one = [built.made.tokenizer.encode(QUERY, text).ids for text in DOCUMENTS]
    assert np.abs(model.embed(one)[:, 0] - scores).max() > 1e-3, "control: all tokens of one type"


def test_an_activation_of_the_directory(built, tmp_path):
    """sentence-transformers keeps it in config.json; another is refused."""
    told = {"activation_fn": "torch.nn.modules.linear.Identity"}
    made = write(tmp_path / "plain", sentence_transformers=told)
    with accel.optimize(tmp_path / "plain", max_batch=2, verify=False) as model:
        np.testing.assert_allclose(
            model.score(QUERY, DOCUMENTS), by_hand(made, QUERY, DOCUMENTS), atol=1e-4
        )
    write(tmp_path / "tanh", sbert_ce_default_activation_function="torch.nn.Tanh")
    with pytest.raises(AccelError, match="through Tanh; accel knows Identity and Sigmoid"):
        accel.optimize(tmp_path / "tanh", verify=False)
    write(tmp_path / "two", labels=2)
    with pytest.raises(AccelError, match="BertForSequenceClassification"):
        accel.optimize(tmp_path / "two", verify=False)


def test_the_order_of_documents(http, model):
    scores = model.score(QUERY, DOCUMENTS)
    order = sorted(range(len(DOCUMENTS)), key=lambda i: -scores[i])
    asked = {"model": "cross", "query": QUERY, "documents": DOCUMENTS}
    for path in ("/v1/rerank", "/rerank"):
        answer = http.post(path, json=asked).raise_for_status().json()
        assert [one["index"] for one in answer["results"]] == order
        assert [one["document"]["text"] for one in answer["results"]] == [
            DOCUMENTS[i] for i in order
        ]
        told = [one["relevance_score"] for one in answer["results"]]
        np.testing.assert_allclose(told, scores[order], atol=1e-6)
        assert answer["model"] == "cross" and answer["usage"]["total_tokens"] == 53
    few = {
        **asked,
        "documents": [{"text": one} for one in DOCUMENTS],
        "top_n": 2,
        "return_documents": False,
    }
    answer = http.post("/v1/rerank", json=few).json()["results"]
    assert [{"index": one} for one in order[:2]] == [{"index": one["index"]} for one in answer]
    assert {*answer[0]} == {"index", "relevance_score"}
    listed = http.get("/v1/models").json()["data"]
    assert [one["rerank"] for one in listed] == [True, False]


BAD = [  # fields that are changed, the field that the error names, and words of it
    ({"model": "vectors"}, "model", "compares no texts; ask a cross-encoder"),
    ({"documents": []}, "documents", "give 1 to 2,048"),
    ({"documents": ["a"] * 2049}, "documents", "2,049 texts"),
    ({"documents": ["a", 5]}, "documents", "documents[1] is no text"),
    ({"documents": ["a", {"image": "x"}]}, "documents", "documents[1] is no text"),
    ({"documents": ["a", "b " * 60]}, "documents", "document 1 has 64 tokens; max_context is 40"),
    ({"documents": ["a", "b " * 90_000]}, "documents", "document 1 has far more tokens"),
    ({"query": "b " * 90_000}, "query", "the query has far more tokens"),
    ({"query": 5}, "query", "valid string"),
    ({"query": "\ud800"}, "documents", "lone surrogate"),
    ({"top_n": 0}, "top_n", "give 1 or more"),
]


def test_wrong_requests_are_named(http, model):
    head = {"content-type": "application/json"}
    for change, param, words in BAD:
        body = json.dumps({"model": "cross", "query": "a", "documents": ["b"], **change})
        error = error_of(http.post("/v1/rerank", content=body, headers=head), 400)
        assert error["param"] == param and words in error["message"], (change, error)
    error = error_of(http.post("/v1/embeddings", json={"model": "cross", "input": "a"}), 400)
    assert "ask /v1/rerank" in error["message"]
    error = error_of(http.post("/v1/completions", json={"model": "cross", "prompt": "a"}), 400)
    assert "/v1/rerank" in error["message"]
    with pytest.raises(AccelError, match="use model.score"):
        model.embed("a")
