"""Weights in bfloat16 and float16 on the Triton target: as they are stored, and products that round their inputs."""

import models
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel.ir.errors import Miscompiled
from accel.ir.weights import Experts, Stacked, Stored
from accel.lowering.triton import lowered
from accel.lowering.triton.lowered import lower_program, rounded_logits, triton_error
from accel.passes.check import NumericCheck, noise, token_errors
from accel.passes.drive import run_both_ways, run_whole

from ..op_case import randn
from .test_triton_models import beside
from .triton_case import Walls, close, needs_gpu, on_device, poisoned

lowered._load_rules()

from accel.lowering.triton.rules import accel_rest, aten_halves  # noqa: E402  (they import triton)
from accel.lowering.triton.writer.halves import as_stored, rounded  # noqa: E402

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
KINDS = ["llama", "gemma2", "mixtral"]  # plain; tied, with a soft cap; experts and a router
STEP = 2.0**-8  # of bfloat16, between 1 and 2
PROMPT = [5, 9, 40, 7]


@pytest.fixture(scope="module")
def made():
    """kind, dtype -> (module, eager)"""
    found = {}

    def of(kind, dtype=BFLOAT16, recipe="base"):
        if (key := (kind, dtype, recipe)) not in found:
            module = models.make(kind, 2).to(dtype)
            module.set_experts_implementation(
                "eager"
            )  # PyTorch's grouped products want other strides
            built = accel.optimize(
                module, recipe, target="eager", max_context=64, max_batch=2, verify=False
            )
            found[key] = module, built
        return found[key]

    yield of
    for _, eager in found.values():
        eager.close()


class Widened(TorchDispatchMode):
    """Counts matrices of float32 that come of matrices in half precision."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, torch.Tensor)]
        real = isinstance(out, torch.Tensor) and not out.is_meta
        wide = real and out.dtype == torch.float32 and out.dim() > 1
        self.count += wide and any(a.dtype in (BFLOAT16, FLOAT16) for a in given)
        return out


def held(program) -> dict[torch.dtype, int]:
    """Bytes on the device by type: of each piece of memory once, whatever reads it."""
    roots = [c.module for c in program.compiled.values()]
    tensors = [v for root in roots for v in vars(root).values() if isinstance(v, torch.Tensor)]
    tensors += [b for root in roots for b in root.buffers()]
    pieces = {t.untyped_storage().data_ptr(): t for t in tensors}
    assert {id(t) for t in tensors} == {id(t) for t in program.tensors.values()}
    found: dict[torch.dtype, int] = {}
    for t in pieces.values():
        found[t.dtype] = found.get(t.dtype, 0) + t.nbytes
    return found


# What lies on the device


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_lie_as_they_are_stored_once_and_are_never_widened(made, kind):
    module, eager = made(kind)
    router = ".mlp.gate.weight"
    stored = {
        p.data_ptr(): p for n, p in module.named_parameters() if p.dim() > 1 and router not in n
    }
    own = [p for n, p in module.named_parameters() if p.dim() == 1 or router in n]
    with Widened() as widened:
        program = lower_program(eager.program)
    routers = sum(router in n for n, _ in module.named_parameters())
    assert widened.count == routers
    bytes_of = held(program)
    assert bytes_of[BFLOAT16] == sum(p.nbytes for p in stored.values())
    rest = [*own] + [program.tensors[n] for n in program.tensors if "rope." in n]
    assert bytes_of[torch.float32] <= sum(4 * p.numel() for p in rest) + 4
    graph = program.compiled["step"].module.graph
    assert not [n for n in graph.nodes if n.target is torch.Tensor.float], "no use widens a weight"


def test_a_copy_in_float32_is_counted(made, monkeypatch):
    """The control of the test above: the program as it was, which widens everything."""
    module, eager = made("llama")
    monkeypatch.setattr("accel.lowering.triton.writer.halves.stored_in_half", lambda program: {})
    with Widened() as widened:
        program = lower_program(eager.program)
    assert widened.count > 4 and not program.halves and BFLOAT16 not in held(program)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["base", "float16"])
def test_a_model_in_float32_stays_so_unless_a_recipe_says_otherwise(made, recipe):
    _, eager = made("llama", torch.float32, recipe)
    program = lower_program(eager.program)
    assert set(program.halves.values()) == ({FLOAT16} if recipe == "float16" else set())
    assert (FLOAT16 in held(program)) == (recipe == "float16")
    graph = program.compiled["step"].module.graph
    wide = [n for n in graph.nodes if str(n.target) == "aten._to_copy.default"]
    assert not wide, "no step widens a weight"


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32], ids=str)
def test_a_report_says_what_is_rounded(dtype):
    module = models.make("llama", 1).to(dtype)
    with accel.optimize(module, target="triton", max_context=32, verify=False) as model:
        notes = model.report["notes"]
    said = [
        "the program is in float32, its weights are stored in bfloat16",
        "products with weights in bfloat16 round their inputs to it, and add in float32",
    ]
    assert [n for n in notes if n in said] == (said if dtype is BFLOAT16 else [])


def test_what_is_stored_in_half_precision_is_found():
    half, wide = Stored(randn(np.random.default_rng(0), 4, 6).bfloat16()), Stored(torch.zeros(4, 6))
    widened = half.changed(torch.Tensor.float)
    for made in (Stacked.rows, Experts.stack, lambda parts: Experts.stack(parts, True)):
        found = as_stored(made([widened, widened]))
        assert found.blank.dtype is BFLOAT16
        assert torch.equal(found.read().float(), made([widened, widened]).read())
        assert as_stored(made([widened, wide])) is None
    assert as_stored(wide) is None
    assert as_stored(widened.changed(torch.neg)) is None, "not what is stored"
    assert as_stored(half.changed(torch.Tensor.half).changed(torch.Tensor.float)) is None


def test_what_another_model_moved_in_half_precision_is_widened_for_other_readers(made):
    """Both draft for each other over one set of parameters."""
    _, eager = made("llama", torch.float32)
    name = "model.layers.0.input_layernorm.weight"
    program = eager.program
    tensors = {name: program.params[name].bfloat16()}
    half = lower_program(program, tensors)
    graph = half.compiled["step"].module.graph
    assert [n.target for n in graph.nodes if n.target is torch.Tensor.float]
    ids = torch.tensor([PROMPT])
    (got, _), (want, _) = (run_both_ways(p, ids)[0] for p in (half, program))
    assert token_errors(got, want).max() < 2e-2


# Products


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_as_the_reference_rounds(dtype, rows, turned):
    rng, k, n, count = np.random.default_rng(rows), 133, 67, 5
    x, bias = randn(rng, rows, k) * 3, randn(rng, n)
    x[0] *= 1e6 if dtype is FLOAT16 else 1  # beyond float16
    weight, ids = randn(rng, count, n, k).to(dtype), torch.arange(rows) % count
    with poisoned():
        walls = Walls()
        given, w, b, i = walls.around((x, weight, bias, ids))
        narrow, scales = aten_halves.in_half(given, dtype)
        one = aten_halves.linear(given, narrow, scales, w[0], b)
        side = w.mT.contiguous() if turned else w
        each = accel_rest.expert_linear_in_half(given, narrow, scales, i, side, turned)
        walls.check()
    exact = rounded(x, dtype).double()
    want = exact @ weight[0].double().t() + bias
    close(one.cpu() / want.abs().amax(-1, True).float(), (want / want.abs().amax(-1, True)).float())
    want = torch.einsum("mk,mnk->mn", exact, weight[ids].double())
    largest = want.abs().amax(-1, True)
    close(each.cpu() / largest.float(), (want / largest).float())


def test_rows_in_float16_are_within_its_range_and_keep_what_is_no_number():
    x = randn(np.random.default_rng(1), 7, 1500)
    x[1], x[2, 3], x[3, 5], x[4, 7] = 0, 3e38, torch.inf, torch.nan
    x[5], x[6] = x[5] * 2.0**-14, x[6].sign() * 2.0**15
    narrow, scales = aten_halves.in_half(on_device(x), FLOAT16)
    got, scales = narrow.float().cpu() * scales.cpu(), scales.cpu().flatten()
    assert narrow[[0, 1, 2, 5, 6]].isfinite().all() and scales.tolist()[:2] == [1, 1]
    assert scales[6] == 2 and scales[2] > 1e30 and scales[5] == 1
    assert torch.equal(got[[0, 1, 2, 5, 6]], rounded(x, FLOAT16)[[0, 1, 2, 5, 6]])
    assert not got[3, 5].isfinite() and got[4, 7].isnan()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_a_gpu_is_asked_for_results_in_float32(dtype):
    """By PyTorch's own rules for shapes and types, which need no GPU."""
    with FakeTensorMode():
        x = torch.empty(3, 1, 64, device="cuda", dtype=dtype)
        weight = torch.empty(3, 32, 64, device="cuda", dtype=dtype).mT
        found = aten_halves.product(x, weight)
        assert found.dtype == torch.float32 and found.shape == (3, 1, 32) and found.is_cuda
        x, weight = (torch.empty(n, 64, device="cuda", dtype=dtype) for n in (5, 32))
        found = aten_halves.product(x, weight.t())
        assert found.dtype == torch.float32 and found.shape == (5, 32) and found.is_cuda


# Whole models


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_eager_target_within_bfloat16(made, kind):
    module, eager = made(kind)
    program, ids = lower_program(eager.program), torch.tensor([PROMPT + [11, 3, 60, 2, 8]])
    want = run_whole(eager.program, ids)
    (reference,) = rounded_logits(program, [ids])
    errors = torch.cat(
        [token_errors(got, want[:, rows]) for got, rows in run_both_ways(program, ids)]
    )
    own = token_errors(reference, want)
    assert 0 < own.max() < 8 * STEP, "the reference's own rounding"
    assert noise(errors, own, chooses=kind == "mixtral") is None
    with torch.no_grad():
        theirs = module(input_ids=ids).logits.float()
    assert errors.median() < token_errors(theirs, want).median(), "nearer than all in bfloat16"


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers_in_bfloat16(made, kind):
    """Where one token is ahead of the others by more than rounding moves logits."""
    module, eager = made(kind)
    with beside(eager) as model:
        tokens = PROMPT + model.generate([PROMPT], 8, eos=[]).tokens[0]
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([tokens])).logits[0].float()
    largest = max(1.0, float(logits.abs().max()))
    decided = 0
    for place in range(len(PROMPT), len(tokens)):
        first, second = logits[place - 1].topk(2).values.tolist()
        if first - second > 8 * STEP * largest:
            assert tokens[place] == int(logits[place - 1].argmax())
            decided += 1
    assert decided >= 4, "most tokens are decided"


def biased(x, weight):
    """A product that leaves out a sixteenth of its terms."""
    few = x.shape[-1] // 16
    return RIGHT(x[..., few:], weight[..., few:, :])


def coarse(x, weight):
    """One whose inputs have 4 bits."""
    return RIGHT(x.to(torch.float8_e4m3fn).to(x.dtype), weight)


RIGHT = aten_halves.product


@pytest.mark.few(2)
@pytest.mark.parametrize("broken", [None, biased, coarse], ids=lambda f: f.__name__ if f else "")
def test_the_check_of_a_build_allows_rounding_and_sees_a_wrong_product(made, monkeypatch, broken):
    _, eager = made("llama")
    check, program = NumericCheck(eager.program), lower_program(eager.program)
    if broken is None:
        assert 1e-4 < triton_error(program, check.cases) < 8 * STEP
        return
    monkeypatch.setattr(aten_halves, "product", broken)
    with pytest.raises(Miscompiled, match="more than the reference, which rounds likewise"):
        triton_error(program, check.cases)


# On a GPU


@pytest.mark.skipif(**needs_gpu)
def test_a_step_takes_no_memory_for_a_weight_in_float32():
    x, weight = (torch.zeros(n, 4096, device="cuda", dtype=BFLOAT16) for n in (1, 4096))
    aten_halves.product(x, weight.t())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert aten_halves.product(x, weight.t()).dtype == torch.float32
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes
