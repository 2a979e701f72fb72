"""Experts of few bits: right, read only where they are chosen, and as small as their codes and scales."""

import json

import models
import numpy as np
import onnxruntime
import pytest
import torch

import accel
from accel.compiler.pipeline import pipeline
from accel.ir.errors import PassError
from accel.ir.ops.experts import expert_linear
from accel.ir.ops.quantized import dequantize, quantized_expert_linear, quantized_linear
from accel.lowering.onnx.export import export
from accel.lowering.onnx.rules import accel_experts
from accel.passes import run
from accel.passes.check import NumericCheck
from accel.passes.recognise.experts import routes
from accel.passes.weights import _blocks
from accel.passes.weights._blocks import round_to_nearest, stacked
from accel.passes.weights.int4_gptq import Int4Gptq
from accel.passes.weights.int8 import Int8

from .op_cases import CASES, Case, few_bits_routed
from .test_ops import assert_close, onnx_session, program_of

EXPERTS, CHOSEN, HIDDEN, INNER, LAYERS = 6, 2, 64, 96, 2
BITS = {"int4": (4, 32), "int8": (8, 32)}  # and block


def mixtral():
    return models.random(
        "mixtral", vocab_size=97, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, max_position_embeddings=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return mixtral()


@pytest.fixture(scope="module", params=BITS)
def both(request, model):
    """(recipe, the ONNX build, the eager one)."""
    recipe = {"weights": {"use": request.param, "smallest": 256}}
    eager = accel.optimize(model, recipe, max_context=64, target="eager")
    with accel.optimize(model, recipe, max_context=64) as compiled:
        yield request.param, compiled, eager


@pytest.mark.long
def test_greedy_tokens_are_those_of_the_reference(both):
    """Each token is the reference's best; two that are nearly equal there may change places."""
    _, compiled, eager = both
    prompt = np.random.default_rng(1).integers(3, 97, (1, 9))
    found = compiled.generate(prompt, max_new_tokens=30).tokens[0]
    made = np.array(found)[-30:]
    logits = eager.logits(np.concatenate([prompt, made[None, :-1]], 1))[0, -30:]
    second, first = np.sort(logits, -1)[:, -2:].T
    clear = first - second > 0.02 * np.abs(logits).max()
    assert clear.mean() > 0.5
    assert (logits.argmax(-1) == made)[clear].all()


@pytest.mark.few(1)
@pytest.mark.long
def test_bytes_are_those_of_the_formula(both):
    name, compiled, _ = both
    bits, block = BITS[name]
    program = compiled.program
    assert not program.nodes(expert_linear.default)
    nodes = program.nodes(quantized_expert_linear.default, entry=program.step)
    assert len(nodes) == 2 * LAYERS
    held = sum(program.params.blank(n.args[i].target).nbytes for n in nodes for i in (2, 3))
    blocks = 2 * INNER * -(-HIDDEN // block) + HIDDEN * -(-INNER // block)
    assert held == LAYERS * EXPERTS * blocks * (block * bits // 8 + 4)
    # beside experts: attention and both ends, as they are stored, and alignment
    size, stored = compiled.report["bytes"]["weights.bin"], compiled.report["weights"]
    assert held < size < held + 90_000
    assert all(".int" in name for name in program.params if "experts" in name)
    rest = [n for n in program.params if "experts" not in n and program.params.blank(n).dim() > 1]
    weights = [n for n in rest if ".int" in n or "gate" in n]
    total = held + sum(program.params.blank(n).nbytes for n in weights)
    assert stored["bytes"] == total
    count = (
        LAYERS * (HIDDEN * (EXPERTS + 3 * HIDDEN) + EXPERTS * 3 * HIDDEN * INNER) + 2 * 97 * HIDDEN
    )
    assert stored["bits_per_weight"] == pytest.approx(8 * total / count, abs=1e-3)


def test_a_step_computes_the_chosen_experts_only(tmp_path):
    case = Case("wide", quantized_expert_linear, few_bits_routed(4, 64, 32, False), (2, 3, 4))
    export(program_of(case), tmp_path)
    operands = case.operands((1, 4, 4))
    assert computed(tmp_path, operands[0], torch.tensor([3, 0, 3, 3])) == 2
    assert computed(tmp_path, operands[0], torch.tensor([4, 1, 2, 0])) == 4


def computed(folder, x, ids):
    """How many products onnxruntime computes for rows x and the experts that they chose."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = onnxruntime.InferenceSession(str(folder / "step.onnx"), options)
    session.run(None, {"x0": x.numpy(), "x1": ids.numpy()})
    with open(session.end_profiling(), encoding="utf-8") as file:
        events = json.load(file)
    return sum(e.get("args", {}).get("op_name") == "MatMulNBits" for e in events)


def test_a_wrong_choice_is_caught(monkeypatch, tmp_path):
    right = accel_experts._expert
    wrong = lambda graphs, first: right(graphs[::-1] if first == 0 else graphs, first)  # noqa: E731
    monkeypatch.setattr(accel_experts, "_expert", wrong)
    case = CASES["quantized_expert_linear-4-64-32"]
    operands = case.operands((1, 5, 5))
    with pytest.raises(AssertionError, match="not close"):
        assert_close(onnx_session(case, tmp_path)(operands), case.op.reference(*operands))


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["olmoe", "aria_text"])  # [X,N,K], and [X,K,N]
def test_each_expert_keeps_its_own_weights(captured, architecture, monkeypatch):
    program = captured(architecture)
    check = NumericCheck(program)
    last = run(program, [*pipeline(), Int8(smallest=256)], check)[-1]
    assert program.nodes(quantized_expert_linear.default)
    assert last.error < 0.2

    wrong = lambda parts: stacked([*parts[1:], parts[0]])  # noqa: E731
    monkeypatch.setattr(_blocks, "stacked", wrong)
    program = captured(architecture)
    with pytest.raises(PassError, match="changed what the program computes"):
        run(program, [*pipeline(), Int8(smallest=256)], NumericCheck(program))


def test_what_chooses_stays_as_it_is(captured):
    program = captured("olmoe")
    steps = run(program, [*pipeline(), Int8(smallest=16)])
    assert sum("router of a mixture of experts" in reason for reason in steps[-1].refused) == 2
    assert not any(routes(n) for n in program.nodes(quantized_linear.default))


def harm(weights, packed, inputs, ids):
    """Squared error of each expert's products with its own rows."""
    total = 0.0
    for e, weight in enumerate(weights):
        kept = dequantize(packed.q[e], packed.scales[e], None, packed.bits, packed.block)[
            :, : weight.shape[1]
        ]
        total += float((inputs[ids == e] @ (kept - weight).t()).square().sum())
    return total


def test_each_expert_is_rounded_by_its_own_rows():
    torch.manual_seed(0)
    weights, ids = torch.randn(4, 12, 64), torch.arange(300) % 3  # nobody chooses the last
    causes = torch.randn(4, 8, 64)
    inputs = torch.stack([torch.randn(8) @ causes[e] for e in ids]) + 0.05 * torch.randn(300, 64)
    method = Int4Gptq()
    fed = method._experts(weights, inputs, ids, 4)
    plain = stacked([round_to_nearest(w, 4, 32, True) for w in weights])
    others = method._experts(weights, inputs, (ids + 1) % 3, 4)
    assert harm(weights, fed, inputs, ids) < 0.5 * harm(weights, plain, inputs, ids)
    assert harm(weights, others, inputs, ids) > harm(weights, fed, inputs, ids)
    assert torch.equal(fed.q[3], plain.q[3]) and torch.equal(fed.scales[3], plain.scales[3])
