"""Attention under a tree: every path of guesses has the logits that it would have alone."""

import models
import numpy as np
import onnxruntime
import pytest
import torch

from accel.ir.capture import capture
from accel.ir.errors import PassError
from accel.ir.ops.attention import attention
from accel.ir.spec import verify
from accel.lowering.onnx.export import export

from .tree_case import PARENTS, ancestors, paths, prompt_then_tree, with_tree

PROMPT, BATCH = 5, 2


@pytest.fixture(scope="module")
def case():
    """(program with a tree, tokens [B,prompt+tree], the logits of each path alone [B,T,V])."""
    model = models.ARCHITECTURES["mistral"]()  # a window
    tokens = np.random.default_rng(4).integers(0, 90, (BATCH, PROMPT + len(PARENTS)))
    alone = []
    for path in paths():
        ids = np.concatenate([tokens[:, :PROMPT], tokens[:, PROMPT:][:, path]], axis=1)
        with torch.no_grad():
            alone.append(model(torch.from_numpy(ids)).logits[:, -1].numpy())
    return with_tree(capture(model, max_context=64)), tokens, np.stack(alone, axis=1)


def buffers(program):
    return {s.name: s.allocate(B=BATCH, C=PROMPT + len(PARENTS) + 3) for s in program.state}


def test_each_path_is_as_if_alone(case):
    program, tokens, want = case
    step = lambda inputs: program.run("step", inputs)  # noqa: E731
    got = prompt_then_tree(step, buffers(program), tokens, PROMPT, ancestors())
    np.testing.assert_allclose(got, want, atol=2e-5)
    wrong = ancestors()
    wrong[5, 1] = True  # a token of another branch
    got = prompt_then_tree(step, buffers(program), tokens, PROMPT, wrong)
    assert np.abs(got - want).max(axis=(0, 2)).argmax() == 5
    assert np.abs(got - want).max() > 1e-3


def test_onnx_takes_a_tree(case, tmp_path):
    program, tokens, want = case
    found = export(program, tmp_path)["step"]
    assert "variants" not in found, "they leave a tree to the portable lowering"
    session = onnxruntime.InferenceSession(str(tmp_path / "step.onnx"))
    names = [o.name for o in session.get_outputs()]

    def step(inputs):
        out = session.run(names, {n: t.numpy() for n, t in inputs.items()})
        return {n: torch.from_numpy(a) for n, a in zip(names, out, strict=True)}

    got = prompt_then_tree(step, buffers(program), tokens, PROMPT, ancestors())
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_tree_without_its_slots_is_refused(case):
    program = case[0].copy()
    node = program.nodes(attention.default)[0]
    node.kwargs = {"tree": node.kwargs["tree"]}
    with pytest.raises(PassError, match="a tree needs the slot of the call's first key"):
        verify(program, "the test")
