"""The genai entry: concatenated state and an attention mask, as onnxruntime-genai drives it."""

import json

import models
import numpy as np
import onnxruntime as ort
import pytest

import accel

NAMES = ["llama", "gemma2", "gpt2"]


@pytest.fixture(scope="module", params=NAMES)
def driver(request, build):
    built = build(request.param)
    folder = built.compiled.artifact.path
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(
        str(folder / "genai.onnx"), options, providers=["CPUExecutionProvider"]
    )
    config = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
    return built, session, config


def call(session, config, tokens, mask, positions, past):
    feeds = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    for i in range(config["num_hidden_layers"]):
        for kind, part in (("past_key_names", 0), ("past_value_names", 1)):
            empty = np.zeros(
                (len(tokens), config["num_key_value_heads"], 0, config["head_size"]), np.float32
            )
            feeds[config["inputs"][kind] % i] = past[2 * i + part] if past else empty
    names = [o.name for o in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, feeds), strict=True))
    keys = [
        config["outputs"][kind] % i
        for i in range(config["num_hidden_layers"])
        for kind in ("present_key_names", "present_value_names")
    ]
    return outputs["logits"], [outputs[k] for k in keys]


def test_prefill_and_decode_equal_the_step_entry(driver):
    built, session, config = driver
    tokens = np.random.default_rng(1).integers(0, 90, (1, 12))
    want = built.compiled.logits(tokens)
    first, past = call(
        session, config, tokens[:, :11], np.ones((1, 11), np.int64), np.arange(11)[None], None
    )
    second, _ = call(
        session, config, tokens[:, 11:], np.ones((1, 12), np.int64), np.array([[11]]), past
    )
    assert np.abs(np.concatenate([first, second], 1) - want).max() < 1e-4


def test_a_context_of_one_token_builds():
    with accel.optimize(models.tiny(), max_context=1) as compiled:
        assert compiled.logits([[5]]).shape == (1, 1, 31)


def test_left_padding_is_not_seen(driver):
    built, session, config = driver
    tokens = np.random.default_rng(2).integers(0, 90, (1, 9))
    padded = np.concatenate([np.full((1, 4), 7), tokens], 1)
    mask = (np.arange(13) >= 4).astype(np.int64)[None]
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    logits, _ = call(session, config, padded, mask, positions, None)
    assert np.abs(logits[:, 4:] - built.compiled.logits(tokens)).max() < 1e-4
    seen, _ = call(session, config, padded, np.ones_like(mask), np.arange(13)[None], None)
    assert (
        np.abs(seen[:, 4:] - built.compiled.logits(tokens)).max() > 1e-3
    )  # the control: padding seen
