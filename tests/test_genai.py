"""The genai entry: concatenated state and an attention mask, as onnxruntime-genai drives it; and that client itself."""

import json
import shutil

import models
import numpy as np
import onnxruntime as ort
import pytest

import accel
from accel.commands import demo

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


@pytest.mark.few(1)
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


@pytest.mark.few(1)
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


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """onnxruntime-genai and accel over one artifact: (its module, model and tokenizer, the compiled model)."""
    og = pytest.importorskip("onnxruntime_genai", reason="pip install '.[genai]'")
    folder = tmp_path_factory.mktemp("genai")
    models.wordy("genai").save_pretrained(folder / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.reference() / name, folder / "hf")
    (folder / "hf" / "chat_template.jinja").write_text(TEMPLATE)
    accel.optimize(folder / "hf", out=folder / "artifact", max_context=128, verify=False).close()
    model = og.Model(str(folder / "artifact"))
    with accel.load(folder / "artifact") as compiled:
        yield og, model, og.Tokenizer(model), compiled


def continued(client, ids, count):
    """Tokens and text of a greedy continuation by onnxruntime-genai."""
    og, model, tokenizer, _ = client
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + count, do_sample=False)
    generator, stream, text = og.Generator(model, params), tokenizer.create_stream(), ""
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
        text += stream.decode(int(generator.get_next_tokens()[0]))
    return [int(i) for i in generator.get_sequence(0)][len(ids) :], text


@pytest.mark.parametrize("prompt", ["def quicksort(", "import os\n", "x = 'ünï'  # 12"])
def test_onnxruntime_genai_gives_the_same_text_for_the_same_text(client, prompt):
    _, _, tokenizer, compiled = client
    tokenizer.update_options(add_special_tokens="true")
    ids = [int(i) for i in tokenizer.encode(prompt)]
    tokenizer.update_options(add_special_tokens="false")
    assert ids == compiled.tokenizer.encode(prompt) and ids[0] == 0
    tokens, text = continued(client, ids, 24)
    out = compiled.generate(prompt, 24)
    assert tokens == out.tokens[0]
    assert text == out.text[0].replace("\ufffd", "")  # it leaves out bytes that are no UTF-8


def test_onnxruntime_genai_renders_the_chat_template(client):
    _, _, tokenizer, compiled = client
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 < 2?"}]
    text = tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True)
    assert text == compiled.tokenizer.apply_chat_template(messages, tokenize=False)
    ids = [int(i) for i in tokenizer.encode(text)]
    assert ids == compiled.tokenizer.apply_chat_template(messages)
    assert continued(client, ids, 16)[0] == compiled.generate(messages, 16).tokens[0]
