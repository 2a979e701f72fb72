"""Log-probabilities of prompts, texts with a gap, tokens and texts: as OpenAI, vLLM and llama.cpp answer."""

import json
import math
import re
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest

import accel
from accel.commands.demo import reference
from accel.runtime.inputs.infill import BEFORE, BEHIND, FORMS
from accel.runtime.inputs.text import Tokenizer
from accel.serve import infill
from accel.serve.errors import ApiError
from accel.serve.infill import Infill
from accel.serve.limits import Access

from . import serve_case
from .test_serve import error_of

PROMPT = "import os\nimport sys\n\ndef main("
TALK = [{"role": "user", "content": PROMPT}]
GREEDY = {"model": "artifact", "temperature": 0, "max_tokens": 8}
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<file_sep>")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = serve_case.build(
        tmp_path_factory.mktemp("texts"), marks=STARCODER, max_context=256, max_batch=2
    )
    with serve_case.running([path]) as found:
        yield found


@pytest.fixture(scope="module")
def model(server):
    return server.models[0]


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(server):
    yield
    assert server.idle()


def post(http, path, **body):
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def forced(model, ids):
    """The log-probability of each token but the first behind those before it, and the likeliest ones [V]."""
    logits = model.logits([ids])[0].astype(np.float64)
    rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return [rows[i, token] for i, token in enumerate(ids[1:])], rows[:-1].max(-1)


@pytest.mark.few(1)
@pytest.mark.parametrize("given", ["text", "ids"])
def test_a_prompt_is_scored_as_lm_eval_asks_for_it(http, model, given):
    """Its own tokens, then the one that was made; whether each was the likeliest."""
    ids = model.tokenizer.encode(PROMPT)
    asked = {**GREEDY, "prompt": PROMPT if given == "text" else [ids], "max_tokens": 1, "seed": 1}
    found = post(http, "/v1/completions", **asked, logprobs=1, echo=True)
    (choice,) = found["choices"]
    told, (own, best) = choice["logprobs"], forced(model, ids)
    assert {len(values) for values in told.values()} == {len(ids) + 1}
    assert told["token_logprobs"][0] is None is told["top_logprobs"][0]
    assert np.allclose(told["token_logprobs"][1:-1], own, atol=2e-4)
    assert np.allclose([max(line.values()) for line in told["top_logprobs"][1:-1]], best, atol=2e-4)
    greedy = [one == max(line.values()) for one, line in
              zip(told["token_logprobs"][1:-1], told["top_logprobs"][1:-1], strict=True)]  # fmt: skip
    assert greedy == [math.isclose(a, b, abs_tol=1e-9) for a, b in zip(own, best, strict=True)]
    assert choice["text"].startswith(PROMPT) and found["usage"]["completion_tokens"] == 1
    first, *rest = told["tokens"]
    assert first == "<|bos|>" and "".join(rest) == choice["text"]
    starts = [choice["text"][i:] for i in told["text_offset"]]
    assert starts[0] == choice["text"]
    assert all(text.startswith(token) for text, token in zip(starts[1:], rest, strict=True))


def test_several_prompts_and_streams_and_nothing_made(http, model):
    """By the official client."""
    texts = [PROMPT, "for i in"]
    asked = {**GREEDY, "prompt": texts, "logprobs": 2, "echo": True}
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as client:
        whole = client.completions.create(**asked)
        pieces = list(client.completions.create(**asked, stream=True))
        none = client.completions.create(**{**asked, "max_tokens": 0})
    for i, text in enumerate(texts):
        told = whole.choices[i].logprobs
        own = [one for one in pieces if one.choices and one.choices[0].index == i]
        scores = [one.choices[0].logprobs for one in own if one.choices[0].logprobs]
        assert "".join(one.choices[0].text for one in own) == whole.choices[i].text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for one in scores for x in getattr(one, name)] == getattr(told, name)
        ids = model.tokenizer.encode(text)
        assert none.choices[i].text == text and len(told.tokens) == len(ids) + 8
        assert none.choices[i].logprobs.token_logprobs == told.token_logprobs[: len(ids)]
        assert len(told.top_logprobs[1]) in (2, 3)
    assert none.usage.completion_tokens == 0
    bare = post(http, "/v1/completions", **{**asked, "logprobs": 0})
    assert bare["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_prompt_logprobs(http, model, kind):
    """vLLM's: by token id, of each completion and of a chat."""
    base = {"prompt": PROMPT} if kind == "completions" else {"messages": TALK}
    found = post(http, f"/v1/{kind}", **GREEDY, **base, prompt_logprobs=1)
    holder = found["choices"][0] if kind == "completions" else found
    ids = model.tokenizer.encode(PROMPT)
    if kind != "completions":
        ids = model.tokenizer.apply_chat_template(TALK)
    first, *told = holder["prompt_logprobs"]
    assert first is None and [next(iter(one)) for one in told] == [str(i) for i in ids[1:]]
    own = [one[str(i)]["logprob"] for one, i in zip(told, ids[1:], strict=True)]
    assert np.allclose(own, forced(model, ids)[0], atol=2e-4)
    assert all(1 in [x["rank"] for x in one.values()] and len(one) <= 2 for one in told)
    assert told[3][str(ids[4])]["decoded_token"] == model.tokenizer.decode([ids[4]])
    assert "prompt_logprobs" not in json.dumps(post(http, f"/v1/{kind}", **GREEDY, **base))


def test_what_has_no_scores(http):
    for change, words in (
        ({"prompt_logprobs": 1, "stream": True}, "stream"),
        ({"prompt_logprobs": 21}, "20"),
        ({"prompt_logprobs": -1}, "0"),
        ({"echo": True, "logprobs": 1, "prompt": [5] * 256}, "no room"),
    ):
        asked = {**GREEDY, "prompt": "a", **change}
        assert words in error_of(http.post("/v1/completions", json=asked), 400)["message"]


# A gap


def tokens(model, text):
    return model.tokenizer.encode(text, special=False)


def test_a_gap_is_filled_by_the_models_own_tokens(http, model):
    """The prompt is the form of the family; what ends the middle is no text."""
    ids = [model.tokenizer.added[mark] for mark in STARCODER]
    opening = model.tokenizer.encode("a")[: -len(tokens(model, "a"))]
    prompt = [*opening, ids[0], *tokens(model, "def f("), ids[1], *tokens(model, "):\n"), ids[2]]
    want = model.generate(prompt, 8)
    asked = {**GREEDY, "prompt": "def f(", "suffix": "):\n", "return_token_ids": True}
    (choice,) = post(http, "/v1/completions", **asked)["choices"]
    assert choice["prompt_token_ids"] == prompt and choice["token_ids"] == want.tokens[0]
    for end in ids:
        found = post(http, "/v1/completions", **asked, logit_bias={str(end): 100})
        (choice,) = found["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert choice["token_ids"] == [end]
    given = post(http, "/v1/completions", **{**asked, "prompt": tokens(model, "def f(")})
    assert given["choices"][0]["prompt_token_ids"] == prompt
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as client:
        parts = client.completions.create(**GREEDY, prompt="def f(", suffix="):\n", stream=True)
        assert "".join(part.choices[0].text for part in parts) == want.text[0]


def test_infill_as_editors_ask_for_it(http, model):
    """With other files ahead, as many of the last ones as fit."""
    ids = {mark: model.tokenizer.added[mark] for mark in STARCODER}
    asked = {"input_prefix": "def f(", "input_suffix": "):\n", "prompt": "a, ", "n_predict": 6}
    asked |= {"temperature": 0, "samplers": ["top_k"], "t_max_predict_ms": 100, "stream": False}
    bos = model.tokenizer.added["<|bos|>"]
    prompt = [ids["<fim_prefix>"], *tokens(model, "def f(a, "), ids["<fim_suffix>"],
              *tokens(model, "):\n"), ids["<fim_middle>"]]  # fmt: skip
    found = post(http, "/infill", **asked)
    assert found["content"] == model.generate([bos, *prompt], 6).text[0]
    assert (found["stop_type"], found["tokens_predicted"], found["truncated"]) == (
        "limit",
        6,
        False,
    )
    files = [{"text": "x = 1\n" * 200, "filename": "old.py"}, {"text": "y = 2"}]
    more = post(http, "/infill", **asked, input_extra=files)
    ahead = [ids["<file_sep>"], *tokens(model, "file\ny = 2\n")]
    assert more["tokens_evaluated"] == 1 + len(ahead) + len(prompt)
    assert more["content"] == model.generate([bos, *ahead, *prompt], 6).text[0]
    for change, param in (
        ({"stream": True}, "stream"),
        ({"n_predict": -5}, "n_predict"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra"),
        ({"input_prefix": "x y " * 9_000}, "prompt"),
        ({"input_suffix": "x y " * 9_000}, "suffix"),
        ({"input_suffix": "x y " * 300}, "suffix"),
    ):
        error = error_of(http.post("/infill", json={**asked, **change}), 400)
        assert error["param"] == param, error


def served(marks, **config):
    """A model whose vocabulary has such tokens."""
    data = json.loads((reference() / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer(json.dumps(serve_case.marked(data, marks)).encode())
    facts = SimpleNamespace(max_context=64, vocab_size=1 << 20, token_ids=1 << 20)
    return SimpleNamespace(name="m", model=SimpleNamespace(tokenizer=tokenizer, facts=facts))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.marks[0])
def test_each_form_is_found_by_its_tokens(form):
    """All of them, in its order, with the ends that the vocabulary has; and not without one of them."""
    more = tuple(end for end in form.ends[:1])
    one = served((*form.marks, *more))
    (ids,), ends = infill.of_completion("a\n", "b\n", one)
    added = one.model.tokenizer.added
    assert sorted(ends) == sorted(added[mark] for mark in (*form.marks, *more))
    assert not form.file or form.file in form.ends
    texts = {BEFORE: "a\n", BEHIND: "b\n"}
    want = [texts[part] if part in texts else [added[part]] for part in form.parts]
    want = [one.model.tokenizer.encode(x, special=False) if isinstance(x, str) else x for x in want]
    assert ids.tolist() == [added["<|bos|>"], *(token for part in want for token in part)]
    with pytest.raises(ApiError, match="suffix: m has no tokens .* <fim_prefix> <fim_suffix>"):
        infill.of_completion("a", "b", served(form.marks[1:]))


def test_a_first_token_stays_first_and_no_space_begins_what_is_behind():
    """As of CodeLlama, whose SentencePiece puts a space before the first word of a text."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors

    words = ["<s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁", "a", "b", "▁a", "▁b", "☺", "▁☺"]
    merges = [("▁", letter) for letter in "ab☺"]
    inner = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # fmt: skip
    inner.decoder = decoders.Replace("▁", " ")
    inner.add_special_tokens(words[:4])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # fmt: skip
    one = served(STARCODER)
    one.model.tokenizer = Tokenizer(inner.to_str().encode())
    ids = Infill.of(one, "suffix").prompt("a", "b")
    assert [words[i] for i in ids] == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "b", "▁<MID>"]
    spaced = Infill.of(one, "suffix").prompt("a", " b")
    assert [words[i] for i in spaced][-2] == "▁b"


def test_no_gap_without_tokens(http, model, monkeypatch):
    monkeypatch.setattr(model, "tokenizer", Tokenizer(reference() / "tokenizer.json"))
    asked = {**GREEDY, "prompt": "a", "suffix": "b"}
    error = error_of(http.post("/v1/completions", json=asked), 400)
    assert error["param"] == "suffix" and "<|fim_prefix|>" in error["message"]
    gap = {"input_prefix": "a", "input_suffix": ""}
    assert "no tokens" in error_of(http.post("/infill", json=gap), 400)["message"]
    assert http.post("/v1/completions", json={**asked, "suffix": ""}).status_code == 200


# Tokens


def test_tokens_of_texts(http, model):
    ids = model.tokenizer.encode(PROMPT)
    found = post(http, "/tokenize", prompt=PROMPT, return_token_strs=True)
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 256)
    assert found["token_strs"] == [model.tokenizer.token(i) for i in ids]
    bare = model.tokenizer.encode(PROMPT, special=False)
    assert post(http, "/tokenize", prompt=PROMPT, add_special_tokens=False)["tokens"] == bare
    assert post(http, "/tokenize", content=PROMPT)["tokens"] == bare
    assert post(http, "/tokenize", content=PROMPT, add_special=True)["tokens"] == ids
    pieces = post(http, "/tokenize", content="a", with_pieces=True)["tokens"]
    assert pieces == [{"id": tokens(model, "a")[0], "piece": "a"}]
    assert post(http, "/tokenize", prompt="")["tokens"] == model.tokenizer.encode("")
    talk = post(http, "/tokenize", messages=TALK)["tokens"]
    assert talk == model.tokenizer.apply_chat_template(TALK)
    shut = post(http, "/tokenize", messages=TALK, add_generation_prompt=False)["tokens"]
    assert shut == model.tokenizer.apply_chat_template(TALK, add_generation_prompt=False)


def test_texts_of_tokens(http, model):
    """Special tokens too, and bytes that are no text."""
    mark = model.tokenizer.added["<file_sep>"]
    ids = [mark, *tokens(model, "for i in é")]
    found = post(http, "/detokenize", tokens=ids)
    assert found == {"prompt": "<file_sep>for i in é", "content": "<file_sep>for i in é"}
    half = next(i for i in range(300) if model.tokenizer.token_bytes(i) == b"\xc3")
    assert post(http, "/detokenize", tokens=[half])["prompt"] == "\ufffd"
    assert post(http, "/detokenize", tokens=[])["prompt"] == ""
    told = http.get("/tokenizer_info").json()
    (eos, *_) = model.facts.eos
    assert told["eos_token"] == model.tokenizer.token(eos) and told["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "nothing to tokenize"),
        ("/tokenize", {"prompt": "a", "messages": TALK}, "prompt", "prompt and messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "valid string"),
        ("/tokenize", {"prompt": "x y " * 50_000}, "prompt", "far more tokens"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "lone surrogate"),
        ("/tokenize", {"messages": [{"role": "user", "content": [1]}]}, "messages", "type"),
        ("/tokenize", {"content": "a", "parse_special": True}, "parse_special", "not supported"),
        ("/detokenize", {}, "tokens", "missing"),
        ("/detokenize", {"tokens": "a"}, "tokens", "list"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens", "tokens[1] = -1"),
        ("/detokenize", {"tokens": [10**30]}, "tokens", "no token id"),
        ("/detokenize", {"tokens": [1.5]}, "tokens", "integer"),
        ("/detokenize", {"tokens": [0] * 1_000_000}, None, "values"),
    ],
)  # fmt: skip
def test_what_is_no_text_and_no_token(http, path, body, param, words):
    answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = error_of(answer, 413 if param is None else 400)
    assert (error["param"], words in error["message"]) == (param, True), error


def test_a_key_is_asked_for_wherever_a_model_answers(server):
    (model,), (engine,) = server.models, server.engines
    from accel.serve.models import Served

    found = [Served("artifact", model, engine)]
    with serve_case.listening(found, access=Access("secret")) as one:
        with httpx.Client(base_url=one.url, timeout=60) as http:
            for path in ("/tokenize", "/detokenize", "/infill", "/v1/completions"):
                error_of(http.post(path, json={}), 401)
            error_of(http.get("/tokenizer_info"), 401)
            assert http.get("/health").status_code == 200 == http.get("/").status_code


@pytest.mark.long
def test_a_real_model_fills_a_gap(real_model, tmp_path):
    """Qwen2.5-Coder writes what is missing, and stops there."""
    model = real_model("qwen-coder-0.5b")
    options = {"max_context": 512, "max_batch": 1, "verify": False}
    accel.optimize(model, "base", out=tmp_path / "qwen", **options).close()
    with (
        serve_case.running([tmp_path / "qwen"]) as one,
        openai.OpenAI(base_url=f"{one.url}/v1", api_key="any", max_retries=0) as client,
    ):
        found = client.completions.create(
            model="qwen",
            prompt="def add(a, b):\n    ",
            suffix="\n\ndef sub(a, b):\n    return a - b\n",
            max_tokens=24,
            temperature=0,
        )
        assert re.fullmatch(r"return a . b\n?", found.choices[0].text)
        assert found.choices[0].finish_reason == "stop"
