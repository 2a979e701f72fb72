"""Encoder-decoder models, from a model directory to an artifact, against transformers' own."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import accel
from accel import cli
from accel.compiler.smoke.tiny_models import randomise, small_config
from accel.ir.capture.encoder import encoder_facts
from accel.ir.capture.generation import note_of
from accel.ir.errors import InputError
from accel.passes.recognise.mask import classify
from accel.runtime.inputs.encoder_inputs import padded

from .session_ways import oracle

TYPES = ["t5", "bart", "marian", "m2m_100", "whisper"]
FEATURES, TEXT = "input_features", "input_ids"
LENGTHS, NEW = (13, 4, 1), 12


def make(kind):
    """A small model; its configuration starts decoding at token 1, and ends at 2."""
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    own = {} if kind == "t5" else {"encoder_layers": 1}
    auto = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    model = randomise(auto.from_config(small_config(kind, **own)), kind).eval()
    model.generation_config.decoder_start_token_id = 1
    if kind == "marian":  # a bias that ends in the logits, as trained ones have
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    return model


@pytest.fixture(
    scope="module",
    params=[  # a bias by distance, and features instead of tokens; the rest are long
        pytest.param(n, marks=() if n in ("t5", "whisper") else pytest.mark.long) for n in TYPES
    ],
)
def built(request, tmp_path_factory):
    """One ONNX build of each type, out of a model directory; the same program run eagerly."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param)
    model.save_pretrained(folder / "model")
    model = type(model).from_pretrained(folder / "model")  # sinusoids are not saved, but made again
    onnx = accel.optimize(folder / "model", max_context=64, max_batch=3, out=folder / "artifact")
    eager = oracle(onnx)
    yield SimpleNamespace(
        kind=request.param, model=model, targets=(onnx, eager), folder=folder / "artifact"
    )
    onnx.close()


def sources_of(built, seed=3):
    """An encoder input for each of three rows: token ids of different lengths, or features."""
    rng = np.random.default_rng(seed)
    encoder = built.targets[0].facts.encoder
    if encoder.features:
        return [rng.standard_normal(encoder.features, np.float32) for _ in LENGTHS]
    return [rng.integers(3, encoder.vocab_size, n) for n in LENGTHS]


def tokens_of(built, seed=5):
    return np.random.default_rng(seed).integers(3, built.targets[0].facts.vocab_size, (3, 11))


def reference(built, sources, tokens):
    """transformers' logits [B,T,V]; each row alone, so without any padding."""
    rows = []
    with torch.no_grad():
        for source, row in zip(sources, tokens, strict=True):
            name = built.model.main_input_name
            given = {name: torch.tensor(source)[None], "decoder_input_ids": torch.tensor(row)[None]}
            rows.append(built.model(**given, use_cache=False).logits[0].numpy())
    return np.stack(rows)


def assert_close(got, want):
    assert np.abs(got - want).max() <= 1e-4 * max(1.0, np.abs(want).max())


def law_of_steps(model, sources, tokens, want, encode=None):
    """A prefill, single steps, a rewind and a fork give the reference's logits, rows padded or not."""
    with model.session(3) as session:
        (encode or type(session).encode)(session, *padded(sources, model.facts.encoder))
        assert_close(session.run(tokens[:, :5]), want[:, :5])
        for t in range(5, 9):
            assert_close(session.run(tokens[:, t : t + 1]), want[:, t : t + 1])
        session.rewind(4)
        assert_close(session.run(tokens[:, 4:7]), want[:, 4:7])
        with session.fork() as other:
            session.encode(
                *padded(sources[::-1], model.facts.encoder)
            )  # which the fork does not see
            assert session.length == 0
            assert_close(other.run(tokens[:, 7:]), want[:, 7:])


@pytest.mark.few(1)
def test_logits_are_the_modules(built):
    sources, tokens = sources_of(built), tokens_of(built)
    want = reference(built, sources, tokens)
    assert want.std() > 0.2
    for model in built.targets:
        assert_close(model.logits(tokens, encoder_input=sources), want)
        law_of_steps(model, sources, tokens, want)


def test_the_law_catches_a_broken_encoder(built):
    sources, tokens = sources_of(built), tokens_of(built)
    want = reference(built, sources, tokens)

    def other_input(session, inputs, lengths):
        session.encode(inputs[[1, 0, 2]], None if lengths is None else lengths[[1, 0, 2]])

    def padding_is_real(session, inputs, lengths):
        session.encode(inputs)

    broken = [other_input] + ([padding_is_real] if sources[0].ndim == 1 else [])
    for encode in broken:
        with pytest.raises(AssertionError):
            law_of_steps(built.targets[0], sources, tokens, want, encode)


def test_samples_share_the_encoder_and_the_prompt(built):
    """Two of each source: the first is what it gets alone, and sources are not mixed up."""
    for model in built.targets:
        settings = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3, "eos": []}
        sources = sources_of(built)
        want = model.generate(encoder_input=sources, **settings).tokens
        assert model.generate(encoder_input=sources, n=2, **settings).tokens[::2] == want
        assert len(set(map(tuple, want))) > 1


def test_greedy_tokens_are_transformers(built):
    sources = sources_of(built)
    same = {"max_new_tokens": NEW, "repetition_penalty": 2.0}  # or small models stay at one token
    settings = {**same, "do_sample": False, "num_beams": 1}
    for model in built.targets:
        (start,) = model.facts.encoder.start
        found = model.generate(encoder_input=sources, **same).tokens
        assert len({t for row in found for t in row}) > 5
        for source, row in zip(sources, found, strict=True):
            given = {built.model.main_input_name: torch.tensor(source)[None]}
            want = built.model.generate(**given, **settings)[0].tolist()
            assert [start, *row] == ([start, *want] if want[0] != start else want)


def test_the_encoder_runs_once_and_the_step_reads_what_it_wrote(built):
    onnx = built.targets[0]
    out = onnx.generate(encoder_input=sources_of(built), max_new_tokens=5, eos=[])
    assert out.stats["calls"] == 1 + 5
    program = onnx.program
    cross = [s for s in program.state if s.cross]
    assert {s.name for s in cross} == {
        "cross.pos", "cross.0.k", "cross.0.v", "cross.1.k", "cross.1.v",
    }  # fmt: skip
    assert not {f"{s.name}.next" for s in cross} & set(program.step.outputs)
    read = {
        name: {str(n.target) for g in program.graphs(e) for n in g.find_nodes(op="get_attr")}
        for name, e in program.entries.items()
    }
    packed = ("{k,v}.weight", "{k_proj,v_proj}.weight")
    projections = {n for n in read["encode"] if "decoder" in n and n.endswith(packed)}
    assert len(projections) == 2 and not projections & read["step"]
    assert [layer.nodes > 0 for layer in onnx.facts.layers] == [True, True]  # one region each


def test_weights_lie_in_the_artifact_once_and_it_loads_again(built):
    manifest = json.loads((built.folder / "accel.json").read_text())
    assert set(manifest["entries"]) == {"step", "encode"}
    tensors = [*built.model.parameters(), *built.model.buffers()]
    unique = {t.data_ptr(): t.numel() for t in tensors}
    assert (built.folder / "weights.bin").stat().st_size < 4.3 * sum(unique.values()) + 4096 * 8
    sources = sources_of(built)
    with accel.load(built.folder) as loaded:
        got = loaded.generate(encoder_input=sources, max_new_tokens=6).tokens
    assert got == built.targets[0].generate(encoder_input=sources, max_new_tokens=6).tokens


def test_what_is_refused(built):
    onnx = built.targets[0]
    sources, tokens = sources_of(built), tokens_of(built)
    encoder = onnx.facts.encoder
    with pytest.raises(InputError, match="give encoder_input"):
        onnx.generate([1, 2])
    with pytest.raises(InputError, match="3 encoder inputs but 2 prompts"):
        onnx.generate([[1], [1]], encoder_input=sources)
    with pytest.raises(InputError, match="call session.encode"), onnx.session() as session:
        session.run(tokens[:1])
    wrong = np.zeros((2, 5), np.float32) if encoder.features else np.full(4, encoder.vocab_size)
    with pytest.raises(InputError, match="shape" if encoder.features else "not in the vocabulary"):
        onnx.generate(encoder_input=[wrong])
    with pytest.raises(InputError, match="features" if encoder.features else "no tokenizer"):
        onnx.generate(encoder_input="text")
    with onnx.session(2) as session, pytest.raises(InputError, match="lengths"):
        session.encode(np.stack(sources[:2]) if encoder.features else [[5, 6], [7, 8]], [0, 3])
    if not encoder.features:
        with pytest.raises(InputError, match=f"takes {encoder.max_length} at most"):
            onnx.generate(encoder_input=[[5] * (encoder.max_length + 1)])


@pytest.mark.long
def test_a_decoder_takes_no_encoder_input(build):
    model = build("llama").compiled
    with pytest.raises(InputError, match="no encoder"):
        model.generate([1, 2], encoder_input=[3, 4])
    with pytest.raises(InputError, match="no prompt"):
        model.generate()
    with pytest.raises(InputError, match="no encoder"), model.session() as session:
        session.encode([[1, 2]])


def test_a_bias_of_both_directions_goes_by_signed_distance():
    table = torch.randn(2, 2 * 40 - 1)
    table[:, :20], table[:, -20:] = table[:, 20:21], table[:, -20:-19]  # constant far away
    place = torch.arange(40)[:, None] - torch.arange(40)[None] + 39
    found = classify(torch.ones(1, 40, 40, dtype=torch.bool), table[:, place], 64, "bias")
    assert found.mask.kind == "full" and found.bias.shape == (2, 2 * 64 - 1)
    assert torch.equal(found.bias[:, 63 - 39 : 63 + 40], table)
    assert torch.equal(found.bias[:, 0], table[:, 0])
    other = table[:, place].clone()
    other[0, 3, 5] += 1  # no longer by distance: by both positions, or not at all
    assert isinstance(classify(torch.ones(1, 40, 40, dtype=torch.bool), other, 64, "bias"), str)


def test_a_sparse_encoder_takes_what_it_attends_to_in_full():
    from transformers import AutoModelForSeq2SeqLM

    config = small_config("bigbird_pegasus", block_size=4, num_random_blocks=2)
    model, notes = AutoModelForSeq2SeqLM.from_config(config), []
    assert encoder_facts(model, 256, notes).max_length == (5 + 2 * 2) * 4
    assert "block-sparse" in notes[0]
    model.config.attention_type = "original_full"
    assert encoder_facts(model, 128, []).max_length == 128


def test_what_a_decoder_starts_from():
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(small_config("bart"))
    told = model.generation_config
    told.decoder_start_token_id, told.forced_bos_token_id, told.num_beams = 2, 7, 4
    assert encoder_facts(model, 64, []).start == (2, 7)
    assert note_of(told) == ["generate ignores num_beams of the generation's configuration"]
    told.forced_bos_token_id, told.forced_decoder_ids = None, [[1, 5], [2, 6], [4, 8]]
    assert encoder_facts(model, 64, []).start == (2, 5, 6)
    told.decoder_start_token_id = model.config.decoder_start_token_id = None
    told.bos_token_id, told.forced_decoder_ids = 3, None
    assert encoder_facts(model, 64, []).start == (3,)


def test_the_command_line_takes_the_encoders_input(built, tmp_path):
    source, file = sources_of(built)[0], tmp_path / "input.npy"
    np.save(file, source)
    given = ["run", str(built.folder), "--input", str(file), "--max-new-tokens", "4", "--json"]
    out = CliRunner().invoke(cli.app, given)
    want = built.targets[0].generate(encoder_input=source, max_new_tokens=4).tokens[0]
    assert json.loads(out.stdout)["tokens"] == want
    missing = CliRunner().invoke(cli.app, [*given[:3], "no.npy"])
    assert missing.exit_code == 1 and "numpy.save" in " ".join(missing.output.split())
