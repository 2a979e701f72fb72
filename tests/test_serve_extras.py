"""What vLLM and llama.cpp tell and take beside OpenAI's fields."""

import json
from types import SimpleNamespace

import httpx
import pytest

from accel.runtime.serve.request import Ticket
from accel.serve import prompts
from accel.serve.models import Served

from . import serve_case
from .test_serve import error_of

PROMPT = "import os\nimport sys\n\ndef main("
TALK = [{"role": "user", "content": PROMPT}]
GREEDY = {"model": "artifact", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extras")
    path = serve_case.build(folder, "paged-prefix", max_context=256, max_batch=2)
    with serve_case.running([path]) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


def ask(http, kind="completions", **given):
    base = {"messages": TALK} if kind != "completions" else {"prompt": PROMPT}
    answer = http.post(f"/v1/{kind}", json={**GREEDY, **base, **given})
    assert answer.status_code == 200, answer.text
    if not given.get("stream"):
        return answer.json()
    lines = [one.removeprefix("data: ") for one in answer.text.split("\n\n") if one]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_token_ids(http, server, kind):
    """Of the prompt and of each choice, whole and in pieces that are all of them."""
    model = server.models[0]
    prompt = PROMPT if kind == "completions" else TALK
    alone = model.generate(prompt, 8)
    whole = ask(http, kind, return_token_ids=True, n=1)
    (choice,) = whole["choices"]
    assert choice["token_ids"] == alone.tokens[0]
    chunks = ask(http, kind, return_token_ids=True, stream=True)
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert [t for part in parts for t in part["token_ids"]] == alone.tokens[0]
    holders = (choice, parts[0]) if kind == "completions" else (whole, chunks[0])
    ids = model.tokenizer.encode(PROMPT)
    if kind != "completions":
        ids = model.tokenizer.apply_chat_template(TALK)
    assert [one["prompt_token_ids"] for one in holders] == [ids, ids]
    assert sum("prompt_token_ids" in json.dumps(chunk) for chunk in chunks) == 1
    assert "token_ids" not in json.dumps(ask(http, kind))


def test_the_prompt_comes_first(http, server):
    """Of text and of ids, of several prompts and samples, whole and streamed."""
    tokenizer = server.models[0].tokenizer
    given = [PROMPT, tokenizer.encode("for i in")]
    alone = server.models[0].generate(given, 8, n=2, temperature=0.9, seed=7).text
    asked = {"prompt": given, "n": 2, "temperature": 0.9, "seed": 7, "echo": True}
    want = [echo + text for echo, text in zip([PROMPT] * 2 + ["for i in"] * 2, alone, strict=True)]
    assert [one["text"] for one in ask(http, **asked)["choices"]] == want
    texts = [""] * 4
    for chunk in ask(http, **asked, stream=True):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == want


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_asked_for(http, stream):
    """The prompt alone, if it is asked for; nothing runs."""
    before = http.get("/metrics").text.partition("accel_requests_total{")[2].partition("\n")[0]
    for echo, text in ((True, PROMPT), (False, "")):
        found = ask(http, max_tokens=0, echo=echo, stream=stream)
        parts = [part for one in (found if stream else [found]) for part in one["choices"]]
        assert "".join(part["text"] for part in parts) == text
        assert parts[-1]["finish_reason"] == "length"
    assert found[-1]["timings"]["predicted_n"] == 0 if stream else True
    after = http.get("/metrics").text.partition("accel_requests_total{")[2].partition("\n")[0]
    assert before == after
    wrong = {**GREEDY, "prompt": "a", "max_tokens": 0, "temperature": -1}
    assert error_of(http.post("/v1/completions", json=wrong), 400)["param"] == "temperature"


def test_what_was_cached_is_told(http):
    """Of a prompt that came before: of the last one the last block may run again."""
    text = PROMPT * 8
    first = ask(http, prompt=text)
    again = ask(http, prompt=text)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    reused = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < reused < again["usage"]["prompt_tokens"]
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    timings = again["timings"]
    assert timings["cache_n"] == reused
    assert timings["prompt_n"] + reused == again["usage"]["prompt_tokens"]
    assert timings["predicted_n"] == 8 and timings["predicted_ms"] > 0 < timings["prompt_ms"]
    *rest, last = ask(http, prompt=text, stream=True)
    assert last["timings"]["predicted_n"] == 8 and not any("timings" in one for one in rest)


def test_a_handover_keeps_what_was_reused():
    ticket = Ticket(9, print)
    ticket.reuse(4)
    ticket.reuse(0)
    assert ticket.usage.reused == 4


def test_the_fingerprint_is_that_of_the_artifact(http, server):
    told = {ask(http)["system_fingerprint"], ask(http, "chat/completions")["system_fingerprint"]}
    told |= {chunk["system_fingerprint"] for chunk in ask(http, stream=True)}
    (one,) = told
    assert one.startswith("accel-")
    (served,) = server.models
    same = Served("other name", served, server.engines[0])
    assert same.fingerprint == one
    other = SimpleNamespace(artifact=served.artifact, recipe={**served.recipe, "name": "b"})
    assert Served("artifact", other, server.engines[0]).fingerprint != one


def test_the_last_message_goes_on(http, server):
    """It is the prompt's end, and the answer what follows."""
    model = server.models[0]
    talk = [*TALK, {"role": "assistant", "content": "def f(x):\n    return "}]
    text = rendered(talk)
    alone = model.generate(model.tokenizer.encode(text[:-1], special=False), 8).text[0]
    found = ask(http, "chat/completions", messages=talk, continue_final_message=True)
    assert found["choices"][0]["message"]["content"] == alone
    closed = ask(http, "chat/completions", messages=talk, add_generation_prompt=False)
    assert closed["usage"]["prompt_tokens"] == len(model.tokenizer.encode(text, special=False))
    opened = ask(http, "chat/completions", messages=talk)
    assert opened["usage"]["prompt_tokens"] > closed["usage"]["prompt_tokens"]


def rendered(talk):
    return "".join(f"{one['role']}: {one['content']}\n" for one in talk)


@pytest.mark.parametrize(
    ("talk", "more", "said"),
    [
        (TALK, {}, "is not the assistant's"),
        ([*TALK, {"role": "assistant"}], {}, "is not the assistant's"),
        ([*TALK, {"role": "assistant", "content": "a"}], {"add_generation_prompt": True}, "give one"),
    ],
)  # fmt: skip
def test_what_cannot_go_on(http, talk, more, said):
    asked = {**GREEDY, "messages": talk, "continue_final_message": True, **more}
    error = error_of(http.post("/v1/chat/completions", json=asked), 400)
    assert error["param"] == "continue_final_message" and said in error["message"]


def test_a_template_that_leaves_the_last_message_out():
    with pytest.raises(prompts.ApiError, match="does not write the last message"):
        prompts._up_to_mark("user: hi")
