"""EleutherAI's lm-eval runs tasks of log-likelihood and of texts against a server, with the server's own tokens."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from . import serve_case

QUESTIONS = [
    {"text": "import os\nimport sys\n\ndef", "choices": [" main(", " os os", " 7"], "answer": 0},
    {"text": "for i in", "choices": [" range(", " for for"], "answer": 0},
    {"text": "class A:\n    def __init__(", "choices": ["zz zz", "self"], "answer": 1},
]
TASKS = {
    "tiny_choices": {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "choices",
                     "doc_to_target": "answer", "metric_list": [{"metric": "acc"}], "target_delimiter": ""},
    "tiny_rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                     "metric_list": [{"metric": "word_perplexity"}]},
    "tiny_texts": {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "a",
                   "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 5},
                   "metric_list": [{"metric": "exact_match"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = serve_case.build(tmp_path_factory.mktemp("lm-eval"), max_context=256, max_batch=2)
    with serve_case.running([path]) as found:
        yield found


@pytest.mark.long
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra eval")
def test_its_scores_are_those_of_the_model(server, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(one)}\n" for one in QUESTIONS), encoding="utf-8")
    for name, task in TASKS.items():
        told = {"task": name, "dataset_path": "json", "test_split": "test", **task}
        told["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(told), encoding="utf-8")
    samples = evaluated(server, tmp_path, "tiny_choices", "tiny_rolling", "tiny_texts")
    model = server.models[0]
    right = 0
    for question, found in zip(QUESTIONS, samples["tiny_choices"], strict=True):
        want = [loglikelihood(model, question["text"], one) for one in question["choices"]]
        told = [(float(value), greedy == "True") for value, greedy in found["filtered_resps"]]
        assert [greedy for _, greedy in told] == [greedy for _, greedy in want]
        assert all(math.isclose(a, b, abs_tol=1e-3) for (a, _), (b, _) in zip(told, want, strict=True))  # fmt: skip
        assert found["acc"] == float(np.argmax([value for value, _ in want]) == question["answer"])
        right += found["acc"]
    assert 0 < right <= len(QUESTIONS)
    (eos, *_) = model.facts.eos  # it takes the first token to be missing where its number is 0
    for question, found in zip(QUESTIONS, samples["tiny_rolling"], strict=True):
        want = loglikelihood(model, model.tokenizer.token(eos), question["text"])[0]
        assert math.isclose(float(found["filtered_resps"][0]), want, abs_tol=2e-3)
    for question, found in zip(QUESTIONS, samples["tiny_texts"], strict=True):
        ids = model.tokenizer.encode(question["text"], special=False)
        assert found["filtered_resps"] == [model.generate(ids, 5, stop=["\n\n"]).text[0]]


def evaluated(server, folder, *tasks):
    """What lm-eval logs of each document of each task."""
    args = f"model=artifact,base_url={server.url}/v1/completions,num_concurrent=2,max_length=256"
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        args,
    ]
    command += ["--tasks", ",".join(tasks), "--include_path", str(folder), "--log_samples"]
    command += ["--output_path", str(folder / "out"), "--batch_size", "2"]
    offline = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for task in tasks:
        (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found[task] = sorted(lines, key=lambda one: one["doc_id"])
    return found


def loglikelihood(model, before, text):
    """The log-probability of a text behind another, and whether each of its tokens is the likeliest."""
    start = len(model.tokenizer.encode(before, special=False))
    ids = model.tokenizer.encode(before + text, special=False)
    logits = model.logits([ids])[0].astype(np.float64)[start - 1 : -1]
    rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = rows[np.arange(len(rows)), ids[start:]]
    return float(own.sum()), bool((own == rows.max(-1)).all())
