"""Variants of the step: each computes what the portable one computes, or is not written."""

import copy
import shutil

import models
import numpy as np
import pytest

import accel
from accel.ir.errors import ArtifactError, Miscompiled
from accel.ir.ops.attention import Mask, attention
from accel.lowering.onnx.export import export
from accel.lowering.onnx.variants import NATIVE, PORTABLE, variants
from accel.runtime.artifact.artifact import open_artifact, write_manifest
from accel.runtime.artifact.manifest import parse
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.backends.onnx.open import open_session
from accel.runtime.session.session import Session

from .attention_cases import attention_cases
from .op_cases import SIZES
from .test_ops import assert_close, onnx_session, program_of

CASES = {case.name: case for case in attention_cases() if case.op is attention}
NAMES = [table.target for table in variants() if not table.missing()]
PLAIN = "attention-window4-4over2"


def written(case, folder, **options) -> set[str]:
    """The variants that an operator has."""
    return set(export(program_of(case), folder, **options)["step"].get("variants", {}))


@pytest.mark.few(24)
@pytest.mark.parametrize("variant", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_a_variant_equals_the_reference(name, variant, tmp_path):
    case = CASES[name]
    if variant not in written(case, tmp_path):
        if variant == NATIVE:
            assert "tree" in name or "pages" in name, "it has every other form"
        left = ("attention-softcap", "attention-both")
        assert (
            any(form in name for form in ("sink", "tree", "kept", "pages", "beside"))
            or name in left
            or variant == "gqa"  # over codes alone
        )
        return
    run = onnx_session(case, tmp_path, f"step.{variant}.onnx")
    for sizes in SIZES:
        operands = case.operands(sizes)
        got, want = run(operands), case.op.reference(*operands)
        q_pos, k_pos, mask, window = (operands[i] for i in (3, 4, 8, 9))
        sees = Mask(mask, window).visible(q_pos[:, :, None], k_pos[:, None, :]).any(-1)  # [B,T]
        assert_close(got.transpose(1, 2)[sees], want.transpose(1, 2)[sees])
        assert got.isfinite().all()  # what padding gives is nobody's, but must not spread


def fused():
    return next(table for table in variants() if table.target == "fused")


def test_a_wrong_variant_is_caught(monkeypatch, tmp_path):
    right = fused().rules[attention.default]
    wrong = lambda b, *args: right(b, *args[:-1], args[-1] + 1)  # noqa: E731
    monkeypatch.setitem(fused().rules, attention.default, wrong)
    with pytest.raises(AssertionError, match="not close"):
        test_a_variant_equals_the_reference(PLAIN, "fused", tmp_path)


@pytest.mark.long
def test_a_build_refuses_a_wrong_variant(monkeypatch):
    right = fused().rules[attention.default]
    doubled = lambda b, q, k, v, *rest: right(b, q, k, b.node("Add", v, v), *rest)  # noqa: E731
    monkeypatch.setitem(fused().rules, attention.default, doubled)
    with pytest.raises(Miscompiled, match=r"step\.fused\.onnx"):
        accel.optimize(models.tiny(), max_context=64)


def test_only_what_keeps_the_promise_of_equal_rows(tmp_path):
    assert written(CASES[PLAIN], tmp_path) >= {"fused"}
    exact = {table.target for table in variants() if table.batch_invariant}
    assert written(CASES[PLAIN], tmp_path, batch_invariant=True) == exact
    assert "fused" not in exact


def engines(compiled) -> dict[str, OrtBackend]:
    names = compiled.artifact.entries["step"].graphs
    return {n: OrtBackend(compiled.artifact, threads=1, kernels=n) for n in names}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sessions_of_all_variants_give_the_same_logits(build, name):
    """Padded rows, several calls, a buffer that grows, a rewind."""
    compiled = build(name).compiled
    facts = compiled.facts
    rng = np.random.default_rng(3)
    found = {}
    for variant, engine in engines(compiled).items():
        rng = np.random.default_rng(3)
        with Session(
            engine.open_session(3), 3, vocab_size=facts.vocab_size, max_context=facts.max_context
        ) as session:
            parts = []
            for width, lengths in [(9, [9, 4, 0]), (1, None), (200, [200, 1, 77]), (3, None)]:
                parts.append(session.run(rng.integers(0, 90, (3, width)), lengths))
            session.rewind([5, 2, 0])
            parts.append(session.run(rng.integers(0, 90, (3, 6))))
        found[variant] = np.concatenate([p.ravel() for p in parts])
    assert len(found) > 1
    for variant, logits in found.items():
        assert np.abs(logits - found[PORTABLE]).max() < 1e-4, variant


def test_the_weights_are_written_once(build):
    artifact = build("llama").compiled.artifact
    sizes = {name: file.bytes for name, file in artifact.files.items()}
    graphs = set(artifact.entries["step"].graphs.values())
    assert len(graphs) > 1
    assert [n for n in sizes if n.endswith(".bin")] == ["weights.bin"]
    spread = [sizes[g] for g in graphs]
    assert max(spread) < 2 * min(spread)  # fewer nodes, and the same weights


def test_probes_hold_attention_only_and_say_their_share(build):
    artifact = build("llama").compiled.artifact
    probes = artifact.entries["step"].probes
    assert set(probes) == set(artifact.entries["step"].graphs)
    for file in probes.values():
        assert artifact.files[file].bytes < 8000
        session = open_session(artifact.path / file, threads=1)
        share = float(session.get_modelmeta().custom_metadata_map["share"])
        assert len(session.get_outputs()) == round(share * artifact.facts.num_layers) >= 1
        inputs = {i.name: i.shape for i in session.get_inputs()}
        assert inputs["positions"] == ["B", "T"] and inputs["held"] == ["B", "C"]
        assert inputs["q.0"] == ["B", 4, "T", 10] and inputs["k.0"] == ["B", 2, "C", 10]


def test_an_unknown_variant_is_refused_with_the_near_name(build):
    with pytest.raises(ArtifactError, match="did you mean 'fused'"):
        OrtBackend(build("llama").compiled.artifact, kernels="fuse")


@pytest.mark.parametrize("part", ["variants", "probes"])
def test_the_manifest_names_files_that_are_there(build, part):
    raw = copy.deepcopy(build("llama").compiled.artifact.manifest.raw)
    raw["entries"]["step"][part]["fused"] = "step.fusd.onnx"
    with pytest.raises(ArtifactError, match=rf"entries\.step\.{part}\.fused: .*step\.fused"):
        parse(raw)
    raw["entries"]["step"][part] = ["step.fused.onnx"]
    with pytest.raises(ArtifactError, match=rf"entries\.step\.{part} is"):
        parse(raw)


def test_a_damaged_variant_is_refused_at_load(build, tmp_path):
    folder = tmp_path / "artifact"
    shutil.copytree(build("llama").compiled.artifact.path, folder)  # `save` would link the files
    (folder / "step.fused.onnx").write_bytes(b"nothing")
    raw = copy.deepcopy(build("llama").compiled.artifact.manifest.raw)
    write_manifest(folder, {k: v for k, v in raw.items() if k != "digest"})
    with pytest.raises(ArtifactError, match=r"step\.fused\.onnx"):
        open_artifact(folder)
